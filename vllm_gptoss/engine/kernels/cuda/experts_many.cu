// MXFP4 experts of gpt-oss for many tokens on sm90, both projections in one launch: weight rows are
// the M of wgmma, an expert's tokens its N. Compiled by NVRTC for sm_90a; see docs/kernels/.
// Weights lie as in experts.cu, and mxfp4.cuh decodes them.
//
// An expert's tokens are a chunk of up to MOST, or several of equal size, and a chunk's products
// run with the least N of a few that holds it. A unit of work is 64 weight rows over all of K for
// one chunk, one warpgroup's, and a round is as many units of a chunk as a block has groups. All
// rounds of up, then all of down, are numbered. A block takes the next number when it is free, so
// that faster blocks do more rounds. Every block computes the round of a number from the routing.
//
// Weights and activations are loaded in stages of CHUNK tiles for all groups. One thread starts the
// bulk copies of a stage's weights, a box of 64 rows for each group, up to DEPTH stages ahead and
// on into the next round. STAGERS warps stage activations, in a ring of SLOTS. A warp that
// multiplies decodes its 16 rows into the A registers of wgmma, 32 columns while the 32 before are
// multiplied. A unit takes whole passes through the ring of weights, so that a loop over a pass
// knows where everything lies: where K ends before a pass does, its last stages hold nothing.
// Another thread signals to other blocks which of a chunk's activations of down are complete.
//
// Compile-time: TOKENS at most, KT_UP and KT_DOWN tiles of 64 columns (so 128 KT_DOWN and 64 KT_UP
// weight rows), EXPERTS local experts, ACTIVE per token, ROUTED, GROUPS consuming warpgroups, CHUNK
// tiles in a stage, DEPTH stages of weights, UNROLLED of them in the loop, COLUMNS of products: bit
// N / 8 for each N; X_BYTES of activations, LOGITS, ID64, MAPPED as in routing.cuh.

#include "common.cuh"
#include "barriers.cuh"
#include "bulk.cuh"
#include "cp_async.cuh"
#include "tensor_map.cuh"
#include "mxfp4.cuh"
#include "wgmma.cuh"
#include "wgmma_any.cuh"
#include "routing.cuh"
#include "choose_alone.cuh"
#include "fragments.cuh"
#include "combine.cuh"

// Numbers of warps, the thread that starts weight copies (FEEDER), and the thread that signals
// other blocks (TELLER). Three groups leave registers for a third staging warp. FEEDER and TELLER
// are then in one warp.
constexpr int CONSUMERS = GROUPS * 4, STAGERS = GROUPS == 4 ? 2 : 3, WARPS = CONSUMERS + 4,
              THREADS = WARPS * 32, FEEDER = (CONSUMERS + STAGERS) * 32, TELLER = THREADS - 16;
// A thread's registers once the roles are known, out of those that all had at first (96 of 640
// threads, 128 of 512).
constexpr int MULTIPLYING = GROUPS == 4 ? 104 : 152, STAGING = GROUPS == 4 ? 64 : 56;
constexpr int most_of(int columns) { return columns > 1 ? 8 + most_of(columns / 2) : 0; }
constexpr int MOST = most_of(COLUMNS);

// One of the projections.
template <bool IS_DOWN> struct Of {
  static constexpr bool DOWN = IS_DOWN;
  static constexpr int KT = DOWN ? KT_DOWN : KT_UP, NROWS = DOWN ? 64 * KT_UP : 128 * KT_DOWN;
  // Of all of K: whole passes through the ring of weights.
  static constexpr int STAGES = (KT + DEPTH * CHUNK - 1) / (DEPTH * CHUNK) * DEPTH;
  static constexpr bool EVEN = KT == STAGES * CHUNK;
  static constexpr int NU = NROWS / 64;  // units of an expert
  static constexpr int ROUNDS = (NU + GROUPS - 1) / GROUPS;
  static constexpr int QUAD_BYTES = KT * 128;
  static constexpr int QUADS = NROWS / 4, SCALE_ROWS = (NROWS + 255) / 256 * 8;  // of an expert
};
using Up = Of<false>;
using Down = Of<true>;
constexpr bool BOTH_EVEN = Up::EVEN && Down::EVEN;
constexpr int MAX_PAIRS = TOKENS * ACTIVE;
constexpr int MAX_CHUNKS = EXPERTS + MAX_PAIRS / MOST;
constexpr int PASSES = (MAX_PAIRS + THREADS - 1) / THREADS;
// A stage of a unit's weights, a quad of rows after another, and of its scales, a row tile after
// another. Stages of all groups' values come first.
constexpr int UNIT_VALUES = CHUNK * 2048, UNIT_SCALES = CHUNK * 128,
              VALUES_STAGE = GROUPS * UNIT_VALUES, SCALES_STAGE = GROUPS * UNIT_SCALES,
              RING_BYTES = DEPTH * (VALUES_STAGE + SCALES_STAGE);
