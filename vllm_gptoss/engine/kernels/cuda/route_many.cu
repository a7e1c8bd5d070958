// The router of a decode step of many tokens (sm_90): [norm(x + r)] W^T + b, top-k, softmax over
// the chosen; writes x + r and the normed x too.
//
// A cluster takes 16 tokens, each of its CTAs a share of C, each warp 64 columns: all of W for them
// goes straight into registers, the first 32 experts before the kernel before has ended. Tokens are
// the M side of mma.m16n8k16, experts the N side; the order of k inside 64 columns is that of
// dense_few.cu. A token's logits are added up, over warps and then over CTAs, in the CTA that
// chooses for it. The norm's factor comes after the product, as there; the input has 16 bits, in
// two parts.
//
// Macros set by the host (engine/kernels/norm_rope_router.py): WARPS of a CTA, CLUSTER, EXPERTS (a
// multiple of 32), TOPK, MIN_CTAS a multiprocessor the register budget leaves room for.
#include "barriers.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "mma.cuh"
#include "topk.cuh"
#include "weigh.cuh"

// The values of the macros; nothing else reads them.
struct Traits {
  static constexpr int warps = WARPS, cluster = CLUSTER, experts = EXPERTS, top_k = TOPK;
  static constexpr int threads = warps * 32, columns = cluster * warps * 64, tokens = 16;
  static constexpr int min_ctas = MIN_CTAS;
  static constexpr int chosen = (tokens + cluster - 1) / cluster;  // tokens a CTA chooses for
  static constexpr int pitch = experts + 8;  // rows g and g + 4 of a quad's pairs: other banks
};
using T = Traits;

struct Args {
  const bf16* x;        // [T, C]
  const bf16* r;        // [T, C] residual; null: none
  bf16* r_out;          // [T, C] x + r; null: not wanted
  const bf16* norm;     // [C]
  const bf16* w;        // [EXPERTS, C]
  const bf16* bias;     // [EXPERTS]
  bf16* out;            // [T, C] normed
  float* topk_weights;  // [T, TOPK]
  int* topk_ids;        // [T, TOPK]
  float* logits;        // [T, EXPERTS] or null
  int tokens;
  float eps;
};

struct Shared {
  float sums[T::warps][T::tokens][T::pitch];
  float squares[T::warps][T::tokens];
  // From every CTA: parts of the logits of the tokens that this one chooses for, and sums of
  // squares.
  float logits[T::cluster][T::chosen][T::experts];
  float norms[T::cluster][T::tokens];
};

// Position of a lane: rows g and g + 8 of the tokens, 16 columns from `column` on.
struct Lane {
  int warp, g, j, column, first;
};

__device__ __forceinline__ void load_w(u32 (&w)[4][8], const Args& a, const Lane& l, int pass) {
#pragma unroll
  for (int n = 0; n < 4; ++n)
    load16(w[n], a.w + (long long)(pass * 32 + n * 8 + l.g) * T::columns + l.column);
}

// x + r of both rows, its sums of squares to shared memory.
__device__ __forceinline__ void load_x(u32 (&x)[2][8], const Args& a, const Lane& l, Shared& s) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = n * 8 + l.g, token = l.first + row;
    const long long at = (long long)token * T::columns + l.column;
    float square = 0.f;
    u32 r[8] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) x[n][e] = 0;
    if (token < a.tokens) {
      load16(x[n], a.x + at);
      if (a.r != nullptr) load16(r, a.r + at);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float2 f = unpack(x[n][e]), h = unpack(r[e]);
      x[n][e] = pack(f.x + h.x, f.y + h.y);
      const float2 sum = unpack(x[n][e]);
      square += sum.x * sum.x + sum.y * sum.y;
    }
    if (token < a.tokens && a.r_out != nullptr) store16(a.r_out + at, x[n]);
    square += __shfl_xor_sync(~0u, square, 1);
    square += __shfl_xor_sync(~0u, square, 2);
    if (l.j == 0) s.squares[l.warp][row] = square;
  }
}

