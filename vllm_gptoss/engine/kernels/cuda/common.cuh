// Types of the kernels, bfloat16 in registers, 16-byte words.
//
// Offers: u8 to u64, bf16 (the bits); pack and unpack of two bf16 in 32 bits, the lower half first;
// add_weighted and pack8 of eight; load16 (global memory that another block wrote), read16 (shared
// memory), store16 of 16 bf16. Barriers: none.
//
// Headers hold one part each and include what they need; each is in a kernel's text once:
// `nvrtc.source`.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

__device__ __forceinline__ u32 smem_u32(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 pack(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float2 unpack(u32 v) {
  return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
}
// Eight sums in float32, and the same as bf16.
__device__ __forceinline__ void add_weighted(float (&sum)[8], const uint4& v, float weight) {
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int w = 0; w < 4; w++) {
    const float2 two = unpack(words[w]);
    sum[2 * w] = fmaf(two.x, weight, sum[2 * w]);
    sum[2 * w + 1] = fmaf(two.y, weight, sum[2 * w + 1]);
  }
}
__device__ __forceinline__ uint4 pack8(const float (&sum)[8]) {
  return make_uint4(
      pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
}
__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ bf16 to_bf16(float f) {
  bf16 h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
__device__ __forceinline__ float rounded(float v) { return to_float(to_bf16(v)); }

// Word i of four; i is known when compiled.
__device__ __forceinline__ u32 word(const int4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}
__device__ __forceinline__ void words(u32 (&to)[8], const int4& a, const int4& b) {
  to[0] = a.x;
  to[1] = a.y;
  to[2] = a.z;
  to[3] = a.w;
  to[4] = b.x;
  to[5] = b.y;
  to[6] = b.z;
  to[7] = b.w;
}
// 16 bf16 (32 bytes) of global memory, not cached in L1: another block wrote them.
__device__ __forceinline__ void load16(u32 (&v)[8], const bf16* p) {
  const int4* q = (const int4*)p;
  const int4 a = __ldcg(q), b = __ldcg(q + 1);
  words(v, a, b);
}
// 16 bf16 of shared memory, at a multiple of 16 bytes.
__device__ __forceinline__ void read16(u32 (&v)[8], const void* p) {
  const int4* q = (const int4*)p;
  const int4 a = q[0], b = q[1];
  words(v, a, b);
}
__device__ __forceinline__ void store16(bf16* p, const u32 (&v)[8]) {
  int4* q = (int4*)p;
  q[0] = make_int4(v[0], v[1], v[2], v[3]);
  q[1] = make_int4(v[4], v[5], v[6], v[7]);
}
