// MXFP4 experts of gpt-oss for many tokens on sm90, both projections in one launch: weight rows are
// the M of wgmma, an expert's tokens its N. Compiled by NVRTC for sm_90a; see docs/kernels/.
// Weights lie as in experts.cu, and mxfp4.cuh decodes them.
//
// An expert's tokens are a chunk of up to MOST, or several of equal size, and a chunk's products
// run with the least N of a few that holds it. A unit of work is 64 weight rows over all of K for
// one chunk, one warpgroup's, and a round is as many units of a chunk as a block has groups. All
// rounds of up, then all of down, are numbered; a block takes the next number when it is free, so
// that whoever is faster does more, and every block finds from the routing itself what a number
// means.
//
// A warp streams its 16 rows through a ring that is private to each lane, as in experts.cu, and
// decodes them into the A registers of wgmma, 32 columns while the 32 before are multiplied. The
// ring reads on from one round into the next. Activations are staged by three more warps, a stage
// of CHUNK tiles for all groups, in a ring of SLOTS. The last warp tells other blocks which of a
// chunk's activations of down are complete.
//
// Compile-time: TOKENS at most, KT_UP and KT_DOWN tiles of 64 columns (so 128 KT_DOWN and 64 KT_UP
// weight rows), SKT_UP and SKT_DOWN column pairs of 32 in the scale storage, EXPERTS local experts,
// ACTIVE per token, ROUTED, GROUPS consuming warpgroups, CHUNK tiles in a stage, DEPTH stages of
// weights in a warp's ring, COLUMNS of products: bit N / 8 for each N; X_BYTES of activations,
// LOGITS, ID64, MAPPED as in routing.cuh.

#include "common.cuh"
#include "barriers.cuh"
#include "cp_async.cuh"
#include "mxfp4.cuh"
#include "wgmma.cuh"
#include "wgmma_any.cuh"
#include "routing.cuh"
#include "choose_alone.cuh"
#include "fragments.cuh"
#include "combine.cuh"

constexpr int CONSUMERS = GROUPS * 4, STAGERS = 3, WARPS = CONSUMERS + STAGERS + 1,
              THREADS = WARPS * 32;
// A thread's registers once the roles are known, out of those that all had at first (96 of 640
// threads, 128 of 512).
constexpr int MULTIPLYING = GROUPS == 4 ? 112 : 152, STAGING = GROUPS == 4 ? 32 : 56;
constexpr int most_of(int columns) { return columns > 1 ? 8 + most_of(columns / 2) : 0; }
constexpr int MOST = most_of(COLUMNS);

// One of the projections.
template <bool IS_DOWN> struct Of {
  static constexpr bool DOWN = IS_DOWN;
  static constexpr int KT = DOWN ? KT_DOWN : KT_UP, NROWS = DOWN ? 64 * KT_UP : 128 * KT_DOWN,
                       SKT = DOWN ? SKT_DOWN : SKT_UP;
  static constexpr int STAGES = (KT + CHUNK - 1) / CHUNK;  // of all of K
  static constexpr bool EVEN = KT % CHUNK == 0;
  static constexpr int NU = NROWS / 64, NT = NROWS / 16;  // units and row tiles of an expert
  static constexpr int ROUNDS = (NU + GROUPS - 1) / GROUPS;
  static constexpr int QUAD_BYTES = KT * 128;
  static constexpr u64 EXPERT_BYTES = (u64)(NROWS / 4) * QUAD_BYTES;
  static constexpr u64 EXPERT_SCALE_BYTES = (u64)((NROWS + 255) / 256 * 8) * SKT * 64;
};
using Up = Of<false>;
using Down = Of<true>;
constexpr bool BOTH_EVEN = Up::EVEN && Down::EVEN;
constexpr int MAX_PAIRS = TOKENS * ACTIVE;
constexpr int MAX_CHUNKS = EXPERTS + MAX_PAIRS / MOST;
constexpr int PASSES = (MAX_PAIRS + WARPS * 32 - 1) / (WARPS * 32);
constexpr int RING_STAGE =
    CHUNK * (512 + 32);  // of a warp: 16 bytes a lane and tile, then the scales