// Activations: a tile of 64 columns of a chunk, a stage of them, and how many fit. wgmma reads N
// rows from where a tile begins. Rows past the chunk's contain unrelated bytes, and their columns
// of the result are ignored.
constexpr int TILE_BYTES = MOST * 128, SLOT_BYTES = CHUNK * TILE_BYTES,
              SLOTS = X_BYTES / SLOT_BYTES < DEPTH ? X_BYTES / SLOT_BYTES : DEPTH;
// A loop over a pass with a slot for each stage knows them when compiled; any other counts.
constexpr bool COUNTS_SLOTS = SLOTS < DEPTH || UNROLLED == 1;
// Of the rounds that a block knows of: those that some of its warps are still at lie within.
constexpr int KNOWN = 32;
// Of the tokens that one of at least 32 blocks adds up.
constexpr int SHARE_PICKS = (TOKENS / 32 + 3) * ACTIVE;

struct Meta {
  u64 there[DEPTH], read[DEPTH];  // a stage is
  u64 guessed;                    // weights are there, right or wrong
  u64 known[KNOWN];               // a round is
  u64 written[KNOWN];             // all of a round's activations of down are
  u64 told[KNOWN];                // other blocks are, so that another round may have its place
  u32 round[KNOWN];               // see round_of
  int sums[4], chunks;
  float weights[SHARE_PICKS];  // of the block's share of the outputs
  u16 pairs[MAX_PAIRS];        // those of expert 0, of expert 1, ...
  u16 start[MAX_CHUNKS];       // of a chunk in `pairs`
  u16 offset[128];             // of an expert
  u8 count[MAX_CHUNKS], expert[MAX_CHUNKS], order[MAX_CHUNKS];
  signed char ids[SHARE_PICKS];
};
constexpr int META_BYTES = (sizeof(Meta) + 127) / 128 * 128;
// Lies where activations come to lie.
struct Routed {
  float weights[MAX_PAIRS];
  u32 counts[128];  // of an expert's pairs
  signed char ids[MAX_PAIRS];
};
static_assert(EXPERTS <= 128 && MAX_CHUNKS <= 255 && SHARE_PICKS <= THREADS && Up::NU < 2048 &&
                  Down::NU < 2048 && X_BYTES % 1024 == 0,
    "shape");
