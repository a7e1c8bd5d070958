// MXFP4 experts of gpt-oss for many tokens on sm90: weight rows are the M of wgmma, an expert's
// tokens its N. Compiled by NVRTC for sm_90a; see docs/kernels/. Weights lie as in experts.cu, and
// mxfp4.cuh decodes them.
//
// An expert's tokens are a chunk of up to MOST, or several of equal size, and a chunk's products
// run with the least N of a few that holds it. A unit of work is 64 weight rows over all of K for
// one chunk, one warpgroup's. Every block finds the chunks from the routing itself and takes a
// share of consecutive units of equal cost.
//
// A warp streams its 16 rows through a ring that is private to each lane, as in experts.cu, and
// decodes them into the A registers of wgmma, 32 columns while the 32 before are multiplied.
// Activations are staged by four more warps, a stage of CHUNK tiles for all groups: as many stages
// as fit, and where all of K fits, an expert's are loaded once.
//
// Compile-time: TOKENS at most, KT tiles of 64 columns, NROWS weight rows (multiple of 64), SKT
// column pairs of 32 in the scale storage, EXPERTS local experts, ACTIVE per token, ROUTED, GROUPS
// consuming warpgroups, CHUNK tiles in a stage, DEPTH stages of weights in a warp's ring, MOST
// columns of a product, X_BYTES of activations, LOGITS, ID64, MAPPED as in routing.cuh, ONLY 1 or
// 2: up or down.

#include "common.cuh"
#include "barriers.cuh"
#include "mxfp4.cuh"
#include "wgmma.cuh"
#include "routing.cuh"
#include "combine.cuh"

constexpr int STAGES = (KT + CHUNK - 1) / CHUNK;  // of all of K
constexpr bool EVEN = KT % CHUNK == 0;
constexpr int NU = NROWS / 64, NT = NROWS / 16;  // units and row tiles of an expert
constexpr int CONSUMERS = GROUPS * 4, STAGERS = 4, WARPS = CONSUMERS + STAGERS,
              THREADS = WARPS * 32;
// A thread's registers once the roles are known, out of those that all had at first (96 of 640
// threads, 128 of 512).
constexpr int MULTIPLYING = GROUPS == 4   ? 112
                            : GROUPS == 3 ? 160
                                          : 208,
              STAGING = GROUPS == 2 ? 88 : 32;
constexpr int MAX_PAIRS = TOKENS * ACTIVE;
constexpr int MAX_CHUNKS = EXPERTS + MAX_PAIRS / MOST;
constexpr int PASSES = (MAX_PAIRS + WARPS * 32 - 1) / (WARPS * 32);
constexpr int DIVISOR = ONLY == 1 ? ACTIVE : 1;  // pairs that share a row of activations
constexpr int RING_STAGE =
    CHUNK * (512 + 32);  // of a warp: 16 bytes a lane and tile, then the scales
constexpr int WARP_RING = DEPTH * RING_STAGE;
constexpr int RING_BYTES = CONSUMERS * WARP_RING;
constexpr int MAX_STAGES = 16;
constexpr int QUAD_BYTES = KT * 128;
constexpr u64 EXPERT_BYTES = (u64)(NROWS / 4) * QUAD_BYTES;
constexpr u64 EXPERT_SCALE_BYTES = (u64)((NROWS + 255) / 256 * 8) * SKT * 64;
static_assert(
    NROWS % 64 == 0 && EXPERTS <= 128 && MAX_CHUNKS <= THREADS && X_BYTES % 1024 == 0, "shape");
static_assert(X_BYTES >= WARPS * EXPERTS * 2 && X_BYTES >= 2 * MOST * CHUNK * 128,
    "activations and, before, counts");

struct Meta {
  u64 full[MAX_STAGES], empty[MAX_STAGES];
  int row[MOST];           // where the chunk's rows of activations start, in bytes
  int before[MAX_CHUNKS];  // cost of a unit summed over the chunks before
  int sums[4], costs[4], first, last, total;
#if ONLY == 2
  float weights[MAX_PAIRS];
#endif
  u16 pairs[MAX_PAIRS];   // those of expert 0, of expert 1, ...
  u16 start[MAX_CHUNKS];  // of a chunk in `pairs`
  u16 offset[128];        // of an expert
  u8 count[MAX_CHUNKS], expert[MAX_CHUNKS];
  signed char ids[MAX_PAIRS];
};
constexpr int META_BYTES = (sizeof(Meta) + 127) / 128 * 128;