constexpr int WARP_RING = DEPTH * RING_STAGE;
constexpr int RING_BYTES = CONSUMERS * WARP_RING;
// Activations: a tile of 64 columns of a chunk, a stage of them, and how many fit. wgmma reads N
// rows from where a tile begins: rows past the chunk's are other bytes, and their columns are
// nobody's.
constexpr int TILE_BYTES = MOST * 128, SLOT_BYTES = CHUNK * TILE_BYTES,
              SLOTS = X_BYTES / SLOT_BYTES < 16 ? X_BYTES / SLOT_BYTES : 16;
// Of the rounds that a block knows of: those that some of its warps are still at lie within.
constexpr int KNOWN = 32;
// Of the tokens that one of at least 32 blocks adds up.
constexpr int SHARE_PICKS = (TOKENS / 32 + 3) * ACTIVE;

struct Meta {
  u64 full[SLOTS], empty[SLOTS];
  u64 known[KNOWN];     // a round is
  u64 written[KNOWN];   // all of a round's activations of down are
  u64 told[KNOWN];      // other blocks are, so that another round may have its place
  u32 round[KNOWN];     // see round_of
  int next[CONSUMERS];  // the round that a warp reads weights of
  int sums[4], chunks;
  float weights[SHARE_PICKS];  // of the block's share of the outputs
  u16 pairs[MAX_PAIRS];        // those of expert 0, of expert 1, ...
  u16 start[MAX_CHUNKS];       // of a chunk in `pairs`
  u16 offset[128];             // of an expert
  u8 count[MAX_CHUNKS], expert[MAX_CHUNKS];
  signed char ids[SHARE_PICKS];
};
constexpr int META_BYTES = (sizeof(Meta) + 127) / 128 * 128;
// Lies where activations come to lie.
struct Routed {
  float weights[MAX_PAIRS];
  u16 seen[WARPS * EXPERTS];
  signed char ids[MAX_PAIRS];
};
static_assert(EXPERTS <= 128 && MAX_CHUNKS <= 255 && SHARE_PICKS <= THREADS && Up::NU < 2048 &&
                  Down::NU < 2048 && X_BYTES % 1024 == 0,
    "shape");
static_assert(sizeof(Routed) <= X_BYTES, "routing");
// A warp asks for the round after those that its ring holds. It is known once all before the last
// of these are staged: without a slot for each stage in the ring that could wait for the warp
// itself.
static_assert(SLOTS >= DEPTH, "slots");

// The N of wgmma for a chunk of `count` tokens.
__device__ __forceinline__ int columns_of(int count) {
  int n = (count + 7) / 8;
  while (!(COLUMNS >> n & 1)) n++;
  return n * 8;
}

// ids and weights of all pairs.
__device__ __forceinline__ void read_routing(
    Routed& t, const u8* routing, const float* weights, const int* map, int tokens, int thread) {
  if (LOGITS && ROUTED % 8 == 0) {
    for (int token = thread; token < tokens; token += THREADS) choose_alone(t, routing, map, token);
  } else if (LOGITS) {
    choose_experts<4>(t.ids, t.weights, routing, map, tokens, thread >> 5, WARPS, thread & 31);
  } else {
    for (int i = thread; i < tokens * ACTIVE; i += THREADS) {
      t.ids[i] = local_id(routing, map, i);
      t.weights[i] = ld_cg(weights + i);
    }
  }
  __syncthreads();
}

// This block's share of the outputs: so many times eight of a token, and the first of its tokens.
constexpr int EIGHTS = Down::NROWS / 8;
__device__ __forceinline__ int eights_each(int tokens) {
  return (tokens * EIGHTS + gridDim.x - 1) / gridDim.x;
}
__device__ __forceinline__ int share_token(int tokens) {
  return blockIdx.x * eights_each(tokens) / EIGHTS;
}

// The chunks of each expert, in the order of experts, by threads with an expert's `count` each: of
// four warps, in a block of which all come here.
__device__ __forceinline__ void list_chunks(Meta& m, int count, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const int chunks = (count + MOST - 1) / MOST, size = chunks ? (count + chunks - 1) / chunks : 0;
  int places = count | chunks << 16;
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const int p = __shfl_up_sync(~0u, places, d);
    places += lane >= d ? p : 0;
  }
  if (warp < 4 && lane == 31) m.sums[warp] = places;
  __syncthreads();
  if (warp >= 4) return;
  places -= count | chunks << 16;
  for (int w = 0; w < warp; w++) places += m.sums[w];
  const int start = places & 0xFFFF, chunk = places >> 16;
  m.offset[thread] = start;
  for (int i = 0; i < chunks; i++) {
    m.start[chunk + i] = start + i * size;
    m.count[chunk + i] = min(size, count - i * size);
    m.expert[chunk + i] = thread;
  }
  if (thread == 127) m.chunks = chunk + chunks;
}