static_assert(sizeof(Routed) <= X_BYTES, "routing");
static_assert(SLOTS >= 2, "a stage has been read only when the next one is there");

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
    choose_side_by_side<THREADS>(t, routing, map, tokens, thread);
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
  int places = sum_up_to(count | chunks << 16, lane);
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
// Down goes through the second half of the chunks from the most tokens to the least, so that blocks
// end together. Up does not: its first weights are guessed, and down must find it done.
__device__ __forceinline__ void order_second_half(Meta& m, int thread) {
  const int half = m.chunks / 2, mine = half + thread;
  if (mine >= m.chunks) return;
  const int count = m.count[mine];
  int place = half;
  for (int i = half; i < m.chunks; i++)
    place += m.count[i] > count || (m.count[i] == count && i < mine);
  m.order[place] = mine;
}
__device__ __forceinline__ int chunk_of_down(const Meta& m, int i) {
  return i < m.chunks / 2 ? i : m.order[i];
}
// What round number `i` is, or that there is none.
__device__ __forceinline__ u32 round_of(int i, const Meta& m) {
  const int chunks = m.chunks;
  const int before = chunks - last_chunks(chunks);
  if (i < chunks * Up::ROUNDS) return i / Up::ROUNDS | i % Up::ROUNDS * GROUPS << 8;
  i -= chunks * Up::ROUNDS;
  if (i < before * Down::ROUNDS)
    return chunk_of_down(m, i / Down::ROUNDS) | i % Down::ROUNDS * GROUPS << 8 | IS_DOWN;
  i -= before * Down::ROUNDS;
  if (i < (chunks - before) * ENDING)
    return chunk_of_down(m, before + i / ENDING) | i % ENDING * FEW << 8 | IS_DOWN | HAS_FEW;
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

// The pairs of experts of several chunks, an expert a warp: in order, so that all blocks agree on
// what a chunk is.
__device__ __forceinline__ void list_in_order(Meta& m, const Routed& t, int pairs, int thread) {
  const int lane = thread & 31;
  for (int e = thread >> 5; e < EXPERTS; e += WARPS) {
    if (t.counts[e] <= MOST) continue;
    int at = m.offset[e];
    for (int first = 0; first < pairs; first += 32) {
      const bool its = first + lane < pairs && t.ids[first + lane] == e;
      const u32 all = __ballot_sync(~0u, its);
      if (its) m.pairs[at + __popc(all & ((1u << lane) - 1))] = first + lane;
      at += __popc(all);
    }
  }
}
// Finds the chunks and the pairs of each. The order of the pairs of a one-chunk expert may differ
// between blocks. The sums do not depend on it, since each pair's products form a separate column.
__device__ __forceinline__ void find_work(Meta& m, Routed& t, int tokens, int thread) {
  const int pairs = tokens * ACTIVE;
  signed char expert[PASSES];
  u16 ranks[PASSES];
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int i = p * THREADS + thread;
    expert[p] = i < pairs ? t.ids[i] : -1;
  }
#pragma unroll
  for (int p = 0; p < PASSES; p++)
    if (expert[p] >= 0) ranks[p] = atomicAdd(t.counts + expert[p], 1u);
  const int pick = share_token(tokens) * ACTIVE + thread;
  if (thread < SHARE_PICKS && pick < pairs) {
    m.weights[thread] = t.weights[pick];
    m.ids[thread] = t.ids[pick];
  }
  __syncthreads();
  list_chunks(m, thread < EXPERTS ? t.counts[thread] : 0, thread);
  __syncthreads();
  order_second_half(m, thread);
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int e = expert[p];
    if (e >= 0 && t.counts[e] <= MOST) m.pairs[m.offset[e] + ranks[p]] = p * THREADS + thread;
  }
  list_in_order(m, t, pairs, thread);
  __syncthreads();
}

// The thread, read again: what follows from it is then worked out where it is needed instead of
// held in registers through the loops.
__device__ __forceinline__ int thread_now() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}

// Weights as the copy engine finds them: quads of rows of all experts, 8 bytes an element; and
// their scales.
struct Maps {
  const TensorMap *up, *up_scales, *down, *down_scales;
};
struct Biases {
  const float *up, *down;
};