// The N of wgmma for a chunk of `count` tokens.
__device__ __forceinline__ int columns_of(int count) {
  return count <= 24 ? 24 : count <= 32 ? 32 : (count + 15) / 16 * 16;
}
// What a unit costs: for few tokens its weights and their decoding, for many its products.
__device__ __forceinline__ int cost_of(int count) {
  return count <= 24 ? 16 : 12 + columns_of(count) * 3 / 16;
}
// Rows for which all of K fits. Chunks of so many and of fewer are staged in the same places, so
// that the next one's rows come while the last one's are still read.
constexpr int ROWS_THAT_FIT = X_BYTES / (KT * 128) / 8 * 8;
constexpr int LEAST = ROWS_THAT_FIT < 8 ? 8 : ROWS_THAT_FIT < MOST ? ROWS_THAT_FIT : MOST;
// One tile of activations of a chunk of `count` tokens in 16 bytes, as descriptors count. wgmma
// reads N rows from where a tile begins: the columns that other bytes make are nobody's.
__device__ __forceinline__ int tile_of(int count) { return (max(count, LEAST) + 7) / 8 * 64; }
// Stages of activations that fit.
__device__ __forceinline__ int stages_of(int count) {
  return min(min(STAGES, MAX_STAGES), X_BYTES / (tile_of(count) * 16 * CHUNK));
}
__device__ __forceinline__ bool resident(int count) {
  return STAGES <= MAX_STAGES && tile_of(count) * 16 * CHUNK * STAGES <= X_BYTES;
}
// The block's unit number `i` is group i % GROUPS's: the group's first of a chunk part that begins
// at unit `a` of the chunk, `begun` units after the block's first.
__device__ __forceinline__ int first_of(int a, int begun, int group) {
  return a + (group + GROUPS * 4096 - begun) % GROUPS;
}

// Weights pass through L2 once: what blocks tell one another stays there.
constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;  // as createpolicy.fractional makes it
__device__ __forceinline__ void cp16(u32 dst, const u8* src) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst),
      "l"(src), "l"(EVICT_FIRST)
      : "memory");
}
__device__ __forceinline__ void cp16_x(u32 dst, const u8* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void cp_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// ids, and where ONLY == 2 weights, of all pairs.
__device__ __forceinline__ void read_routing(
    Meta& m, const u8* routing, const float* weights, const int* map, int tokens, int thread) {
  float* to = nullptr;
#if ONLY == 2
  to = m.weights;
#endif
  if (LOGITS) {
    choose_experts<4>(m.ids, to, routing, map, tokens, thread >> 5, WARPS, thread & 31);
  } else {
    for (int i = thread; i < tokens * ACTIVE; i += THREADS) {
      m.ids[i] = local_id(routing, map, i);
      if (to) to[i] = ld_cg(weights + i);
    }
  }
  __syncthreads();
}

// Chunks in the order of their experts, the pairs of each, and this block's share of the units.
// Uses `seen`, of WARPS x EXPERTS, meanwhile.
__device__ __forceinline__ void find_chunks(Meta& m, u16* seen, int tokens, int thread) {
  const int warp = thread >> 5, lane = thread & 31, pairs = tokens * ACTIVE;
  const int each = (pairs + WARPS * 32 - 1) / (WARPS * 32) * 32;
  u16 ranks[PASSES];
  rank_pairs<PASSES>(
      ranks, seen + warp * EXPERTS, m.ids, warp * each, min(pairs, (warp + 1) * each), lane);
  __syncthreads();
  int count = 0, chunks = 0, size = 0, cost = 0, places = 0, costs = 0;
  if (thread < 128) {
    if (thread < EXPERTS) count = count_before_warps<WARPS>(seen, thread);
    chunks = (count + MOST - 1) / MOST;
    size = chunks ? (count + chunks - 1) / chunks : 0;
    cost = cost_of(size);
    places = count | chunks << 16;
    costs = cost * chunks;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const int p = __shfl_up_sync(~0u, places, d), c = __shfl_up_sync(~0u, costs, d);
      places += lane >= d ? p : 0;
      costs += lane >= d ? c : 0;
    }
    if (lane == 31) {
      m.sums[warp] = places;
      m.costs[warp] = costs;
    }
    places -= count | chunks << 16;
    costs -= cost * chunks;
  }
  __syncthreads();
  if (thread < 128) {
    for (int w = 0; w < warp; w++) {
      places += m.sums[w];
      costs += m.costs[w];
    }
    const int start = places & 0xFFFF, chunk = places >> 16;
    m.offset[thread] = start;
    for (int i = 0; i < chunks; i++) {
      m.before[chunk + i] = costs + i * cost;
      m.start[chunk + i] = start + i * size;
      m.count[chunk + i] = min(size, count - i * size);
      m.expert[chunk + i] = thread;
    }
    if (thread == 127) m.total = costs + cost * chunks;
    if (thread == 127) m.last = (chunk + chunks) * NU;
    if (thread == 127) m.first = (chunk + chunks) * NU;
  }
  __syncthreads();
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int i = warp * each + p * 32 + lane;
    if (p * 32 < each && i < pairs && m.ids[i] >= 0)
      m.pairs[m.offset[m.ids[i]] + seen[warp * EXPERTS + m.ids[i]] + ranks[p]] = i;
  }
  const int all = m.last / NU;
  __syncthreads();
  if (thread < all) {
    const int before = m.before[thread] * NU,
              cost = (thread + 1 < all ? m.before[thread + 1] : m.total) - m.before[thread];
#pragma unroll
    for (int end = 0; end < 2; end++) {
      const int at = (int)((long long)m.total * NU * (blockIdx.x + end) / gridDim.x) - before;
      if (at >= 0 && at < cost * NU) (end ? m.last : m.first) = thread * NU + at / cost;
    }
  }
  __syncthreads();
}