// A round: `units` units from `unit` on of a chunk, of one projection.
struct Round {
  int chunk, unit, units;
  bool down;
};
// Of the last chunks, a round of down for each block at most, four groups share rounds of half the
// units, so that blocks end together: two groups work nearly as fast as four. Two of three do not.
constexpr int FEW = GROUPS == 4 ? 2 : GROUPS, ENDING = (Down::NU + FEW - 1) / FEW;
constexpr u32 IS_DOWN = 1u << 31, HAS_FEW = 1u << 30, NO_ROUND = ~0u;
__device__ __forceinline__ int last_chunks(int chunks) {
  return min(chunks, (int)gridDim.x / ENDING);
}
__device__ __forceinline__ int rounds_of(int chunks) {
  return chunks * (Up::ROUNDS + Down::ROUNDS) + last_chunks(chunks) * (ENDING - Down::ROUNDS);
}
// What round number `i` is, or that there is none.
__device__ __forceinline__ u32 round_of(int i, int chunks) {
  const int before = chunks - last_chunks(chunks);
  if (i < chunks * Up::ROUNDS) return i / Up::ROUNDS | i % Up::ROUNDS * GROUPS << 8;
  i -= chunks * Up::ROUNDS;
  if (i < before * Down::ROUNDS) return i / Down::ROUNDS | i % Down::ROUNDS * GROUPS << 8 | IS_DOWN;
  i -= before * Down::ROUNDS;
  if (i < (chunks - before) * ENDING)
    return before + i / ENDING | i % ENDING * FEW << 8 | IS_DOWN | HAS_FEW;
  return NO_ROUND;
}
__device__ __forceinline__ Round as_round(u32 r) {
  const bool down = r & IS_DOWN;
  const int unit = r >> 8 & 2047;
  return {(int)(r & 255), unit, min(r & HAS_FEW ? FEW : GROUPS, (down ? Down::NU : Up::NU) - unit),
      down};
}
// The block's round `i`, once it is known.
__device__ __forceinline__ u32 await_round(const Meta& m, int i) {
  bar_wait(smem_u32(m.known + i % KNOWN), i / KNOWN & 1);
  return m.round[i % KNOWN];
}

// Chunks, and the pairs of each.
__device__ __forceinline__ void find_work(Meta& m, Routed& t, int tokens, int thread) {
  const int warp = thread >> 5, lane = thread & 31, pairs = tokens * ACTIVE;
  const int each = (pairs + WARPS * 32 - 1) / (WARPS * 32) * 32;
  u16 ranks[PASSES];
  rank_pairs<PASSES>(
      ranks, t.seen + warp * EXPERTS, t.ids, warp * each, min(pairs, (warp + 1) * each), lane);
  const int pick = share_token(tokens) * ACTIVE + thread;
  if (thread < SHARE_PICKS && pick < pairs) {
    m.weights[thread] = t.weights[pick];
    m.ids[thread] = t.ids[pick];
  }
  __syncthreads();
  list_chunks(m, thread < EXPERTS ? count_before_warps<WARPS>(t.seen, thread) : 0, thread);
  __syncthreads();
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int i = warp * each + p * 32 + lane;
    if (p * 32 < each && i < pairs && t.ids[i] >= 0)
      m.pairs[m.offset[t.ids[i]] + t.seen[warp * EXPERTS + t.ids[i]] + ranks[p]] = i;
  }
  __syncthreads();
}

// The thread, read again: what follows from it is then worked out where it is needed instead of
// held in registers through the loops.
__device__ __forceinline__ int thread_now() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

struct Weights {
  const u8 *values, *scales;
  const float* bias;
};
struct Sources {
  Weights up, down;
};
// Where a warp reads weights: stage after stage of a unit of every round.
struct Feed {
  const u8 *values, *scales;
  int left;  // tiles of the unit
};

