// What a lane stores of 16 rows and 8 tokens of sums, of which wgmma leaves it four: rows g and
// g + 8, tokens 2t and 2t + 1 (lane = 4g + t). Neighbours exchange halves, so that a lane has one
// token and values that lie beside one another.
//
// Offers: sums_of; lane_token (of the 8, the lane's own); gated and lane_column (two activations of
// up, whose rows are gates and ups in turn, and the first one's column of 8); plain and lane_row
// (four rows of down in bf16, and the first one's row of 16). Barriers: none; all lanes of a warp
// call together.
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

// Lanes of an even row hold gates, of the odd row above it ups: each finishes one of its two
// tokens, and takes a neighbour's value of that token to store two at once.
__device__ __forceinline__ u32 gated(const Sums& s, const Gate& gate, int lane) {
  const bool up = lane >> 2 & 1, q = lane >> 3 & 1;
  const float r0 = __shfl_xor_sync(~0u, up ? s.d0 : s.d1, 4),
              r1 = __shfl_xor_sync(~0u, up ? s.d2 : s.d3, 4);
  const float v0 = gate(up ? r0 : s.d0, up ? s.d1 : r0), v1 = gate(up ? r1 : s.d2, up ? s.d3 : r1);
  const float other = __shfl_xor_sync(~0u, q ? v0 : v1, 8);
  return q ? pack(other, v1) : pack(v0, other);
}

// A lane of an even row takes its first token, of an odd row the second, and of four rows together
// one half each.
__device__ __forceinline__ uint2 plain(const Sums& s, int lane) {
  const bool odd = lane >> 2 & 1, upper = lane >> 3 & 1;
  const float r0 = __shfl_xor_sync(~0u, odd ? s.d0 : s.d1, 4),
              r1 = __shfl_xor_sync(~0u, odd ? s.d2 : s.d3, 4);
  const u32 low = odd ? pack(r0, s.d1) : pack(s.d0, r0),
            high = odd ? pack(r1, s.d3) : pack(s.d2, r1);
  const u32 other = __shfl_xor_sync(~0u, upper ? low : high, 8);
  return upper ? make_uint2(other, high) : make_uint2(low, other);
}