// Where a warp reads weights: stage after stage of unit after unit of its group. Where activations
// do not fit, every other round of a chunk goes through K backwards: what is staged last is read
// first.
struct Feed {
  const u8 *values, *scales;
  int chunk, unit, end, left, step;
  bool live;
};

// Goes to the group's first unit at or after `unit` of chunk `chunk`.
__device__ __forceinline__ void seek(Feed& f, const Meta& m, const u8* __restrict__ values,
    const u8* __restrict__ scales, int group, int warp, int lane) {
  f.left = STAGES;
  while (f.unit >= f.end) {
    f.chunk++;
    f.live = f.chunk * NU < m.last;
    if (!f.live) return;
    const int a = max(m.first - f.chunk * NU, 0);
    f.unit = first_of(a, f.chunk * NU + a - m.first, group);
    f.end = min(m.last - f.chunk * NU, NU);
  }
  const int tile = row_tile(f.unit * 4 + warp, NT), expert = m.expert[f.chunk];
  const int round = (f.unit - max(m.first - f.chunk * NU, 0)) / GROUPS;
  const bool back = EVEN && round % 2 && !resident(m.count[f.chunk]);
  f.step = back ? -1 : 1;
  f.values = values + expert * EXPERT_BYTES + (u64)(tile * 4 + (lane >> 3)) * QUAD_BYTES +
             ((lane >> 2) & 1) * 64 + (lane & 3) * 16 + (back ? (STAGES - 1) * CHUNK * 128 : 0);
  f.scales = scales + expert * EXPERT_SCALE_BYTES +
             (u64)(((tile >> 4) * 8 + (tile & 7)) * SKT + (lane >> 1)) * 64 +
             ((tile >> 3) & 1) * 32 + (lane & 1) * 16 + (back ? (STAGES - 1) * CHUNK * 64 : 0);
}

