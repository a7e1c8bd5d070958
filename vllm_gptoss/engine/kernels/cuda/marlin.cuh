// MXFP4 weights as vLLM's Marlin kernel stores them, as operands of mma.m16n8k16: rows are M,
// tokens are N.
//
// A tile of 16 columns and 64 rows is 512 bytes: lane 4 g + j has 16 of them, a word for each of
// four row tiles of 16. The eight e2m1 of a word, from bit 0 on:
//   row g, column 2j; g, 2j + 8; g + 8, 2j; g + 8, 2j + 8; and the four of the next column again.
// The scales of 32 columns and 64 rows are 64 bytes, e8m0: eight for each g, of rows
//   g, g + 16, g + 8, g + 24, g + 32, g + 48, g + 40, g + 56.
// benchmarks/marlin.py has both maps in Python.
//
// Offers: marlin_group (32 columns of a row tile), lds8, marlin_bias. Barriers: none; all lanes of
// a warp call together.
#include "common.cuh"
#include "mxfp4.cuh"

__device__ __forceinline__ uint2 lds8(u32 a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a));
  return v;
}

// The four A registers of a word. Each e2m1 pattern s|ee|m moves to bits 15 and 8..6 of its half,
// which as a bfloat16 is the value x 2^-126 (see mxfp4.cuh). A product with two powers of two is
// both shifts at once, in another pipe than the logic; no carry leaves a half.
__device__ __forceinline__ void marlin_registers(u32 (&a)[4], u32 w) {
  constexpr u32 M = 0x81C081C0u, FIRST = 0x000F000Fu, SECOND = 0x00F000F0u;
  const u32 upper = __byte_perm(w, 0, 0x4341);
  a[0] = ((w & FIRST) * 4160u) & M;
  a[2] = ((w & SECOND) * 260u) & M;
  a[1] = ((upper & FIRST) * 4160u) & M;
  a[3] = ((upper & SECOND) * 260u) & M;
}

// One group of 32 columns: the words of its two tiles, then c += scale x sum for H x 8 tokens. lo
// and hi are the scales of rows g and g + 8.
template <int H, int HALVES, int R>
__device__ __forceinline__ void marlin_group(
    float (&c)[HALVES][R][4], int r, u32 w0, u32 w1, float lo, float hi, const u32 (&b)[H][4]) {
  u32 a0[4], a1[4];
  marlin_registers(a0, w0);
  marlin_registers(a1, w1);
#pragma unroll
  for (int h = 0; h < H; h++) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    mma(d, a0[0], a0[1], a0[2], a0[3], b[h][0], b[h][1]);
    mma(d, a1[0], a1[1], a1[2], a1[3], b[h][2], b[h][3]);
    c[h][r][0] = fmaf(d[0], lo, c[h][r][0]);
    c[h][r][1] = fmaf(d[1], lo, c[h][r][1]);
    c[h][r][2] = fmaf(d[2], hi, c[h][r][2]);
    c[h][r][3] = fmaf(d[3], hi, c[h][r][3]);
  }
}

// Where the bias of a row lies, counted from its expert's first.
__device__ __forceinline__ int marlin_bias(int row) {
  return (row & ~31) + (row >> 1 & 3) * 8 + (row >> 3 & 3) * 2 + (row & 1);
}
