// What a lane stores of 16 rows and 8 tokens of sums, of which wgmma leaves it four: rows g and
// g + 8, tokens 2t and 2t + 1 (lane = 4g + t). Neighbours exchange halves, so that a lane has one
// token and adjacent values.
//
// Offers: lane_token (of the 8, the lane's own); gated and lane_column (two activations of up, with
// gate and up rows alternating, and the column of the first of 8); plain and lane_row (four rows of
// down in bf16, and the row of the first of 16). gated and plain take AT_ONCE sets of 8 tokens,
// since the instructions of one set depend on each other: this saves 1 % of all cycles. Barriers:
// none; all lanes of a warp call together.
#include "common.cuh"
#include "mxfp4.cuh"
#include "swiglu.cuh"

__device__ __forceinline__ int lane_token(int lane) { return 2 * (lane & 3) + (lane >> 2 & 1); }
__device__ __forceinline__ int lane_column(int lane) {
  return (lane >> 3 & 2) + 4 * (lane >> 3 & 1);
}
__device__ __forceinline__ int lane_row(int lane) { return (lane >> 2 & 4) + (lane >> 3 & 1) * 8; }

// Rows g and g + 8 of both tokens, biases included: d0 and d1 of row g.
struct Sums {
  float d0, d1, d2, d3;
};
// Of the j-th 8 tokens of c, the products times 2^-64.
template <int HALF>
__device__ __forceinline__ Sums sums_of(float (&c)[HALF], int j, float bias0, float bias8) {
  return {fmaf(c[4 * j], TWO_64F, bias0), fmaf(c[4 * j + 1], TWO_64F, bias0),
      fmaf(c[4 * j + 2], TWO_64F, bias8), fmaf(c[4 * j + 3], TWO_64F, bias8)};
}

// The other lane's rows of the lane's own token: rows g ^ 1 and g + 8 ^ 1. Of an even row the first
// of both tokens is its own, of an odd row the second.
__device__ __forceinline__ float2 neighbours(const Sums& s, int lane) {
  const bool odd = lane >> 2 & 1;
  return {__shfl_xor_sync(~0u, odd ? s.d0 : s.d1, 4), __shfl_xor_sync(~0u, odd ? s.d2 : s.d3, 4)};
}

// Rows are gates and ups in turn: two activations of the lane's own token.
__device__ __forceinline__ float2 activations(
    const Sums& s, float2 theirs, const Gate& gate, int lane) {
  const bool up = lane >> 2 & 1;
  return {gate(up ? theirs.x : s.d0, up ? s.d1 : theirs.x),
      gate(up ? theirs.y : s.d2, up ? s.d3 : theirs.y)};
}
// With another lane's of that token, two adjacent values.
__device__ __forceinline__ u32 together(float2 v, int lane) {
  const bool q = lane >> 3 & 1;
  const float other = __shfl_xor_sync(~0u, q ? v.x : v.y, 8);
  return q ? pack(other, v.y) : pack(v.x, other);
}

// The lane's own token's rows of both lanes, in bf16: g and g ^ 1, g + 8 and g + 8 ^ 1.
__device__ __forceinline__ uint2 rounded(const Sums& s, float2 theirs, int lane) {
  const bool odd = lane >> 2 & 1;
  return {odd ? pack(theirs.x, s.d1) : pack(s.d0, theirs.x),
      odd ? pack(theirs.y, s.d3) : pack(s.d2, theirs.y)};
}
// With another lane's of that token, four adjacent rows.
__device__ __forceinline__ uint2 together(uint2 v, int lane) {
  const bool upper = lane >> 3 & 1;
  const u32 other = __shfl_xor_sync(~0u, upper ? v.x : v.y, 8);
  return upper ? make_uint2(other, v.y) : make_uint2(v.x, other);
}

constexpr int AT_ONCE = 2;
// Sets of 8 tokens, each with the other lane's rows.
struct Sets {
  Sums own[AT_ONCE];
  float2 theirs[AT_ONCE];
};
// From the j-th of c on. Past the last one it is that one again.
template <int HALF>
__device__ __forceinline__ Sets sets_of(float (&c)[HALF], int j, float2 bias, int lane) {
  Sets s;
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) s.own[i] = sums_of(c, min(j + i, HALF / 4 - 1), bias.x, bias.y);
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) s.theirs[i] = neighbours(s.own[i], lane);
  return s;
}
template <int HALF>
__device__ __forceinline__ void gated(
    u32 (&to)[AT_ONCE], float (&c)[HALF], int j, float2 bias, const Gate& gate, int lane) {
  const Sets s = sets_of(c, j, bias, lane);
  float2 v[AT_ONCE];
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) v[i] = activations(s.own[i], s.theirs[i], gate, lane);
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) to[i] = together(v[i], lane);
}
template <int HALF>
__device__ __forceinline__ void plain(
    uint2 (&to)[AT_ONCE], float (&c)[HALF], int j, float2 bias, int lane) {
  const Sets s = sets_of(c, j, bias, lane);
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) to[i] = rounded(s.own[i], s.theirs[i], lane);
#pragma unroll
  for (int i = 0; i < AT_ONCE; i++) to[i] = together(to[i], lane);
}