// Starts the loads of one stage of the ring. Always commits, so that all lanes count the same
// groups.
__device__ __forceinline__ void fetch(Feed& f, u32 ring, u32 scales, int lane) {
  if (f.live) {
    const int tiles = EVEN ? CHUNK : min(CHUNK, KT - (STAGES - f.left) * CHUNK);
    if (lane < 2 * tiles) cp16(scales + lane * 16, f.scales);
#pragma unroll
    for (int k = 0; k < CHUNK; k++)
      if (EVEN || k < tiles) cp16(ring + k * 512, f.values + k * 128);
    f.values += f.step * (CHUNK * 128);
    f.scales += f.step * (CHUNK * 64);
    f.left--;
  }
  cp_commit();
}

// What a consuming warp keeps through all units.
struct Warp {
  int group, warp, lane;   // of the group's four; in the warp
  u32 ring, scales, slot;  // this lane's values and this warp's scales in stage 0, bytes to the
                           // stage now worked on
  u32 x;                   // shared memory: the activations, and behind them the barriers
  u32 fulls;               // parity to wait for, a bit for each stage of activations
  u32 two_7;
};

__device__ __forceinline__ void await_stage(Warp& w, int s) {
  bar_wait(w.x + X_BYTES + 8 * s, w.fulls >> s & 1);
  w.fulls ^= 1u << s;
}
__device__ __forceinline__ void release(const Warp& w, int s) {
  bar_arrive_warp(w.x + X_BYTES + 8 * (MAX_STAGES + s), w.lane);
}

// How a chunk's activations lie in shared memory: `stages` of them, of tiles of `tile` x 16 bytes.
struct Staged {
  int tile, stages;
};

// The 64 rows x N products of one unit, times 2^-64, through K backwards if `back`. `opens`: the
// activations of all stages are waited for, otherwise those that did not fit beside the round
// before. `closes`: all are released.
template <int N>
__device__ __forceinline__ void multiply(float (&c)[N / 2], Warp& w, Feed& f, const Meta& m,
    const u8* __restrict__ values, const u8* __restrict__ scales, Staged x, bool back, bool opens,
    bool closes) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) c[i] = 0.f;
  u32 a[2][8];
  int stage = back ? STAGES - 1 : 0, at = back ? (STAGES - 1) % x.stages : 0, before = -1;
#pragma unroll 1
  for (int turn = 0; turn < STAGES; turn++) {
    const int tiles = EVEN ? CHUNK : min(CHUNK, KT - stage * CHUNK);
    cp_wait<DEPTH - 1>();
    __syncwarp();
    if (opens || turn >= x.stages) {
      await_stage(w, at);
      fence_async();
    }
    // Of one lane, so that the compiler knows it for the same in all and keeps it in a uniform
    // register.
    u32 b = __shfl_sync(~0u, b_descriptor(w.x + at * (x.tile * 16 * CHUNK)), 0);
    const u32 ring = w.ring + w.slot, scale = w.scales + w.slot + (w.lane >> 2) * 4;
#pragma unroll
    for (int k = 0; k < CHUNK; k++, b += __shfl_sync(~0u, x.tile, 0)) {
      if (EVEN || k < tiles) {
        const uint4 v = lds16(ring + k * 512);
        const u32 s4 = lds4(scale + k * 32);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          scaled(a[half], half ? v.z : v.x, half ? v.w : v.y,
              half ? scales16<2>(s4, w.two_7) : scales16<0>(s4, w.two_7));
          wgmma_fence();
          Wgmma<N>::run(c, a[half], b + half * 4);
          Wgmma<N>::run(c, a[half] + 4, b + half * 4 + 2);
          wgmma_commit();
          wgmma_wait<1>();
          if (k == 0 && half == 0 && before >= 0) release(w, before);
        }
      }
    }
    __syncwarp();
    fetch(f, ring, w.scales + w.slot, w.lane);
    if (f.left == 0) {
      f.unit += GROUPS;
      seek(f, m, values, scales, w.group, w.warp, w.lane);
    }
    w.slot = w.slot == (DEPTH - 1) * RING_STAGE ? 0 : w.slot + RING_STAGE;
    before = closes || turn < STAGES - x.stages ? at : -1;
    stage += back ? -1 : 1;
    at = back ? (at == 0 ? x.stages - 1 : at - 1) : (at == x.stages - 1 ? 0 : at + 1);
  }
  wgmma_wait<0>();
  if (before >= 0) release(w, before);
}

