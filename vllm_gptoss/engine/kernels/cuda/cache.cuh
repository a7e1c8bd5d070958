// Element types of the paged KV cache: bf16, or e4m3 with one scale for all keys and one for all
// values of a layer. A stored e4m3 code times its scale is the key or value.
//
// Offers: Bf16 and E4m3, and Cache, the one that the macro CACHE names (Bf16 without it); Element;
// widen (two codes as bf16), encode and encode4 (two and four values as codes). Members of both:
// Element; Scales, with softmax (takes the softmax scale) and out (takes an output). Barriers:
// none.
//
// widen is exact: e4m3 has 3 bits of mantissa and values of 2^-9 to 448, subnormals included, all
// of which are normal numbers of float16 (from 2^-14) and of bfloat16. Products with bf16 queries
// and weights are therefore those of the stored values, and the scales are factors of all scores
// and of all outputs of a head.
//
// encode is vLLM's reshape_and_cache_flash (`scaled_vec_conversion` of quant_utils.cuh): float32
// division, rounding to nearest even, saturation to 448; NaN stays NaN. The division is in PTX,
// because --use_fast_math would replace it by an approximation and subnormal scales by zero.
#include "common.cuh"

struct Bf16 {
  using Element = bf16;
  struct Scales {
    template <class A> __device__ __forceinline__ explicit Scales(const A&) {}
    __device__ __forceinline__ float softmax(float scale) const { return scale; }
    __device__ __forceinline__ float out(float v) const { return v; }
  };
};

struct E4m3 {
  using Element = u8;
  struct Scales {
    float k, v;
    // a: has the addresses `k_scale` and `v_scale`, which no kernel writes.
    template <class A>
    __device__ __forceinline__ explicit Scales(const A& a)
        : k(__ldg(a.k_scale)), v(__ldg(a.v_scale)) {}
    __device__ __forceinline__ float softmax(float scale) const { return scale * k; }
    __device__ __forceinline__ float out(float sum) const { return sum * v; }
  };
};

#ifndef CACHE
#define CACHE Bf16
#endif
using Cache = CACHE;
using Element = Cache::Element;

// Two codes, the lower byte first.
__device__ __forceinline__ u32 widen(u32 two) {
  u32 h;
  float lo, hi;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((u16)two));
  asm("{.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;}"
      : "=f"(lo), "=f"(hi)
      : "r"(h));
  return pack(lo, hi);
}

__device__ __forceinline__ float divided(float v, float by) {
  float q;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(v), "f"(by));
  return q;
}
__device__ __forceinline__ u32 encode(float lo, float hi, float scale) {
  u16 two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
      : "=h"(two)
      : "f"(divided(hi, scale)), "f"(divided(lo, scale)));
  return two;
}
// Of four bf16.
__device__ __forceinline__ u32 encode4(uint2 v, float scale) {
  const float2 lo = unpack(v.x), hi = unpack(v.y);
  return encode(lo.x, lo.y, scale) | encode(hi.x, hi.y, scale) << 16;
}
