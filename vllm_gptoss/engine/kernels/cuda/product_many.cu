// y = x W^T + b for a decode step of up to 32 tokens (sm_90a): bf16, sums in float32.
//
// A cluster has ROWS weight rows and all tokens. Each CTA of the cluster has a share of K and holds
// all activations of that share in shared memory. Tokens are the M of wgmma, at least half of which
// is padding. Weight rows are the N. Both operands come from shared memory. The partial sums are
// sent to the CTA that writes the result.
//
// Weights stream through a ring, which is full before the kernel before has ended: memory is busy
// while others come to their end. Activations lie as wgmma reads them (tiled.cuh), so that a tile
// is one bulk copy.
//
// Roles: a warpgroup multiplies, four warps copy weights, one loads activations.
//
// With ROPE it is a layer's q/k/v projection: queries and keys are rotated, keys and values go into
// the paged cache. The weight rows that a CTA finishes are units of rope.cuh then, so that both
// outputs that RoPE turns together meet there.
//
// Macros set by the host (engine/kernels/product_many.py): ROWS (a multiple of 8), COLUMNS (of 64),
// TOKENS at most (of 16, up to 64), STAGES of weights, CLUSTER, ROPE (0 or 1), CACHE.
#include "barriers.cuh"
#include "bulk.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "cp_async.cuh"
#include "rope.cuh"
#include "wgmma.cuh"
#include "wgmma_any.cuh"

constexpr int TILES = COLUMNS / 64, MOST_TILES = (TILES + CLUSTER - 1) / CLUSTER;
constexpr int CONSUMERS = 4, COPIERS = 4, THREADS = (CONSUMERS + COPIERS + 1) * 32;
constexpr int W_TILE = ROWS * 128, X_TILE = TOKENS * 128, X_BYTES = MOST_TILES * X_TILE;
constexpr int SHARE = ROWS / CLUSTER;  // weight rows for which a CTA writes the sums
static_assert(ROWS % 8 == 0 && TOKENS % 16 == 0, "the swizzle's period, and a warp's tokens");
static_assert(SHARE % (ROPE ? 8 : 2) == 0, "sums are sent in pairs; RoPE's units of rows");

struct Args {
  const bf16* x;     // tiled, [TILES, padded, 64] bf16
  const bf16* w;     // [rows, COLUMNS] row-major
  const bf16* bias;  // [rows], or null without ROPE
  bf16* y;           // [tokens, rows]; ROPE: of these only the queries are written
  int tokens, padded, rows;
  // ROPE; rows: heads of 64, queries, keys, values
  const long long* positions;  // [tokens]
  const void* cos_sin;         // [positions, 64], 32 cosines then 32 sines
  const long long* slots;      // [tokens], negative: not written
  Element* kv;                 // paged cache; K at 0, V at 64 of each (block, head, token)
  long long kv_block, kv_head, kv_token;  // strides in elements
  int q_heads, kv_heads, block_shift, cos_sin_bf16;
  const float *k_scale, *v_scale;  // E4m3: of the cache
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
// %10 on in wgmma_any.cuh, so two of the operands are unused.
__device__ __forceinline__ void multiply_tile(float (&c)[ROWS / 2], u64 x, u64 w) {
  u64 x1 = x + 2, w1 = w + 2, x2 = x + 4, w2 = w + 4, x3 = x + 6, w3 = w + 6;
  u32 none = 0, nothing = 0;
  asm volatile(SIXTEEN("%0", "%1") SIXTEEN("%2", "%3") SIXTEEN("%4", "%5")
          SIXTEEN("%6", "%7") "wgmma.commit_group.sync.aligned;"
      : "+l"(x), "+l"(w), "+l"(x1), "+l"(w1), "+l"(x2), "+l"(w2), "+l"(x3), "+l"(w3), "+r"(none),
      "+r"(nothing), JOINED(INTO_, ROWS));
}

// The weight row at a place of all clusters' rows.
__device__ __forceinline__ int weight_row(int place) {
  return ROPE ? rope_row(place >> 3, place & 7) : place;
}
// Elements from the weight row at `place` to the one at `place + r`.
__device__ __forceinline__ long long ahead(int place, int r) {
  return (long long)(weight_row(place + r) - weight_row(place)) * COLUMNS;
}

__device__ __forceinline__ void copy_weights(
    const Args& a, const Range& k, int first, u32 ring, const Bars& b, int thread) {
  const int here = min(ROWS, a.rows - first), row = thread >> 3, p = thread & 7;
  constexpr int STEP = COPIERS * 4;
  const bf16* from = a.w + (long long)weight_row(first + row) * COLUMNS + k.first * 64 + p * 8;
  const u32 to = ring + row * 128 + ((p ^ (row & 7)) << 4);
  Place<STAGES> s = {0, 1};
#pragma unroll 1
  for (int i = 0; i < k.count; ++i) {
    bar_wait(smem_u32(b.w_empty + s.at), s.parity);
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP)
      if (row + r < here) cp16_once(to + s.at * W_TILE + r * 128, from + ahead(first + row, r));
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
    float2 sum = a.bias ? unpack(*(const u32*)(a.bias + row)) : make_float2(0.f, 0.f);
#pragma unroll
    for (int r = 0; r < CLUSTER; ++r) {
      const float2 v = *(const float2*)&s.from[r][token][at];
      sum = make_float2(sum.x + v.x, sum.y + v.y);
    }
    *(u32*)(a.y + (long long)token * a.rows + row) = pack(sum.x, sum.y);
  }
}