// The products of 32 experts with this warp's columns, to shared memory.
__device__ __forceinline__ void multiply(const u32 (&part)[2][8], const u32 (&rest)[2][8],
    const u32 (&w)[4][8], const Lane& l, Shared& s, int pass) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    float c[4] = {}, odd[4] = {};  // one mma waits for the one before on the same sum
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      mma(c, part[0][2 * k], part[1][2 * k], part[0][2 * k + 1], part[1][2 * k + 1], w[n][2 * k],
          w[n][2 * k + 1]);
      mma(odd, rest[0][2 * k], rest[1][2 * k], rest[0][2 * k + 1], rest[1][2 * k + 1], w[n][2 * k],
          w[n][2 * k + 1]);
    }
    const int expert = pass * 32 + n * 8 + l.j * 2;
    *(float2*)&s.sums[l.warp][l.g][expert] = make_float2(c[0] + odd[0], c[1] + odd[1]);
    *(float2*)&s.sums[l.warp][l.g + 8][expert] = make_float2(c[2] + odd[2], c[3] + odd[3]);
  }
}

// This CTA's part of every logit to the CTA that chooses for the token, its sums of squares to all.
__device__ __forceinline__ void send(Shared& s, u32 rank) {
  for (int e = threadIdx.x; e < T::tokens * T::experts; e += T::threads) {
    const int token = e / T::experts, expert = e % T::experts;
    float v = 0.f;
#pragma unroll
    for (int w = 0; w < T::warps; ++w) v += s.sums[w][token][expert];
    store_cluster(smem_u32(&s.logits[rank][token / T::cluster][expert]), token % T::cluster, v);
  }
  for (int e = threadIdx.x; e < T::tokens * T::cluster; e += T::threads) {
    const int token = e % T::tokens;
    float v = 0.f;
#pragma unroll
    for (int w = 0; w < T::warps; ++w) v += s.squares[w][token];
    store_cluster(smem_u32(&s.norms[rank][token]), e / T::tokens, v);
  }
}

// The norm's factor of one of the cluster's tokens.
__device__ __forceinline__ float factor(const Args& a, const Shared& s, int token) {
  float v = 0.f;
#pragma unroll
  for (int c = 0; c < T::cluster; ++c) v += s.norms[c][token];
  return rsqrtf(v / T::columns + a.eps);
}

__device__ __forceinline__ void choose_experts(
    const Args& a, const Lane& l, const Shared& s, u32 rank) {
  constexpr int EACH = T::experts / 32;
  const int lane = threadIdx.x & 31;
  for (int i = l.warp; i < T::chosen; i += T::warps) {
    const int row = i * T::cluster + rank;
    const long long token = l.first + row;
    if (row >= T::tokens || token >= a.tokens) continue;
    const float scale = factor(a, s, row);
    float f[EACH];
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
      const int expert = lane * EACH + e;
      f[e] = 0.f;
#pragma unroll
      for (int c = 0; c < T::cluster; ++c) f[e] += s.logits[c][i][expert];
      f[e] = f[e] * scale + to_float(a.bias[expert]);
      if (a.logits != nullptr) a.logits[token * T::experts + expert] = f[e];
    }
    choose<EACH, T::top_k>(
        f, a.topk_weights + token * T::top_k, a.topk_ids + token * T::top_k, lane);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
    __launch_bounds__(T::threads, T::min_ctas) route_many(const Args a) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *(Shared*)memory;
  pdl_launch();
  cluster_arrive();  // this CTA runs: its shared memory may be written
  const u32 rank = blockIdx.x % T::cluster;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const Lane l = {warp, lane >> 2, lane & 3, ((int)rank * T::warps + warp) * 64 + (lane & 3) * 16,
      (int)blockIdx.x / T::cluster * T::tokens};
  u32 w[4][8], norm[8], x[2][8], part[2][8], rest[2][8];
  load_w(w, a, l, 0);
  load16(norm, a.norm + l.column);
  pdl_wait();
  load_x(x, a, l, s);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 8; ++e) weigh(part[n][e], rest[n][e], x[n][e], norm[e]);
#pragma unroll
  for (int pass = 0; pass < T::experts / 32; ++pass) {
    if (pass) load_w(w, a, l, pass);
    multiply(part, rest, w, l, s, pass);
  }
  __syncthreads();
  cluster_wait();
  send(s, rank);
  cluster_sync();
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int row = n * 8 + l.g, token = l.first + row;
    if (token >= a.tokens) continue;
    const float scale = factor(a, s, row);
    u32 out[8];
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float2 f = unpack(x[n][e]), h = unpack(norm[e]);
      out[e] = pack(f.x * scale * h.x, f.y * scale * h.y);
    }
    store16(a.out + (long long)token * T::columns + l.column, out);
  }
  choose_experts(a, l, s, rank);
}