// Asks L2 for the unit's bias.
template <class P>
__device__ __forceinline__ void point(
    Feed& f, const Weights& w, int expert, int unit, int warp, int lane) {
  const int tile = row_tile(unit * 4 + warp, P::NT);
  if (lane == 0)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(w.bias + (u64)expert * P::NROWS + tile * 16));
  f.left = P::KT;
  f.values = w.values + expert * P::EXPERT_BYTES + (u64)(tile * 4 + (lane >> 3)) * P::QUAD_BYTES +
             ((lane >> 2) & 1) * 64 + (lane & 3) * 16;
  f.scales = w.scales + expert * P::EXPERT_SCALE_BYTES +
             (u64)(((tile >> 4) * 8 + (tile & 7)) * P::SKT + (lane >> 1)) * 64 +
             ((tile >> 3) & 1) * 32 + (lane & 1) * 16;
}

// Goes to the block's next round, which may have no unit for some groups.
__device__ __forceinline__ void seek(Feed& f, Meta& m, const Sources& from) {
  const int warp = thread_now() >> 5, lane = thread_now() & 31, next = m.next[warp];
  const u32 found = await_round(m, next);
  __syncwarp();
  if (lane == 0) m.next[warp] = next + 1;
  __syncwarp();
  f.left = 0;
  const Round r = as_round(found);
  if (found == NO_ROUND || (warp >> 2) >= r.units) return;
  const int expert = m.expert[r.chunk], unit = r.unit + (warp >> 2);
  if (r.down)
    point<Down>(f, from.down, expert, unit, warp & 3, lane);
  else
    point<Up>(f, from.up, expert, unit, warp & 3, lane);
}

// Starts the loads of one stage of the ring. Always commits, so that all lanes count the same
// groups.
__device__ __forceinline__ void fetch(Feed& f, Meta& m, const Sources& from, u32 ring, int lane) {
  if (f.left > 0) {
    const int tiles = BOTH_EVEN ? CHUNK : min(CHUNK, f.left);
    if (lane < 2 * tiles) cp16_once(ring + CHUNK * 512, f.scales);
#pragma unroll
    for (int k = 0; k < CHUNK; k++)
      if (BOTH_EVEN || k < tiles) cp16_once(ring + k * 512, f.values + k * 128);
    f.values += CHUNK * 128;
    f.scales += CHUNK * 64;
    f.left -= CHUNK;
    if (f.left <= 0) seek(f, m, from);
  }
  cp_commit();
}

// What a consuming warp keeps through all rounds.
struct Warp {
  int lane;
  u32 ring, scales, slot;  // this lane's values and scales in stage 0, bytes to the stage now
                           // worked on
  u32 x;                   // shared memory: the activations, and behind them the barriers
  Place<SLOTS> s;          // of the activations' next stage
  u32 two_7;
};

// No proxy fence: what cp.async wrote and an mbarrier announced, wgmma reads.
__device__ __forceinline__ void await_stage(const Warp& w) {
  bar_wait(w.x + X_BYTES + 8 * w.s.at, w.s.parity);
}
__device__ __forceinline__ void release(const Warp& w, int s) {
  bar_arrive_warp(w.x + X_BYTES + 8 * (SLOTS + s), w.lane);
}

// The first DEPTH stages of weights of the next round.
__device__ __forceinline__ void begin(const Warp& w, Feed& f, Meta& m, const Sources& from) {
  seek(f, m, from);
  u32 slot = w.slot;
  for (int s = 0; s < DEPTH; s++) {
    fetch(f, m, from, w.ring + slot, w.lane);
    slot = slot == (DEPTH - 1) * RING_STAGE ? 0 : slot + RING_STAGE;
  }
}

// The 64 rows x N products of one unit over `kt` tiles of K, times 2^-64.
template <int N>
__device__ __forceinline__ void multiply(
    float (&c)[N / 2], Warp& w, Feed& f, Meta& m, const Sources& from, int kt) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) c[i] = 0.f;
  u32 a[2][8];
  int before = -1;
