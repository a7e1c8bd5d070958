// norm(x + r) of every token of a step (sm_80 on): a CTA a token, 8 columns a thread.
//
// Macros set by the host (engine/kernels/norm_rope_router.py): COLUMNS, C, a multiple of 8.
#include "barriers.cuh"
#include "common.cuh"
#include "tiled.cuh"

constexpr int PIECES = COLUMNS / 8, WARPS = (PIECES + 31) / 32;

struct Args {
  const bf16* x;     // [T, C]
  const bf16* r;     // [T, C] residual; null: none
  bf16* r_out;       // [T, C] x + r; null: not wanted
  const bf16* norm;  // [C]
  bf16* out;         // [T, C], or as product_many.cu wants it
  float eps;
  int padded;  // 0: [T, C]; else tiles of 64 columns, [C / 64, padded, 64], pieces swizzled
};

extern "C" __global__ void __launch_bounds__(WARPS * 32) norm_many(const Args a) {
  __shared__ float squares[WARPS];
  pdl_launch();
  const int piece = threadIdx.x, warp = threadIdx.x >> 5;
  const bool mine = piece < PIECES;
  const long long at = (long long)blockIdx.x * PIECES + piece;
  int4 x = {}, r = {}, norm = {};
  if (mine) norm = ((const int4*)a.norm)[piece];
  pdl_wait();
  if (mine) {
    x = __ldcg((const int4*)a.x + at);
    if (a.r != nullptr) r = __ldcg((const int4*)a.r + at);
  }
  u32 sum[4];
  float square = 0.f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 f = unpack(word(x, i)), h = unpack(word(r, i));
    sum[i] = pack(f.x + h.x, f.y + h.y);
    const float2 s = unpack(sum[i]);
    square += s.x * s.x + s.y * s.y;
  }
  if (mine && a.r_out != nullptr) ((int4*)a.r_out)[at] = make_int4(sum[0], sum[1], sum[2], sum[3]);
#pragma unroll
  for (int step = 16; step; step >>= 1) square += __shfl_xor_sync(~0u, square, step);
  if ((threadIdx.x & 31) == 0) squares[warp] = square;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) total += squares[w];
  const float scale = rsqrtf(total / COLUMNS + a.eps);
  if (mine) {
    u32 out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 s = unpack(sum[i]), w = unpack(word(norm, i));
      out[i] = pack(s.x * scale * w.x, s.y * scale * w.y);
    }
    const int token = blockIdx.x;
    const long long to = a.padded ? tiled_piece(piece, token, a.padded) : at;
    ((int4*)a.out)[to] = make_int4(out[0], out[1], out[2], out[3]);
  }
}