// The weights of all rounds, by one thread.
struct Feeder {
  u32 ring, there, read, guessed;
  Maps from;
  u64 policy;
  int expert, stages;  // of the guess
  // Stage `stage` of a round's weights.
  template <class P>
  __device__ __forceinline__ void load(int at, u32 bar, const TensorMap* values,
      const TensorMap* scales, int expert, const Round& r, int stage) {
    bar_expect(bar, r.units * (UNIT_VALUES + UNIT_SCALES));
#pragma unroll 1
    for (int g = 0; g < r.units; g++) {
      const int unit = r.unit + g;
      box_load(ring + at * VALUES_STAGE + g * UNIT_VALUES, values, stage * (CHUNK * 16),
          expert * P::QUADS + unit * 16, bar, policy);
      // Of a line of 64 bytes one half is for tiles 0 to 7 of 16, the other for 8 to 15.
      box_load(ring + DEPTH * VALUES_STAGE + at * SCALES_STAGE + g * UNIT_SCALES, scales,
          (unit >> 1 & 1) * 4, stage * CHUNK,
          expert * P::SCALE_ROWS + (unit >> 2) * 8 + (unit & 1) * 4, bar);
    }
  }
  // Prefetches the first stages before the routing is known, assuming that each expert has one
  // chunk, which is true for many tokens.
  __device__ __forceinline__ void guess(int tokens) {
    expert = blockIdx.x / Up::ROUNDS;
    stages = tokens * ACTIVE < 8 * EXPERTS || expert >= EXPERTS ? 0 : min(DEPTH, Up::STAGES);
    const int unit = blockIdx.x % Up::ROUNDS * GROUPS;
    const Round r = {0, unit, min(GROUPS, Up::NU - unit), false};
    bar_init(guessed, DEPTH);
    bar_init_done();
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++)
      load<Up>(stage, guessed, from.up, from.up_scales, expert, r, stage);
    for (int stage = stages; stage < DEPTH; stage++) bar_arrive(guessed);
  }
  __device__ __forceinline__ void feed(const Meta& m) {
    Place<DEPTH> s = {0, 0};
    bar_wait(guessed, 0);
#pragma unroll 1
    for (int i = 0;; i++) {
      const u32 found = await_round(m, i);
      if (found == NO_ROUND) break;
      const Round r = as_round(found);
      const int its = m.expert[r.chunk], all = r.down ? Down::STAGES : Up::STAGES;
      const int right = i == 0 && !r.down && its == expert ? stages : 0;
#pragma unroll 1
      for (int stage = 0; stage < all; stage++, s.next()) {
        const u32 bar = there + 8 * s.at;
        bar_wait(read + 8 * s.at, s.parity ^ 1);
        if (stage < right)
          bar_arrive(bar);
        else if (r.down)
          load<Down>(s.at, bar, from.down, from.down_scales, its, r, stage);
        else
          load<Up>(s.at, bar, from.up, from.up_scales, its, r, stage);
      }
    }
  }
};

// What a consuming warp keeps through all rounds.
struct Warp {
  int lane;
  u32 values, scales;  // this lane's in stage 0
  u32 x;               // shared memory: the activations, and behind them the barriers
  u32 parity;          // of the next pass through the ring of weights
  int slot;            // of the next activations
  u32 two_7;
};
// The descriptor of the next slot of activations.
__device__ __forceinline__ u32 next_slot(Warp& w) {
  const int slot = w.slot;
  if (COUNTS_SLOTS) w.slot = slot == SLOTS - 1 ? 0 : slot + 1;
  return b_descriptor(w.x) + slot * (SLOT_BYTES / 16);
}

// No proxy fence: what cp.async wrote and an mbarrier announced, wgmma reads.
__device__ __forceinline__ void await_stage(const Warp& w, int s) {
  bar_wait(w.x + X_BYTES + 8 * s, w.parity);
}
__device__ __forceinline__ u32 read_at(const Warp& w, int s) {
  return w.x + X_BYTES + 8 * (DEPTH + s);
}
__device__ __forceinline__ void release(const Warp& w, int s) {
  bar_arrive_warp(read_at(w, s), w.lane);
}

// What a lane has of a tile of weights and of its scales.
struct Packed {
  uint4 values;
  u32 scales;
};
__device__ __forceinline__ Packed read_tile(const Warp& w, int s, int k) {
  return {lds16(w.values + s * VALUES_STAGE + k * 128), lds4(w.scales + s * SCALES_STAGE + k * 32)};
}