#pragma unroll 1
  for (; kt > 0; kt -= CHUNK) {
    cp_wait<DEPTH - 1>();
    __syncwarp();
    await_stage(w);
    // Of one lane, so that the compiler knows it for the same in all and keeps it in a uniform
    // register.
    const u64 b =
        whole_descriptor(__shfl_sync(~0u, b_descriptor(w.x) + w.s.at * (SLOT_BYTES / 16), 0));
    const u32 ring = w.ring + w.slot, scale = w.scales + w.slot;
#pragma unroll
    for (int k = 0; k < CHUNK; k++) {
      if (BOTH_EVEN || k < kt) {
        const uint4 v = lds16(ring + k * 512);
        const u32 s4 = lds4(scale + k * 32);
        const u64 d = b + k * (TILE_BYTES / 16);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          scaled(a[half], half ? v.z : v.x, half ? v.w : v.y,
              half ? scales16<2>(s4, w.two_7) : scales16<0>(s4, w.two_7));
          wgmma_fence();
          products<N>(c, a[half], d + half * 4, d + half * 4 + 2);
          wgmma_wait<1>();
          if (k == 0 && half == 0 && before >= 0) release(w, before);
        }
      }
    }
    __syncwarp();
    fetch(f, m, from, ring, w.lane);
    w.slot = w.slot == (DEPTH - 1) * RING_STAGE ? 0 : w.slot + RING_STAGE;
    before = w.s.at;
    w.s.next();
  }
  wgmma_wait<0>();
  release(w, before);
}

struct Outputs {
  u16* act;
  u32* parts;
  Gate gate;
};

// act[pair, I] = swiglu(w13[expert] x[token] + b13[expert]); gate and up rows are interleaved.
template <int HALF>
__device__ __forceinline__ void finish_up(float (&c)[HALF], const u16* pairs, int count,
    float bias0, float bias8, const Outputs& to, int tile, int lane) {
  u16* out = to.act + tile * 8 + lane_column(lane);
#pragma unroll
  for (int j = 0; j < HALF / 4; j++) {
    if (j * 8 >= count) break;
    const u32 two = gated(sums_of(c, j, bias0, bias8), to.gate, lane);
    const int n = j * 8 + lane_token(lane);
    if (n < count) *reinterpret_cast<u32*>(out + (u64)pairs[n] * (Up::NROWS / 2)) = two;
  }
}

// Partial sums w2[expert] act[pair] + b2[expert] in bf16, before the routing's weight.
template <int HALF>
__device__ __forceinline__ void finish_down(float (&c)[HALF], const u16* pairs, int count,
    float bias0, float bias8, const Outputs& to, int tile, int lane) {
  u32* out = to.parts + (tile * 16 + lane_row(lane)) / 2;
#pragma unroll
  for (int j = 0; j < HALF / 4; j++) {
    if (j * 8 >= count) break;
    const uint2 four = plain(sums_of(c, j, bias0, bias8), lane);
    const int n = j * 8 + lane_token(lane);
    if (n < count) give2(out + (u64)pairs[n] * (Down::NROWS / 2), four);
  }
}

// The 16 rows of this warp in the group's unit of a round.
template <class P> __device__ __forceinline__ int tile_of(const Round& r) {
  const int warp = thread_now() >> 5;
  return row_tile((r.unit + (warp >> 2)) * 4 + (warp & 3), P::NT);
}
// The bias of its rows g and g + 8. Asked for here and not where it is needed.
template <class P>
__device__ __forceinline__ float2 bias_of(const Meta& m, const float* all, const Round& r) {
  const float* from =
      all + (u64)m.expert[r.chunk] * P::NROWS + tile_of<P>(r) * 16 + ((thread_now() & 31) >> 2);
  float2 bias;
  asm volatile("ld.global.nc.f32 %0, [%2];\nld.global.nc.f32 %1, [%2 + 32];"
      : "=f"(bias.x), "=f"(bias.y)
      : "l"(from));
  return bias;
}

// The group's unit of a round.
template <class P, int HALF>
__device__ __forceinline__ void finish(
    float (&c)[HALF], const Meta& m, float2 bias, const Outputs& to, const Round& r) {
  const int lane = thread_now() & 31, tile = tile_of<P>(r), count = m.count[r.chunk];
  const u16* pairs = m.pairs + m.start[r.chunk];
  if constexpr (P::DOWN)
    finish_down(c, pairs, count, bias.x, bias.y, to, tile, lane);
  else
    finish_up(c, pairs, count, bias.x, bias.y, to, tile, lane);
}