// With ROPE only those finish who do not multiply: a unit of a token each, or several.
constexpr int UNITS = (SHARE + 7) / 8, FINISHERS = THREADS - CONSUMERS * 32;
constexpr int EACH = (TOKENS * UNITS + FINISHERS - 1) / FINISHERS;

// All that a unit's outputs of a token need besides their sums: d to d + 3 of a head, and those at
// d + 32.
struct Outputs {
  uint2 bias_low, bias_high;
  float cos[4], sin[4];
  bool turned;
  Target<Cache> to;
};

// The token and the first of the share's rows of a thread's unit.
struct Unit {
  int token, at;
};
__device__ __forceinline__ Unit unit_of(int thread, int i) {
  const int e = thread - CONSUMERS * 32 + i * FINISHERS;
  return {e / UNITS, e % UNITS * 8};
}

__device__ __forceinline__ Outputs outputs_of(const Args& a, int token, int place) {
  Outputs o;
  o.to = {nullptr};
  if (token >= a.tokens || place >= a.rows) return o;
  const long long position = a.positions[token], slot = a.slots[token];
  const int row = weight_row(place), head = row >> 6, d = row & 63;
  o.bias_low = *(const uint2*)(a.bias + row);
  o.bias_high = *(const uint2*)(a.bias + row + 32);
  o.turned = head < a.q_heads + a.kv_heads;
  if (o.turned) {
    turns(o.cos, a.cos_sin, a.cos_sin_bf16, position * 64 + d);
    turns(o.sin, a.cos_sin, a.cos_sin_bf16, position * 64 + d + 32);
  }
  if (head < a.q_heads)
    o.to = {a.y + (long long)token * a.rows + row};
  else
    cache_target(o.to, a, slot, head - a.q_heads, a.kv_heads, d);
  return o;
}

// Does not depend on the preceding kernel: positions and slots are written before the step's first
// kernel. The loads are therefore issued while other warps still multiply.
__device__ __forceinline__ void prepare(
    Outputs (&outputs)[EACH], const Args& a, int first, int thread) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const Unit u = unit_of(thread, i);
    outputs[i] = outputs_of(a, u.token, first + u.at);
  }
}

// Four rows' bias and sums, rounded to bf16.
__device__ __forceinline__ uint2 added(uint2 bias, const Sums& s, int token, int at) {
  float2 low = unpack(bias.x), high = unpack(bias.y);
#pragma unroll
  for (int r = 0; r < CLUSTER; ++r) {
    const float4 v = *(const float4*)&s.from[r][token][at];
    low = make_float2(low.x + v.x, low.y + v.y);
    high = make_float2(high.x + v.z, high.y + v.w);
  }
  return make_uint2(pack(low.x, low.y), pack(high.x, high.y));
}

__device__ __forceinline__ void finish_rotated(
    const Outputs (&outputs)[EACH], const Sums& s, int thread) {
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const Outputs& o = outputs[i];
    if (!o.to.exists()) continue;
    const Unit u = unit_of(thread, i);
    uint2 low = added(o.bias_low, s, u.token, u.at),
          high = added(o.bias_high, s, u.token, u.at + 4);
    if (o.turned) {
      turn(low.x, high.x, make_float2(o.cos[0], o.cos[1]), make_float2(o.sin[0], o.sin[1]));
      turn(low.y, high.y, make_float2(o.cos[2], o.cos[3]), make_float2(o.sin[2], o.sin[3]));
    }
    put(o.to, low, high);
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
  Outputs outputs[EACH];
  if constexpr (ROPE)
    if (warp >= CONSUMERS) prepare(outputs, a, first + rank * SHARE, thread);
  cluster_sync();  // activations are no longer read
  if (warp < CONSUMERS) send(c, sums, rank, warp, lane);
  cluster_sync();
  pdl_wait();
  if constexpr (ROPE) {
    if (warp >= CONSUMERS) finish_rotated(outputs, sums, thread);
  } else {
    finish(a, sums, first + rank * SHARE, thread);
  }
}
