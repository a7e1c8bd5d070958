// MXFP4 weights as operands of mma.m16n8k16: rows are M, tokens are N. Included as text:
// nvrtc.source.
#include "mma.cuh"

__device__ __forceinline__ uint4 lds16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(a));
  return v;
}
__device__ __forceinline__ u32 lds4(u32 a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
  return v;
}
// Before sm_90 there is only the sum with -0, which changes no product.
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
  u32 d;
#if __CUDA_ARCH__ >= 900
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
  return d;
}

// The fourth pair of a word of packed e2m1: bits 14, 13, 11 and 10 of each half, in the holes of
// the other three. Of each half only the upper byte matters, so one permute saves right shifts.
// The product is the sum of both left shifts, by 1 and by 5. Carries outside the pair reach at most
// bit 5 (tests/engine/experts/test_layout.py tests all words).
__device__ __forceinline__ u32 fourth(u32 w) {
  return ((__byte_perm(w, 0, 0x3311) & 0x402C402Cu) * 34u) & 0x81C081C0u;
}

// One 32-bit word of packed e2m1 is four bf16x2 A registers; each e2m1 pattern s|ee|m sits at bits
// 15 and 8..6, which as a bfloat16 is the value x 2^-126. The activations carry 2^64, so the
// products are values x 2^-62, far from both ends of float32, and the group's scale brings the
// missing 2^62: every factor is a power of two, nothing is rounded.
//
// Integer logic and shifts run at half rate and bound this kernel's arithmetic, so a scale's
// exponent is moved by a product, in the other pipe. Its factor 2^23 is a kernel argument: a
// constant would be turned back into a shift.
__device__ __forceinline__ void step(float (&c)[4], u32 w, u32 b0, u32 b1) {
  constexpr u32 M = 0x81C081C0u;
  mma(c, w & M, (w << 3) & M, (w << 6) & M, fourth(w), b0, b1);
}
constexpr u32 TWO_64 = 0x5F805F80u;  // bf16x2
constexpr float TWO_64F = 18446744073709551616.f;

// One group of 32 columns: two steps, then c += scale x sum. Scales are e8m0 (2^(s - 127)) of rows
// g and g + 8.
__device__ __forceinline__ void group(
    float (&c)[4], u32 w0, u32 w1, float lo, float hi, const u32* b) {
  float d[4] = {0.f, 0.f, 0.f, 0.f};
  step(d, w0, b[0], b[1]);
  step(d, w1, b[2], b[3]);
  c[0] = fmaf(d[0], lo, c[0]);
  c[1] = fmaf(d[1], lo, c[1]);
  c[2] = fmaf(d[2], hi, c[2]);
  c[3] = fmaf(d[3], hi, c[3]);
}

// Byte I of the scale word as the float 2^(s - 127 + 62); s <= 192, checked at load.
template <int I> __device__ __forceinline__ float scale(u32 word, u32 two_23) {
  u32 d;
  asm("mad.lo.u32 %0, %1, %2, %3;"
      : "=r"(d)
      : "r"(__byte_perm(word, 0, 0x4440 | I)), "r"(two_23), "n"(62u << 23));
  return __uint_as_float(d);
}

// The same four bf16x2 A registers of two words, times their group's scales: of `scales` the lower
// half is row g's, the upper one row g + 8's. The values x 2^(s - 127) x 2^-64, exact for scale
// codes of 66 to 192.
__device__ __forceinline__ void scaled(u32* a, u32 w0, u32 w1, u32 scales) {
  constexpr u32 M = 0x81C081C0u;
  u32 lo, hi;  // a modifier of the multiplication, no instruction
  asm("{.reg .b16 l, h;\n mov.b32 {l, h}, %2;\n mov.b32 %0, {l, l};\n mov.b32 %1, {h, h};}"
      : "=r"(lo), "=r"(hi)
      : "r"(scales));
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 w = i ? w1 : w0;
    a[4 * i] = mul_bf16x2(w & M, lo);
    a[4 * i + 1] = mul_bf16x2((w << 3) & M, hi);
    a[4 * i + 2] = mul_bf16x2((w << 6) & M, lo);
    a[4 * i + 3] = mul_bf16x2(fourth(w), hi);
  }
}
// Bytes I and I + 1 of the scale word as the bf16x2 2^(s - 127 + 62); s <= 192. `two_7` is an
// argument as `two_23` is.
template <int I> __device__ __forceinline__ u32 scales16(u32 word, u32 two_7) {
  u32 d;
  asm("mad.lo.u32 %0, %1, %2, %3;"
      : "=r"(d)
      : "r"(__byte_perm(word, 0, 0x4040 | (I + 1) << 8 | I)), "r"(two_7), "n"(0x1F001F00u));
  return d;
}

// The row tile of the n-th unit of an expert with `tiles`: neighbours share one 64-byte line of
// scales, tiles t and t + 8 of a block of 256 rows.
__device__ __forceinline__ int row_tile(int n, int tiles) {
  return n < tiles / 16 * 16 ? (n & ~15) + ((n & 1) << 3) + ((n & 15) >> 1) : n;
}