// The block's round `i`. The code for both projections is the same: ptxas gives each loop with
// wgmma registers of its own, and more loops than these do not fit.
template <int N>
__device__ __forceinline__ void run_round(
    Warp& w, Feed& f, Meta& m, const Sources& from, const Outputs& to, int i) {
  Round r = as_round(m.round[i % KNOWN]);
  const int kt = r.down ? Down::KT : Up::KT;
  if ((thread_now() >> 7) < r.units) {
    float c[N / 2];
    const float2 bias =
        r.down ? bias_of<Down>(m, from.down.bias, r) : bias_of<Up>(m, from.up.bias, r);
    multiply<N>(c, w, f, m, from, kt);
    r = as_round(m.round[i % KNOWN]);
    if (r.down)
      finish<Down>(c, m, bias, to, r);
    else
      finish<Up>(c, m, bias, to, r);
  } else {
    // Its ring has run dry: the round after is not known before this one is staged, which waits for
    // the group to have read the last.
    begin(w, f, m, from);
    for (int left = kt; left > 0; left -= CHUNK) {
      await_stage(w);
      release(w, w.s.at);
      w.s.next();
    }
  }
  if (!r.down) {
    __syncwarp();
    bar_arrive_warp(smem_u32(m.written + i % KNOWN), w.lane);
  }
}

// All of the block's rounds, of a consuming warp, with its first DEPTH stages of weights on their
// way at once.
__device__ __forceinline__ void work(
    Meta& m, const u8* smem, u32 ring, const Sources& from, const Outputs& to, u32 two_7) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Warp w = {lane, ring + warp * WARP_RING + lane * 16,
      ring + warp * WARP_RING + CHUNK * 512 + (lane >> 2) * 4, 0, smem_u32(smem), {0, 0}, two_7};
  Feed f;
  if (lane == 0) m.next[warp] = 0;
  __syncwarp();
  begin(w, f, m, from);
#pragma unroll 1
  for (int i = 0;; i++) {
    const u32 r = await_round(m, i);
    if (r == NO_ROUND) break;
    switch (columns_of(m.count[as_round(r).chunk])) {
#define CASE(N)                                                             \
  case N:                                                                   \
    if constexpr (COLUMNS >> N / 8 & 1) run_round<N>(w, f, m, from, to, i); \
    break;
      CASE(16) CASE(24) CASE(32) CASE(48) CASE(64) CASE(80) CASE(96) CASE(112)
    }
  }
}

// A chunk's activations of x[pair / PICKS].
template <class P, int PICKS>
__device__ __forceinline__ void stage_round(
    Place<SLOTS>& s, const Meta& m, u32 x_at, const u8* __restrict__ x, int chunk, int thread) {
  const int count = m.count[chunk];
  const u32 full = smem_u32(m.full), empty = smem_u32(m.empty);
  const int row = thread >> 3, piece = thread & 7;
  constexpr int ROWS = STAGERS * 4, EACH = (MOST + ROWS - 1) / ROWS;
  u32 from[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int r = row + i * ROWS;
    from[i] = (r < count ? m.pairs[m.start[chunk] + r] / PICKS * P::QUAD_BYTES : 0) + piece * 16;
  }
  const u32 to_row = x_at + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll 1
  for (int stage = 0; stage < P::STAGES; stage++) {
    bar_wait(empty + 8 * s.at, s.parity ^ 1);
    const u32 to = to_row + s.at * SLOT_BYTES;
    const u8* source = x + stage * (CHUNK * 128);
#pragma unroll
    for (int r = 0; r < EACH; r++)
      if (row + r * ROWS < count)
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
          if (P::EVEN || stage * CHUNK + k < P::KT)
            cp16((to + r * (ROWS * 128) ^ (r * ROWS & 4) << 4) + k * TILE_BYTES,
                source + from[r] + k * 128);
    cp_arrive(full + 8 * s.at);
    s.next();
  }
}