// The 64 rows x N products of one unit over `kt` tiles of K, times 2^-64. Of `sums` the first N / 2
// are these, the others are left as they are.
template <int N>
__device__ __forceinline__ void multiply(float (&sums)[MOST / 2], Warp& w, int kt) {
  float (&c)[N / 2] = reinterpret_cast<float (&)[N / 2]>(sums);
#pragma unroll
  for (int i = 0; i < N / 2; i++) c[i] = 0.f;
  u32 a[2][8], before = 0;
#pragma unroll 1
  for (; kt > 0; kt -= DEPTH * CHUNK) {
    u64 b;
#pragma unroll UNROLLED
    for (int s = 0; s < DEPTH; s++) {
      await_stage(w, s);
      // Of one lane, so that the compiler knows it for the same in all and keeps it in a uniform
      // register; again in each pass, so that it keeps no sums of it.
      if (s == 0 || COUNTS_SLOTS)
        b = whole_descriptor(__shfl_sync(~0u, next_slot(w), 0));
      else
        b += SLOT_BYTES / 16;
      // Read a tile ahead: no product waits for shared memory then, 1 to 2 % of all cycles.
      Packed next = read_tile(w, s, 0);
#pragma unroll
      for (int k = 0; k < CHUNK; k++) {
        if (BOTH_EVEN || s * CHUNK + k < kt) {
          const Packed t = next;
          const uint4 v = t.values;
          const u64 d = b + k * (TILE_BYTES / 16);
#pragma unroll
          for (int half = 0; half < 2; half++) {
            scaled(a[half], half ? v.z : v.x, half ? v.w : v.y,
                half ? scales16<2>(t.scales, w.two_7) : scales16<0>(t.scales, w.two_7));
            if (half == 0 && k + 1 < CHUNK) next = read_tile(w, s, k + 1);
            wgmma_fence();
            products<N>(c, a[half], d + half * 4, d + half * 4 + 2);
            wgmma_wait<1>();
            if (k == 0 && half == 0 && before) bar_arrive(before);
          }
        } else if (k == 0) {
          // Nothing of K is left here. Who stages the next one may wait for the one before.
          wgmma_wait<0>();
          if (before) bar_arrive(before);
        }
      }
      before = w.lane < SPEAKERS ? read_at(w, s) : 0;
    }
    w.parity ^= 1;
  }
  wgmma_wait<0>();
  release(w, DEPTH - 1);
}

struct Outputs {
  u16* act;
  u32* parts;
  Gate gate;
};

// The 16 rows of this warp in the group's unit of a round.
template <class P> __device__ __forceinline__ int tile_of(const Round& r) {
  return r.unit * 4 + (thread_now() >> 5);
}
// The bias of its rows g and g + 8. Loaded here, ahead of its use.
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

// Of the group's unit of a round, act[pair, I] = swiglu(w13[expert] x[token] + b13[expert]), of
// which gate and up rows are interleaved; or partial sums w2[expert] act[pair] + b2[expert] in
// bf16, before the routing's weight. What is finished past the chunk's tokens is of other bytes,
// and stored nowhere.
template <class P, int HALF>
__device__ __forceinline__ void finish(
    float (&c)[HALF], const Meta& m, float2 bias, const Outputs& to, const Round& r) {
  const int lane = thread_now() & 31, tile = tile_of<P>(r), count = m.count[r.chunk];
  const u16* pairs = m.pairs + m.start[r.chunk] + lane_token(lane);
  u32* out = P::DOWN ? to.parts + (tile * 16 + lane_row(lane)) / 2
                     : reinterpret_cast<u32*>(to.act + tile * 8 + lane_column(lane));
  constexpr int WIDTH = P::NROWS / (P::DOWN ? 2 : 4);
#pragma unroll
  for (int j = 0; j < HALF / 4; j += AT_ONCE) {
    if (j * 8 >= count) break;
    u32 pair[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) pair[i] = pairs[(j + i) * 8];
    const auto is_token = [&](int i) { return (j + i) * 8 + lane_token(lane) < count; };
    if constexpr (P::DOWN) {
      uint2 four[AT_ONCE];
      plain(four, c, j, bias, lane);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (is_token(i)) give2(out + (u64)pair[i] * WIDTH, four[i]);
    } else {
      u32 two[AT_ONCE];
      gated(two, c, j, bias, to.gate, lane);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++)
        if (is_token(i)) out[(u64)pair[i] * WIDTH] = two[i];
    }
  }
}

// Every N that there are products for.
#define EACH_N(OF) \
  OF(8) OF(16) OF(24) OF(32) OF(40) OF(48) OF(64) OF(72) OF(80) OF(88) OF(96) OF(112)
#define BIT(N) | 1 << N / 8
static_assert((COLUMNS & ~(0 EACH_N(BIT))) == 0, "columns without products");
#undef BIT

// The products of one unit with the N of its chunk.
__device__ __forceinline__ void multiply_columns(
    float (&c)[MOST / 2], Warp& w, int kt, int columns) {
  switch (columns) {
#define CASE(N)                                                \
  case N:                                                      \
    if constexpr (COLUMNS >> N / 8 & 1) multiply<N>(c, w, kt); \
    break;
    EACH_N(CASE)
#undef CASE
  }
}

