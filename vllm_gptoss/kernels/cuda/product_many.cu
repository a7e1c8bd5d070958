// y = x W^T + b for a decode step of up to 32 tokens (sm_90a): bf16, sums in float32.
//
// A cluster has ROWS weight rows and all tokens, each of its CTAs a share of K, whose activations
// all lie in shared memory at once. Tokens are the M of wgmma, of which half are nobody's, weight
// rows its N, both from shared memory. Sums meet in the CTA that writes them.
//
// Weights stream through a ring, which is full before the kernel before has ended: memory is busy
// while others come to their end. Activations lie as wgmma reads them (tiled.cuh), so that a tile
// is one bulk copy.
//
// Roles: a warpgroup multiplies, four warps copy weights, one asks for activations.
//
// Macros set by the host (kernels/product_many.py): ROWS (a multiple of 8), COLUMNS (of 64), TOKENS
// at most (of 16, up to 64), STAGES of weights, CLUSTER.
#include "barriers.cuh"
#include "bulk.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "cp_async.cuh"
#include "wgmma.cuh"
#include "wgmma_any.cuh"

constexpr int TILES = COLUMNS / 64, MOST_TILES = (TILES + CLUSTER - 1) / CLUSTER;
constexpr int CONSUMERS = 4, COPIERS = 4, THREADS = (CONSUMERS + COPIERS + 1) * 32;
constexpr int W_TILE = ROWS * 128, X_TILE = TOKENS * 128, X_BYTES = MOST_TILES * X_TILE;
constexpr int SHARE = ROWS / CLUSTER;  // weight rows whose sums a CTA writes
static_assert(ROWS % 8 == 0 && TOKENS % 16 == 0, "the swizzle's period, and a warp's tokens");
static_assert(SHARE % 2 == 0, "sums are sent in pairs");

struct Args {
  const bf16* x;     // tiled, [TILES, padded, 64] bf16
  const bf16* w;     // [rows, COLUMNS] row-major
  const bf16* bias;  // [rows]
  bf16* y;           // [tokens, rows]
  int tokens, padded, rows;
};

struct Bars {
  u64 w_full[STAGES], w_empty[STAGES], x_full[MOST_TILES];
};
// Partial sums of the CTA's own rows, from every CTA of the cluster. Where activations were.
struct Sums {
  float from[CLUSTER][TOKENS][SHARE];
};
static_assert(sizeof(Sums) <= X_BYTES, "sums");

// The tiles of K that a CTA has.
struct Range {
  int first, count;
};
__device__ __forceinline__ Range tiles_of(u32 rank) {
  const int first = rank * TILES / CLUSTER;
  return {first, (int)((rank + 1) * TILES / CLUSTER) - first};
}

#define JOINED_(A, B) A##B
#define JOINED(A, B) JOINED_(A, B)
#define TEXT_(A) #A
#define TEXT(A) TEXT_(A)
#define SIXTEEN(X, W)                                                          \
  "wgmma.mma_async.sync.aligned.m64n" TEXT(ROWS) "k16.f32.bf16.bf16 {" JOINED( \
      SUMS_, ROWS) "}, " X ", " W ", 1, 1, 1, 0, 0;\n"
// c += 64 tokens x ROWS weight rows over 64 columns, and their commit. The sums are numbered from
// %10 on in wgmma_any.cuh, so there are two operands that nobody uses.
__device__ __forceinline__ void multiply_tile(float (&c)[ROWS / 2], u64 x, u64 w) {
  u64 x1 = x + 2, w1 = w + 2, x2 = x + 4, w2 = w + 4, x3 = x + 6, w3 = w + 6;
  u32 none = 0, nothing = 0;
  asm volatile(SIXTEEN("%0", "%1") SIXTEEN("%2", "%3") SIXTEEN("%4", "%5")
          SIXTEEN("%6", "%7") "wgmma.commit_group.sync.aligned;"
      : "+l"(x), "+l"(w), "+l"(x1), "+l"(w1), "+l"(x2), "+l"(w2), "+l"(x3), "+l"(w3), "+r"(none),
      "+r"(nothing), JOINED(INTO_, ROWS));
}

__device__ __forceinline__ void copy_weights(
    const Args& a, const Range& k, int first, u32 ring, const Bars& b, int thread) {
  const int here = min(ROWS, a.rows - first), row = thread >> 3, p = thread & 7;
  constexpr int STEP = COPIERS * 4;
  const bf16* from = a.w + (long long)(first + row) * COLUMNS + k.first * 64 + p * 8;
  const u32 to = ring + row * 128 + ((p ^ (row & 7)) << 4);
  Place<STAGES> s = {0, 1};
#pragma unroll 1
  for (int i = 0; i < k.count; ++i) {
    bar_wait(smem_u32(b.w_empty + s.at), s.parity);
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP)
      if (row + r < here) cp16_once(to + s.at * W_TILE + r * 128, from + (long long)r * COLUMNS);
    cp_arrive(smem_u32(b.w_full + s.at));
    from += 64;
    s.next();
  }
}