// Counts a round of up for its chunk once its activations are written. By a thread of a warp
// without loads on their way: a fence waits for them.
__device__ __forceinline__ void tell(Meta& m, u32* ready) {
  for (int i = 0;; i++) {
    const u32 found = await_round(m, i);
    if (found == NO_ROUND) break;
    const Round r = as_round(found);
    if (!r.down) {
      bar_wait(smem_u32(m.written + i % KNOWN), i / KNOWN & 1);
      asm volatile(
          "fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(ready + r.chunk),
          "r"(r.units)
          : "memory");
    }
    bar_arrive(smem_u32(m.told + i % KNOWN));
  }
}
// Until all of up is there for a chunk. Readers count on, and the last sets the counter back.
__device__ __forceinline__ void await_chunk(u32* ready, int units) {
  u32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
  } while (seen < Up::NU);
  if (atomicAdd(ready, units) + units == Up::NU + Down::NU) *ready = 0;
}

// The numbers of the block's rounds, by one thread: its own first, then what the counter `taken`
// says. A number is asked for while the round before is staged.
struct Numbers {
  u32* taken;
  int rounds, next;
  __device__ __forceinline__ void ask() { next = atomicAdd(taken, 1) + gridDim.x; }
  // Says what the block's round `i` is, and asks for another. Every block asks once in vain, and
  // the last to do so sets the counter back.
  __device__ __forceinline__ void say(Meta& m, int i) {
    const u32 r = round_of(next, m.chunks);
    if (i >= KNOWN) bar_wait(smem_u32(m.told + i % KNOWN), i / KNOWN - 1 & 1);
    m.round[i % KNOWN] = r;
    bar_arrive(smem_u32(m.known + i % KNOWN));
    if (r != NO_ROUND)
      ask();
    else if (next == max(rounds, (int)gridDim.x) + gridDim.x - 1)
      *taken = 0;
  }
};

__device__ __forceinline__ void stage(
    Meta& m, u32 x_at, const u8* __restrict__ x, const u8* act, u32* ready, int thread) {
  Place<SLOTS> s = {0, 0};
  Numbers numbers = {ready + MAX_CHUNKS, rounds_of(m.chunks), (int)blockIdx.x};
  if (thread == 0) {
    if (numbers.next >= numbers.rounds) numbers.ask();
    numbers.say(m, 0);
  }
#pragma unroll 1
  for (int i = 0;; i++) {
    const u32 found = await_round(m, i);
    if (found == NO_ROUND) break;
    if (thread == 0) numbers.say(m, i + 1);
    const Round r = as_round(found);
    if (r.down) {
      if (thread == 0) await_chunk(ready + r.chunk, r.units);
      named_sync<1, STAGERS * 32>();
      stage_round<Down, 1>(s, m, x_at, act, r.chunk, thread);
    } else {
      stage_round<Up, ACTIVE>(s, m, x_at, x, r.chunk, thread);
    }
  }
}

// Eight outputs of a token and where their partial sums are.
struct Eight {
  u32* from;
  u16* to;
  int pick;
  uint4 seen[ACTIVE];
};
__device__ __forceinline__ void look_at(
    Eight& e, const Meta& m, u32* parts, u16* out, int at, int token0) {
  const int token = at / EIGHTS, row = at % EIGHTS * 8;
  e.pick = (token - token0) * ACTIVE;
  e.from = parts + ((u64)token * ACTIVE * Down::NROWS + row) / 2;
  e.to = out + (u64)token * Down::NROWS + row;
#pragma unroll
  for (int a = 0; a < ACTIVE; a++)
    e.seen[a] =
        m.ids[e.pick + a] < 0 ? make_uint4(0, 0, 0, 0) : look4(e.from + a * (Down::NROWS / 2));
}
// Partial sums times their weights in the order of a token's choices, as soon as all have arrived.
__device__ __forceinline__ void add_up(Eight& e, const Meta& m) {
  float sum[8] = {};
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) {
    while (!arrived(e.seen[a])) {
      __nanosleep(40);
      e.seen[a] = look4(e.from + a * (Down::NROWS / 2));
    }
    add_weighted(sum, e.seen[a], m.weights[e.pick + a]);
  }