// Runs the block's round `i`. Both projections share this code: ptxas allocates separate registers
// for each loop with wgmma, and the registers do not suffice for more loops.
__device__ __forceinline__ void run_round(
    Warp& w, Meta& m, const Biases& bias_from, const Outputs& to, int i) {
  Round r = as_round(m.round[i % KNOWN]);
  const int kt = r.down ? Down::KT : Up::KT;
  if ((thread_now() >> 7) < r.units) {
    float c[MOST / 2];
    const float2 bias =
        r.down ? bias_of<Down>(m, bias_from.down, r) : bias_of<Up>(m, bias_from.up, r);
    multiply_columns(c, w, kt, columns_of(m.count[r.chunk]));
    r = as_round(m.round[i % KNOWN]);
    if (r.down)
      finish<Down>(c, m, bias, to, r);
    else
      finish<Up>(c, m, bias, to, r);
  } else {
    for (int left = kt; left > 0; left -= DEPTH * CHUNK) {
      for (int s = 0; s < DEPTH; s++) {
        await_stage(w, s);
        next_slot(w);
        release(w, s);
      }
      w.parity ^= 1;
    }
  }
  __syncwarp();
  bar_arrive_warp(smem_u32(m.written + i % KNOWN), w.lane);
}

// All of the block's rounds, of a consuming warp.
__device__ __forceinline__ void work(
    Meta& m, const u8* smem, u32 ring, const Biases& biases, const Outputs& to, u32 two_7) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Warp w = {lane, ring + (warp * 4 + (lane >> 3)) * (CHUNK * 128) + (lane & 7) * 16,
      ring + DEPTH * VALUES_STAGE + warp * (CHUNK * 32) + (lane >> 2) * 4, smem_u32(smem), 0, 0,
      two_7};
#pragma unroll 1
  for (int i = 0;; i++) {
    const u32 r = await_round(m, i);
    if (r == NO_ROUND) break;
    run_round(w, m, biases, to, i);
  }
}

// Where activations are staged: the stage, its slot, and the stage that had the slot before.
struct Staging {
  Place<DEPTH> s, before;
  Place<SLOTS> slot;
  __device__ __forceinline__ void next() {
    s.next();
    slot.next();
    before.next();
  }
};

// A chunk's activations of x[pair / PICKS].
template <class P, int PICKS, class Ahead>
__device__ __forceinline__ void stage_round(Staging& s, const Meta& m, u32 x_at,
    const u8* __restrict__ x, int chunk, int thread, Ahead look_ahead) {
  const int count = m.count[chunk];
  const u32 there = smem_u32(m.there), read = smem_u32(m.read);
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
    look_ahead(P::STAGES - stage, P::STAGES);
    bar_wait(read + 8 * s.before.at, s.before.parity);
    const u32 to = to_row + s.slot.at * SLOT_BYTES;
    const u8* source = x + stage * (CHUNK * 128);
#pragma unroll
    for (int r = 0; r < EACH; r++)
      if (row + r * ROWS < count)
#pragma unroll
        for (int k = 0; k < CHUNK; k++)
          if (P::EVEN || stage * CHUNK + k < P::KT)
            cp16((to + r * (ROWS * 128) ^ (r * ROWS & 4) << 4) + k * TILE_BYTES,
                source + from[r] + k * 128);
    cp_arrive(there + 8 * s.s.at);
    s.next();
  }
}

// Counts the block's finished rounds in the counters of their chunks. A finished round of up has
// written its activations. The last round of down resets the counter. Runs on a thread that stages
// nothing, because a fence waits for the outstanding cp.async of its thread.
__device__ __forceinline__ void tell(Meta& m, u32* ready) {
  for (int i = 0;; i++) {
    const u32 found = await_round(m, i);
    if (found == NO_ROUND) break;
    const Round r = as_round(found);
    bar_wait(smem_u32(m.written + i % KNOWN), i / KNOWN & 1);
    if (!r.down)
      asm volatile(
          "fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(ready + r.chunk),
          "r"(r.units)
          : "memory");
    else if (atomicAdd(ready + r.chunk, r.units) + r.units == Up::NU + Down::NU)
      ready[r.chunk] = 0;
    bar_arrive(smem_u32(m.told + i % KNOWN));
  }
}
// Whether all activations of down are there for a chunk.
__device__ __forceinline__ bool complete(const u32* ready) {
  u32 seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(ready) : "memory");
  return seen >= Up::NU;
}