// The group's units of a chunk, of the block's a to b. Rounds of one unit for each group: all take
// part in every stage of activations, unless all of K fits, when a group goes at its own pace.
template <int N, class Finish>
__device__ __forceinline__ void chunk_part(Warp& w, Feed& f, const Meta& m,
    const u8* __restrict__ values, const u8* __restrict__ scales, int count, int a, int b,
    int begun, Finish finish) {
  const Staged x = {tile_of(count), stages_of(count)};
  const bool fits = x.stages == STAGES, reloaded = !EVEN && !fits;
  const int mine = first_of(a, begun, w.group);
  for (int base = 0; a + base < b; base += GROUPS) {
    const int unit = mine + base;
    const bool back = EVEN && !fits && base / GROUPS % 2;
    const bool opens = reloaded || base == 0,
               closes = reloaded || (fits ? unit : a + base) + GROUPS >= b;
    if (unit < b) {
      float c[N / 2];
      multiply<N>(c, w, f, m, values, scales, x, back, opens, closes);
      finish(c, unit);
    } else if (!fits || base == 0) {
      int at = back ? (STAGES - 1) % x.stages : 0;
      for (int turn = 0; turn < STAGES; turn++) {
        if (opens || turn >= x.stages) await_stage(w, at);
        if (closes || turn < STAGES - x.stages) release(w, at);
        at = back ? (at == 0 ? x.stages - 1 : at - 1) : (at == x.stages - 1 ? 0 : at + 1);
      }
    }
  }
}

// Of the warps that stage activations.
__device__ __forceinline__ void stage_rows(
    Meta& m, u32 x_at, const u8* __restrict__ x, int thread) {
  const int first = m.first, last = m.last;
  const u32 full = smem_u32(m.full), empty = smem_u32(m.empty);
  u32 filled = 0, parity = 0;
  int n_before = 0;
  for (int chunk = first / NU; chunk * NU < last; chunk++) {
    const int a = max(first - chunk * NU, 0), b = min(last - chunk * NU, NU),
              count = m.count[chunk];
    const int n = tile_of(count) / 8, bytes = n * CHUNK * 128, fit = stages_of(count);
    if (n != n_before)  // the stages of another size lie elsewhere
      for (; filled; filled &= filled - 1) {
        const int s = __ffs(filled) - 1;
        bar_wait(empty + 8 * s, parity >> s & 1);
        parity ^= 1u << s;
      }
    n_before = n;
    named_sync<1, STAGERS * 32>();
    for (int r = thread; r < count; r += STAGERS * 32)
      m.row[r] = m.pairs[m.start[chunk] + r] / DIVISOR * QUAD_BYTES;
    named_sync<1, STAGERS * 32>();
    const int rounds = fit == STAGES ? 1 : (b - a + GROUPS - 1) / GROUPS;
    for (int i = 0; i < rounds; i++) {
      const bool back = EVEN && i % 2;
      for (int turn = EVEN && i ? fit : 0; turn < STAGES; turn++) {
        const int stage = back ? STAGES - 1 - turn : turn, at = stage % fit;
        if (filled >> at & 1) {
          bar_wait(empty + 8 * at, parity >> at & 1);
          parity ^= 1u << at;
        }
        filled |= 1u << at;
        const int piece = thread & 7;
        const u8* from = x + stage * (CHUNK * 128) + piece * 16;
        const u32 to = x_at + at * bytes;
#pragma unroll 4
        for (int r = thread >> 3; r < count; r += STAGERS * 4) {
#pragma unroll
          for (int k = 0; k < CHUNK; k++)
            if (EVEN || stage * CHUNK + k < KT)
              cp16_x(to + (k * n + r) * 128 + ((piece ^ (r & 7)) << 4), from + m.row[r] + k * 128);
        }
        cp_arrive(full + 8 * at);
      }
    }
  }
}