#pragma unroll
  for (int a = 0; a < ACTIVE; a++)
    if (m.ids[e.pick + a] >= 0)
      *reinterpret_cast<uint4*>(e.from + a * (Down::NROWS / 2)) =
          make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  *reinterpret_cast<uint4*>(e.to) = pack8(sum);
}
// As combine_all, with ids and weights of this block's share alone, two places of a thread at once.
__device__ __forceinline__ void combine_share(
    const Meta& m, u32* parts, u16* out, int tokens, int thread) {
  constexpr int MEMBERS = CONSUMERS * 32, TOGETHER = ACTIVE <= 4 ? 2 : 1;
  const int each = eights_each(tokens), first = blockIdx.x * each, token0 = share_token(tokens),
            end = min(first + each, tokens * EIGHTS);
#pragma unroll 1
  for (int at = first + thread; at < end; at += MEMBERS * TOGETHER) {
    Eight e[TOGETHER];
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
      if (at + i * MEMBERS < end) look_at(e[i], m, parts, out, at + i * MEMBERS, token0);
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
      if (at + i * MEMBERS < end) add_up(e[i], m);
  }
}

// Asks L2 for what this warp's ring takes first, if all experts have tokens, as they will: the
// routing comes later.
__device__ __forceinline__ void foresee(const u8* values, int tokens, int thread) {
  const int lane = thread & 31, expert = blockIdx.x / Up::ROUNDS,
            unit = blockIdx.x % Up::ROUNDS * GROUPS + (thread >> 7);
  if (tokens * ACTIVE < 8 * EXPERTS || thread >= CONSUMERS * 32 || expert >= EXPERTS ||
      unit >= Up::NU)
    return;
  const u8* from = values + expert * Up::EXPERT_BYTES +
                   (u64)row_tile(unit * 4 + (thread >> 5 & 3), Up::NT) * 4 * Up::QUAD_BYTES;
  constexpr int LINES = DEPTH * CHUNK < KT_UP ? DEPTH * CHUNK : KT_UP;
  for (int i = lane; i < 4 * LINES; i += 32)
    asm volatile(
        "prefetch.global.L2 [%0];" ::"l"(from + i / LINES * Up::QUAD_BYTES + i % LINES * 128));
}

// out[token] = sum over its choices of weight x (w2[expert] swiglu(w13[expert] x[token] + b13) +
// b2[expert]). `act` [pairs, I] is between the two; `ready` [MAX_CHUNKS + 1] and `parts` are as
// they were when the launch ends. Blocks exchange activations and partial sums and wait for one
// another, so all of the grid must fit on the GPU at once: one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_both(const u8* __restrict__ up,
    const u8* __restrict__ up_scales, const float* __restrict__ up_bias,
    const u8* __restrict__ down, const u8* __restrict__ down_scales,
    const float* __restrict__ down_bias, const u8* __restrict__ x, const u8* __restrict__ routing,
    const float* __restrict__ weights, const int* __restrict__ map, u16* act, u32* ready,
    u32* parts, u16* __restrict__ out, int tokens, u32 two_7, float alpha, float limit) {
  extern __shared__ __align__(1024) u8 smem[];
  Meta& m = *reinterpret_cast<Meta*>(smem + X_BYTES);
  const int thread = threadIdx.x, lane = thread & 31;
  if (thread < SLOTS) {
    bar_init(smem_u32(m.full + thread), STAGERS * 32);
    bar_init(smem_u32(m.empty + thread), CONSUMERS * SPEAKERS);
  }
  if (thread < KNOWN) {
    bar_init(smem_u32(m.known + thread), 1);
    bar_init(smem_u32(m.written + thread), CONSUMERS * SPEAKERS);
    bar_init(smem_u32(m.told + thread), 1);
  }
  foresee(up, tokens, thread);
  pdl_wait();
  pdl_launch();
  Routed& t = *reinterpret_cast<Routed*>(smem);
  read_routing(t, routing, weights, map, tokens, thread);
  find_work(m, t, tokens, thread);
  fence_async();
  if (thread >= CONSUMERS * 32) {
    registers<STAGING, false>();
    if (thread < (CONSUMERS + STAGERS) * 32)
      stage(m, smem_u32(smem), x, reinterpret_cast<const u8*>(act), ready, thread - CONSUMERS * 32);
    else if (lane == 0)
      tell(m, ready);
  } else {
    registers<MULTIPLYING, true>();
    work(m, smem, smem_u32(smem + X_BYTES + META_BYTES),
        {{up, up_scales, up_bias}, {down, down_scales, down_bias}}, {act, parts, {alpha, limit}},
        two_7);
    combine_share(m, parts, out, tokens, thread);
  }
}