// The numbers of the block's rounds, by one thread: its own first, then values of the counter
// `taken`. Every block gets one number past the end, and the last block to do so resets the
// counter.
struct Numbers {
  u32* taken;
  int rounds, next;
  __device__ __forceinline__ void ask() { next = atomicAdd(taken, 1) + gridDim.x; }
  // Publishes the number of the block's round `i`.
  __device__ __forceinline__ void say(Meta& m, int i) {
    const u32 r = round_of(next, m);
    if (i >= KNOWN) bar_wait(smem_u32(m.told + i % KNOWN), i / KNOWN - 1 & 1);
    m.round[i % KNOWN] = r;
    bar_arrive(smem_u32(m.known + i % KNOWN));
    if (r == NO_ROUND && next == max(rounds, (int)gridDim.x) + gridDim.x - 1) *taken = 0;
  }
};
// How many stages before the end of a round the next number is taken and published. The numbers are
// taken late, so that blocks end together, but in time for the loads of the next round.
constexpr int ASK = 4, SAY = 3;

// The activations of all rounds, and what these are.
__device__ __forceinline__ void stage(
    Meta& m, u32 x_at, const u8* __restrict__ x, const u8* act, u32* ready, int thread) {
  // The ring is read before it begins: a barrier lets pass who waits for the phase before its
  // first.
  Staging s = {{0, 0}, {DEPTH - SLOTS, 1}, {0, 0}};
  Numbers numbers = {ready + MAX_CHUNKS, rounds_of(m.chunks), (int)blockIdx.x};
  const bool numbering = thread == 32;
  bool there = false;  // of thread 0: the next round's activations are
  if (numbering) {
    if (numbers.next >= numbers.rounds) numbers.ask();
    numbers.say(m, 0);
  }
#pragma unroll 1
  for (int i = 0;; i++) {
    const u32 found = await_round(m, i);
    if (found == NO_ROUND) break;
    const Round r = as_round(found);
    // At each of the round's `stages`, of which `left` are left with this one.
    const auto look_ahead = [&](int left, int stages) {
      if (numbering) {
        if (left == min(ASK, stages)) numbers.ask();
        if (left == min(SAY, stages)) numbers.say(m, i + 1);
      }
      // While the last stage waits for its slot, so that no round begins with a wait for L2.
      if (thread == 0 && left == 1) {
        const u32 next = await_round(m, i + 1);
        there = next != NO_ROUND && next & IS_DOWN && complete(ready + as_round(next).chunk);
      }
    };
    if (r.down) {
      if (thread == 0)
        while (!there) there = complete(ready + r.chunk);
      named_sync<1, STAGERS * 32>();
      stage_round<Down, 1>(s, m, x_at, act, r.chunk, thread, look_ahead);
    } else {
      stage_round<Up, ACTIVE>(s, m, x_at, x, r.chunk, thread, look_ahead);
    }
  }
}