// All of the block's units, of a consuming warp: finish(chunk, unit, sums).
template <class Finish>
__device__ __forceinline__ void work(Warp& w, Feed& f, const Meta& m, const u8* __restrict__ values,
    const u8* __restrict__ scales, Finish finish) {
  for (int chunk = m.first / NU; chunk * NU < m.last; chunk++) {
    const int a = max(m.first - chunk * NU, 0), b = min(m.last - chunk * NU, NU);
    const int begun = chunk * NU + a - m.first;
    const auto done = [&](auto& c, int unit) { finish(chunk, unit, c); };
    switch (columns_of(m.count[chunk])) {
#define CASE(N)                                                                  \
  case N:                                                                        \
    if constexpr (N <= MOST)                                                     \
      chunk_part<N>(w, f, m, values, scales, m.count[chunk], a, b, begun, done); \
    break;
      CASE(24) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96)
    }
  }
}

#define PROLOGUE                                                \
  extern __shared__ __align__(1024) u8 smem[];                  \
  Meta& m = *reinterpret_cast<Meta*>(smem + X_BYTES);           \
  const int thread = threadIdx.x, lane = thread & 31;           \
  const u32 ring = smem_u32(smem + X_BYTES + META_BYTES);       \
  if (thread < MAX_STAGES) {                                    \
    bar_init(smem_u32(m.full + thread), STAGERS * 32);          \
    bar_init(smem_u32(m.empty + thread), CONSUMERS * SPEAKERS); \
  }

// Asks L2 for what this warp's ring takes first, if all experts have tokens, as they will: the
// routing comes later.
__device__ __forceinline__ void foresee(const u8* values, int tokens, int thread) {
  const int lane = thread & 31,
            unit = (int)((u64)EXPERTS * NU * blockIdx.x / gridDim.x) + (thread >> 7);
  if (tokens * ACTIVE < 8 * EXPERTS || thread >= CONSUMERS * 32 || unit >= EXPERTS * NU) return;
  const u8* from = values + unit / NU * EXPERT_BYTES +
                   (u64)row_tile(unit % NU * 4 + (thread >> 5 & 3), NT) * 4 * QUAD_BYTES;
  constexpr int LINES = DEPTH * CHUNK < KT ? DEPTH * CHUNK : KT;
  for (int i = lane; i < 4 * LINES; i += 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i / LINES * QUAD_BYTES + i % LINES * 128));
}