__device__ __forceinline__ void copy_activations(
    const Args& a, const Range& k, u32 to, const Bars& b) {
  const u32 bytes = a.padded * 128;
  const u8* from = (const u8*)a.x + (long long)k.first * bytes;
  for (int i = 0; i < k.count; ++i) {
    const u32 full = smem_u32(b.x_full + i);
    bar_expect(full, bytes);
    bulk_load(to + i * X_TILE, from + (long long)i * bytes, bytes, full);
  }
}

__device__ __forceinline__ void multiply(
    float (&c)[ROWS / 2], const Range& k, u32 x, u32 ring, const Bars& b, int lane) {
#pragma unroll
  for (int i = 0; i < ROWS / 2; ++i) c[i] = 0.f;
  Place<STAGES> s = {0, 0};
  u32 before = 0;
#pragma unroll 1
  for (int i = 0; i < k.count; ++i) {
    bar_wait(smem_u32(b.w_full + s.at), s.parity);
    bar_wait(smem_u32(b.x_full + i), 0);
    // Of one lane, so that the compiler knows them for the same in all.
    const u32 xd = __shfl_sync(~0u, b_descriptor(x + i * X_TILE), 0),
              wd = __shfl_sync(~0u, b_descriptor(ring + s.at * W_TILE), 0);
    wgmma_fence();
    multiply_tile(c, whole_descriptor(xd), whole_descriptor(wd));
    wgmma_wait<1>();
    if (i) bar_arrive_warp(before, lane);
    before = smem_u32(b.w_empty + s.at);
    s.next();
  }
  wgmma_wait<0>();
}

// Every sum to the CTA that has its row.
__device__ __forceinline__ void send(
    const float (&c)[ROWS / 2], Sums& s, u32 rank, int warp, int lane) {
  const int token = warp * 16 + (lane >> 2);
  if (warp * 16 >= TOKENS) return;
#pragma unroll
  for (int i = 0; i < ROWS / 8; ++i) {
    const int row = 8 * i + 2 * (lane & 3);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      store_cluster2(smem_u32(&s.from[rank][token + 8 * h][row % SHARE]), row / SHARE,
          make_float2(c[4 * i + 2 * h], c[4 * i + 2 * h + 1]));
  }
}

__device__ __forceinline__ void finish(const Args& a, const Sums& s, int first, int thread) {
  constexpr int PAIRS = SHARE / 2;
  for (int e = thread; e < a.tokens * PAIRS; e += THREADS) {
    const int token = e / PAIRS, at = e % PAIRS * 2, row = first + at;
    if (row >= a.rows) continue;
    float2 sum = unpack(*(const u32*)(a.bias + row));
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float2 v = *(const float2*)&s.from[r][token][at];
      sum = make_float2(sum.x + v.x, sum.y + v.y);
    }
    *(u32*)(a.y + (long long)token * a.rows + row) = pack(sum.x, sum.y);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    product_many(const __grid_constant__ Args a) {
  extern __shared__ __align__(1024) u8 smem[];
  Bars& b = *(Bars*)(smem + X_BYTES + STAGES * W_TILE);
  Sums& sums = *(Sums*)smem;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const u32 x = smem_u32(smem), ring = x + X_BYTES, rank = blockIdx.x % CLUSTER;
  const int first = blockIdx.x / CLUSTER * ROWS;
  const Range k = tiles_of(rank);
  pdl_launch();
  if (thread < STAGES) {
    bar_init(smem_u32(b.w_full + thread), COPIERS * 32);
    bar_init(smem_u32(b.w_empty + thread), CONSUMERS * SPEAKERS);
  }
  if (thread < MOST_TILES) bar_init(smem_u32(b.x_full + thread), 1);
  bar_init_done();
  __syncthreads();
  float c[ROWS / 2];
  if (warp < CONSUMERS) {
    multiply(c, k, x, ring, b, lane);
  } else if (warp < CONSUMERS + COPIERS) {
    copy_weights(a, k, first, ring, b, thread - CONSUMERS * 32);
  } else {
    pdl_wait();
    if (lane == 0) copy_activations(a, k, x, b);
    __syncwarp();
  }
  cluster_sync();  // nobody reads activations any more
  if (warp < CONSUMERS) send(c, sums, rank, warp, lane);
  cluster_sync();
  pdl_wait();
  finish(a, sums, first + rank * SHARE, thread);
}