// Eight outputs of a token: partial sums times their weights in the order of its choices, if all
// have arrived. Returns whether.
__device__ __forceinline__ bool add_up(
    const Meta& m, u32* parts, u16* out, int token, int row, int pick) {
  u32* from = parts + ((u64)token * ACTIVE * Down::NROWS + row) / 2;
  uint4 seen[ACTIVE];
  float sum[8] = {};
#pragma unroll
  for (int a = 0; a < ACTIVE; a++)
    seen[a] = m.ids[pick + a] < 0 ? make_uint4(0, 0, 0, 0) : look4(from + a * (Down::NROWS / 2));
  bool all = true;
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) all = all && arrived(seen[a]);
  if (!all) return false;
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) add_weighted(sum, seen[a], m.weights[pick + a]);
#pragma unroll
  for (int a = 0; a < ACTIVE; a++)
    if (m.ids[pick + a] >= 0)
      *reinterpret_cast<uint4*>(from + a * (Down::NROWS / 2)) =
          make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
  *reinterpret_cast<uint4*>(out + (u64)token * Down::NROWS + row) = pack8(sum);
  return true;
}
// As combine_all, with ids and weights of this block's share alone. A thread handles one output at
// a time: unrolling needs more code, and all blocks wait while that code is fetched. Sums that have
// arrived are added first. Few outputs depend on the blocks that end last.
__device__ __forceinline__ void combine_share(
    const Meta& m, u32* parts, u16* out, int tokens, int thread) {
  const int each = eights_each(tokens), first = blockIdx.x * each, token0 = share_token(tokens),
            end = min(first + each, tokens * EIGHTS);
  constexpr int ADDERS = CONSUMERS * 32;
#pragma unroll 1
  for (int start = first + thread; start < end; start += 32 * ADDERS) {
    u32 added = 0;
    bool missing;
#pragma unroll 1
    do {
      missing = false;
#pragma unroll 1
      for (int i = 0, at = start; i < 32 && at < end; i++, at += ADDERS) {
        if (added >> i & 1) continue;
        const int token = at / EIGHTS;
        if (add_up(m, parts, out, token, at % EIGHTS * 8, (token - token0) * ACTIVE))
          added |= 1u << i;
        else
          missing = true;
      }
      if (missing) __nanosleep(100);
    } while (missing);
  }
}

// out[token] = sum over its choices of weight x (w2[expert] swiglu(w13[expert] x[token] + b13) +
// b2[expert]). `act` [pairs, I] is between the two; `ready` [MAX_CHUNKS + 1] and `parts` are as
// they were when the launch ends. Blocks exchange activations and partial sums and wait for one
// another, so all of the grid must fit on the GPU at once: one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts_both(const __grid_constant__ TensorMap up, const __grid_constant__ TensorMap up_scales,
        const float* __restrict__ up_bias, const __grid_constant__ TensorMap down,
        const __grid_constant__ TensorMap down_scales, const float* __restrict__ down_bias,
        const u8* __restrict__ x, const u8* __restrict__ routing, const float* __restrict__ weights,
        const int* __restrict__ map, u16* act, u32* ready, u32* parts, u16* __restrict__ out,
        int tokens, u32 two_7, float alpha, float limit) {
  extern __shared__ __align__(1024) u8 smem[];
  Meta& m = *reinterpret_cast<Meta*>(smem + X_BYTES);
  const int thread = threadIdx.x;
  if (thread < DEPTH) {
    bar_init(smem_u32(m.there + thread), STAGERS * 32 + 1);
    bar_init(smem_u32(m.read + thread), CONSUMERS * SPEAKERS);
  }
  if (thread < KNOWN) {
    bar_init(smem_u32(m.known + thread), 1);
    bar_init(smem_u32(m.written + thread), CONSUMERS * SPEAKERS);
    bar_init(smem_u32(m.told + thread), 1);
  }
  const u32 ring = smem_u32(smem + X_BYTES + META_BYTES);
  Feeder feeder = {ring, smem_u32(m.there), smem_u32(m.read), smem_u32(&m.guessed),
      {&up, &up_scales, &down, &down_scales}, evict_first()};
  if (thread == FEEDER) feeder.guess(tokens);
  pdl_wait();
  pdl_launch();
  Routed& t = *reinterpret_cast<Routed*>(smem);
  if (thread < 128) t.counts[thread] = 0;
  read_routing(t, routing, weights, map, tokens, thread);
  find_work(m, t, tokens, thread);
  fence_async();
  if (thread >= CONSUMERS * 32) {
    registers<STAGING, false>();
    if (thread < FEEDER)
      stage(m, smem_u32(smem), x, reinterpret_cast<const u8*>(act), ready, thread - CONSUMERS * 32);
    else if (thread == FEEDER)
      feeder.feed(m);
    else if (thread == TELLER)
      tell(m, ready);
  } else {
    registers<MULTIPLYING, true>();
    work(m, smem, ring, {up_bias, down_bias}, {act, parts, {alpha, limit}}, two_7);
    combine_share(m, parts, out, tokens, thread);
  }
}