// This warp's state, with the first DEPTH stages of weights on their way.
__device__ __forceinline__ Warp begin(Feed& f, const Meta& m, const u8* smem, u32 ring,
    const u8* __restrict__ values, const u8* __restrict__ scales, u32 two_7, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  Warp w = {warp >> 2, warp & 3, lane, ring + warp * WARP_RING + lane * 16,
      ring + warp * WARP_RING + CHUNK * 512, 0, smem_u32(smem), 0, two_7};
  f = {values, scales, m.first / NU - 1, 0, 0, STAGES, 1, true};
  seek(f, m, values, scales, w.group, w.warp, lane);
  for (int s = 0; s < DEPTH; s++) {
    fetch(f, w.ring + s * RING_STAGE, w.scales + s * RING_STAGE, lane);
    if (f.left == 0) {
      f.unit += GROUPS;
      seek(f, m, values, scales, w.group, w.warp, lane);
    }
  }
  return w;
}
template <int COUNT, bool MORE> __device__ __forceinline__ void registers() {
  if (MORE)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
constexpr float TWO_64F = 18446744073709551616.f;

#if ONLY == 1
// act[pair, I] = swiglu(w13[expert] x[token] + b13[expert]); gate and up rows are interleaved.
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_up(const u8* __restrict__ values,
    const u8* __restrict__ scales, const float* __restrict__ bias, const u8* __restrict__ x,
    const u8* __restrict__ routing, const float* __restrict__ weights, const int* __restrict__ map,
    u16* __restrict__ act, int tokens, u32 two_7, float alpha, float limit) {
  PROLOGUE
  foresee(values, tokens, thread);
  pdl_wait();
  pdl_launch();
  read_routing(m, routing, nullptr, map, tokens, thread);
  find_chunks(m, reinterpret_cast<u16*>(smem), tokens, thread);
  fence_async();
  if (thread >= CONSUMERS * 32) {
    registers<STAGING, false>();
    stage_rows(m, smem_u32(smem), x, thread - CONSUMERS * 32);
  } else {
    registers<MULTIPLYING, true>();
    Feed f;
    Warp w = begin(f, m, smem, ring, values, scales, two_7, thread);
    work(w, f, m, values, scales, [&](int chunk, int unit, auto& c) {
      const int g = lane >> 2, t = lane & 3, count = m.count[chunk];
      const int tile = row_tile(unit * 4 + w.warp, NT);
      const float* b = bias + (u64)m.expert[chunk] * NROWS + tile * 16 + g;
      const float bias0 = b[0], bias8 = b[8];
      const u16* pairs = m.pairs + m.start[chunk];
#pragma unroll
      for (int j = 0; j < sizeof(c) / 16; j++) {
        if (j * 8 >= count) break;
        const float d0 = fmaf(c[4 * j], TWO_64F, bias0), d1 = fmaf(c[4 * j + 1], TWO_64F, bias0);
        const float d2 = fmaf(c[4 * j + 2], TWO_64F, bias8),
                    d3 = fmaf(c[4 * j + 3], TWO_64F, bias8);
        // Lanes of an even row hold gates, of the odd row above it ups: each finishes one of its
        // two tokens.
        const bool up = g & 1;
        const float r0 = __shfl_xor_sync(~0u, up ? d0 : d1, 4),
                    r1 = __shfl_xor_sync(~0u, up ? d2 : d3, 4);
        const int n = j * 8 + 2 * t + up;
        if (n < count) {
          u16* out = act + (u64)pairs[n] * (NROWS / 2) + tile * 8 + (g >> 1);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float mine = h ? (up ? d3 : d2) : (up ? d1 : d0), other = h ? r1 : r0;
            const float gate = fminf(up ? other : mine, limit);
            const float lin = fminf(fmaxf(up ? mine : other, -limit), limit);
            out[4 * h] = to_bf16(gate / (1.f + __expf(-alpha * gate)) * (lin + 1.f));
          }
        }
      }
    });
  }
}
#else
// out[token] = sum over its choices of weight x (w2[expert] act[pair] + b2[expert]). Blocks
// exchange partial sums and wait for one another at the end, so all of the grid must fit on the GPU
// at once: one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_down(const u8* __restrict__ values,
    const u8* __restrict__ scales, const float* __restrict__ bias, const u8* __restrict__ act,
    const u8* __restrict__ routing, const float* __restrict__ weights, const int* __restrict__ map,
    u32* parts, u16* __restrict__ out, int tokens, u32 two_7) {
  PROLOGUE
  foresee(values, tokens, thread);
  // Safe before the wait: `experts_up` launched us after its own wait, so the routing is complete
  // and visible.
  read_routing(m, routing, weights, map, tokens, thread);
  find_chunks(m, reinterpret_cast<u16*>(smem), tokens, thread);
  fence_async();
  if (thread >= CONSUMERS * 32) {
    registers<STAGING, false>();
    pdl_wait();
    pdl_launch();
    stage_rows(m, smem_u32(smem), act, thread - CONSUMERS * 32);
  } else {
    registers<MULTIPLYING, true>();
    Feed f;
    Warp w = begin(f, m, smem, ring, values, scales, two_7, thread);
    pdl_wait();
    pdl_launch();
    work(w, f, m, values, scales, [&](int chunk, int unit, auto& c) {
      const int g = lane >> 2, t = lane & 3, count = m.count[chunk];
      const int row = row_tile(unit * 4 + w.warp, NT) * 16 + g;
      const float* b = bias + (u64)m.expert[chunk] * NROWS + row;
      const float bias0 = b[0], bias8 = b[8];
      const u16* pairs = m.pairs + m.start[chunk];
#pragma unroll
      for (int j = 0; j < sizeof(c) / 16; j++) {
        if (j * 8 >= count) break;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int n = j * 8 + 2 * t + h;
          if (n < count) {
            const int pair = pairs[n];
            u32* to = parts + (u64)pair * NROWS + row;
            give(to, fmaf(c[4 * j + h], TWO_64F, bias0) * m.weights[pair]);
            give(to + 8, fmaf(c[4 * j + 2 + h], TWO_64F, bias8) * m.weights[pair]);
          }
        }
      }
    });
    combine_all<ACTIVE, NROWS, CONSUMERS * 32>(m.ids, parts, out, tokens, thread);
  }
}
#endif
