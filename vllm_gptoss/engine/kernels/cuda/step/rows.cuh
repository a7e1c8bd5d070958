// The consumers' side of the ring, dense weight rows as mma operands, a staged row of activations.
//
// Offers: next_chunk, release_chunks; Rows, load_rows, multiply_add; put_dense, sum_dense (sums
// over the warps, rows of [WARPS] floats in scratch); load_frag; split8, join8. Barriers: mbarriers
// `full` and `empty`.
#include "../mma.cuh"
#include "state.cuh"

// Consumers: the next chunk's offset in the ring, once it is there.
__device__ __forceinline__ u32 next_chunk(Block& b, u32 size) {
  const u32 i = b.cursor.i, at = take(b.cursor, size);
  bar_wait(b.full + 8 * (i % BARS), (i / BARS) & 1);
  return at;
}
__device__ __forceinline__ void release_chunks(const Block& b, int count) {
  __syncwarp();
  if (SPEAKERS == 1) {
    if (b.lane < count) bar_arrive(b.empty + 8 * ((b.cursor.i - 1 - b.lane) % BARS));
  } else {
    for (int i = 0; i < count; ++i) bar_arrive(b.empty + 8 * ((b.cursor.i - 1 - i) % BARS));
  }
}

// 16 weight rows of one block of 64 columns, rows g and g + 8 of each lane, 16 of their columns.
struct Rows {
  int4 low[2], high[2];
};
__device__ __forceinline__ void load_rows(Rows& r, const u8* low, const u8* high, bool both) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    r.low[h] = *(const int4*)(low + h * 16);
    r.high[h] = make_int4(0, 0, 0, 0);
    if (both) r.high[h] = *(const int4*)(high + h * 16);
  }
}
// Adds the rows times the token's fragments. Two sums, so that fewer mma depend on each other. Of
// the product's eight columns, the first is the token's and the second its rounding error, if used.
// Lanes of groups 0 and 1 hold these columns as operands, lanes with j = 0 as results.
__device__ __forceinline__ void multiply_add(
    float (&c)[4], float (&odd)[4], const Rows& r, const u32 (&frag)[8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int4 v = r.low[h], w = r.high[h];
    mma(c, v.x, w.x, v.y, w.y, frag[4 * h], frag[4 * h + 1]);
    mma(odd, v.z, w.z, v.w, w.w, frag[4 * h + 2], frag[4 * h + 3]);
  }
}
// A warp's share of 16 rows from `row` on, to be summed: [rows][WARPS].
__device__ __forceinline__ void put_dense(
    const Block& b, const float (&c)[4], const float (&odd)[4], int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + b.g + h * 8;
    if (b.j == 0 && r < DENSE_ROWS)
      b.dense[r * WARPS + b.warp] = (c[2 * h] + odd[2 * h]) + (c[2 * h + 1] + odd[2 * h + 1]);
  }
}
__device__ __forceinline__ float sum_dense(const Block& b, int row) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += b.dense[row * WARPS + w];
  return sum;
}
// This warp's columns of the staged row, as column `group` of the operand.
__device__ __forceinline__ void load_frag(u32 (&frag)[HPW][8], const Block& b, int group) {
  if (b.g != group) return;
#pragma unroll
  for (int k = 0; k < HPW; ++k) {
    read16(frag[k], b.xs + (b.warp * HPW + k) * 128 + b.j * 32);
  }
}

__device__ __forceinline__ void split8(float (&f)[8], int4 v) {
  const u32 w[4] = {(u32)v.x, (u32)v.y, (u32)v.z, (u32)v.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float2 p = unpack(w[e]);
    f[2 * e] = p.x;
    f[2 * e + 1] = p.y;
  }
}
__device__ __forceinline__ int4 join8(const float (&f)[8]) {
  return make_int4(pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7]));
}
