// What a product with normed activations multiplies: x times the norm's weight, exact to 16 bits.
//
// Offers: weigh. Barriers: none.
#include "common.cuh"

// Two elements of x times the norm's weight, each as a sum of two bf16.
__device__ __forceinline__ void weigh(u32& part, u32& rest, u32 h, u32 norm) {
  const float2 f = unpack(h), w = unpack(norm);
  part = pack(f.x * w.x, f.y * w.y);
  const float2 p = unpack(part);
  rest = pack(f.x * w.x - p.x, f.y * w.y - p.y);
}
