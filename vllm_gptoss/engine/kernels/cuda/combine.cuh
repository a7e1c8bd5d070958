// The weighted sums of the experts' outputs, across blocks. Included as text: nvrtc.source.
//
// A word holds a partial sum for another block, or two sums in bf16. The NaN EMPTY means "not yet
// written". The buffer is all EMPTY between launches: the reader of a partial sum writes EMPTY
// back. There is no fence and no counter, since the value itself is the flag.
#include "common.cuh"

constexpr u32 EMPTY = 0xFFFFFFFFu;
__device__ __forceinline__ void give(u32* p, float v) {
  const u32 bits = __float_as_uint(v) == EMPTY ? 0x7FC00000u : __float_as_uint(v);
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(bits) : "memory");
}
// Two words of two bf16 each: `pack` makes a NaN 0x7FFF, so none is EMPTY.
__device__ __forceinline__ void give2(u32* p, uint2 v) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y)
      : "memory");
}
__device__ __forceinline__ uint4 look4(const u32* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p)
      : "memory");
  return v;
}
__device__ __forceinline__ bool arrived(uint4 v) {
  return v.x != EMPTY && v.y != EMPTY && v.z != EMPTY && v.w != EMPTY;
}

// This block's share of the outputs, by MEMBERS of its threads: four of a token at a time, its
// partial sums in the order of its choices as soon as all have arrived; those with a negative id
// are none. Rows of `out` are STRIDE elements apart.
template <int PICKS, int ROWS, int MEMBERS, int STRIDE = ROWS, class Id>
__device__ __forceinline__ void combine_all(
    const Id* ids, u32* parts, u16* out, int tokens, int thread) {
  const int total = tokens * (ROWS / 4), each = (total + gridDim.x - 1) / gridDim.x;
  for (int i = thread; i < each; i += MEMBERS) {
    const int at = blockIdx.x * each + i;
    if (at >= total) break;
    const int token = at / (ROWS / 4), row = at % (ROWS / 4) * 4;
    u32* from = parts + (u64)token * PICKS * ROWS + row;
    uint4 seen[PICKS];
    float4 sum = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int a = 0; a < PICKS; a++)
      seen[a] = ids[token * PICKS + a] < 0 ? make_uint4(0, 0, 0, 0) : look4(from + a * ROWS);
#pragma unroll
    for (int a = 0; a < PICKS; a++) {
      while (!arrived(seen[a])) {
        __nanosleep(40);
        seen[a] = look4(from + a * ROWS);
      }
      sum.x += __uint_as_float(seen[a].x);
      sum.y += __uint_as_float(seen[a].y);
      sum.z += __uint_as_float(seen[a].z);
      sum.w += __uint_as_float(seen[a].w);
    }
#pragma unroll
    for (int a = 0; a < PICKS; a++)
      if (ids[token * PICKS + a] >= 0)
        *reinterpret_cast<uint4*>(from + a * ROWS) = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    *reinterpret_cast<uint2*>(out + (u64)token * STRIDE + row) =
        make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
  }
}
