// Slots of experts.cu and experts_marlin.cu: an expert and up to SLOT of its tokens each, and a
// block's share of the units of all slots.
//
// Offers: Meta (what a block knows of the slots, in shared memory), find_slots, Work and share.
// Reads TOKENS, WIDE_SLOT, NU (units of a slot), WPU, THREADS, STEPS (pieces of K, KS of them for
// each of a unit's warps) and WARP_RING. Barriers: those of the block, all threads call together.
#include "../common.cuh"
#include "../routing.cuh"

#ifndef WIDE_SLOT
#define WIDE_SLOT 16
#endif
constexpr bool WIDE = TOKENS > 16;
constexpr int SLOT_LOG = WIDE && WIDE_SLOT == 16 ? 4 : 3, SLOT = 1 << SLOT_LOG, HALVES = SLOT / 8;
constexpr int MAX_PAIRS = TOKENS * ACTIVE;
constexpr int MAX_SLOTS = WIDE ? EXPERTS + MAX_PAIRS / SLOT : MAX_PAIRS;
// A unit for more than 8 tokens takes 11 eighths of one for fewer: of 8, 10, 11, 12 and 13 the best
// from 48 to 256 tokens (docs/kernels/experiments.md).
constexpr int COST = 8, BOTH_COST = HALVES > 1 ? 11 : COST;
static_assert(WIDE_SLOT == 8 || WIDE_SLOT == 16, "tokens of a slot");
static_assert(EXPERTS <= 128, "slots are found by one thread per expert, four warps");

template <bool BYTES> struct PairNumber {
  typedef u8 type;
};
template <> struct PairNumber<false> {
  typedef u16 type;
};
typedef PairNumber<MAX_PAIRS <= 256>::type pair_t;

struct Meta {
  int ids[MAX_PAIRS];  // local expert of each (token, choice), or -1
  float weights[MAX_PAIRS];
  int warp_sums[4];
  int slots;
  int first, last;  // this block's units, where slots do not cost the same
  u8 slot_expert[MAX_SLOTS];
  u8 slot_count[MAX_SLOTS];
  pair_t slot_pair[MAX_SLOTS][SLOT];
  u8 near[NWARPS][32];  // slot_expert again, each warp's own copy: known without a block barrier
  u8 first_slot[WIDE ? 128 : 1];  // of an expert
};
constexpr int META_BYTES = (sizeof(Meta) + 127) / 128 * 128;

// A kernel's shared memory: slots, sums of warps, rings, activations.
#define PROLOGUE                                              \
  extern __shared__ __align__(128) u8 smem[];                 \
  Meta& m = *reinterpret_cast<Meta*>(smem);                   \
  float4* red = reinterpret_cast<float4*>(smem + META_BYTES); \
  const u32 ring = smem_u32(smem + META_BYTES + RED_BYTES);   \
  u8* xs = smem + META_BYTES + RED_BYTES + RING_BYTES;        \
  const int thread = threadIdx.x;

__device__ __forceinline__ void read_ids(
    Meta& m, const u8* routing, const float* weights, const int* map, int pairs, int thread) {
  for (int i = thread; i < pairs; i += THREADS) {
    m.ids[i] = local_id(routing, map, i);
    if (weights) m.weights[i] = ld_cg(weights + i);
  }
}

// The slots of up to 32 pairs, by every warp for itself: experts in the order of their first pair.
// Warp 0 publishes them (complete after the next block barrier). -1 if an expert has more than 8
// pairs.
__device__ __forceinline__ int find_slots_near(Meta& m, const u8* routing, const float* weights,
    const int* map, int pairs, int warp, int lane) {
  const int e = lane >= pairs ? -1 : LOGITS ? m.ids[lane] : local_id(routing, map, lane);
  if (!LOGITS && warp == 0 && weights && lane < pairs) m.weights[lane] = ld_cg(weights + lane);
  const u32 same = __match_any_sync(~0u, e), below = (1u << lane) - 1;
  const bool valid = e >= 0;
  const int rank = __popc(same & below), count = __popc(same);
  if (__any_sync(~0u, valid && count > 8)) return -1;
  const u32 leaders = __ballot_sync(~0u, valid && rank == 0);
  const int slot = __popc(leaders & ((1u << (__ffs(same) - 1)) - 1));
  if (valid && rank == 0) m.near[warp][slot] = e;
  if (warp == 0) {
    if (!LOGITS) m.ids[lane] = e;
    if (valid) {
      m.slot_pair[slot][rank] = lane;
      m.slot_expert[slot] = e;
      m.slot_count[slot] = count;
    }
  }
  __syncwarp();
  return __popc(leaders);
}

// The slots of any number of pairs: experts in ascending order, SLOT pairs at a time. Ends with a
// block barrier.
__device__ __forceinline__ int find_slots_far(
    Meta& m, const u8* routing, const float* weights, const int* map, int tokens, int thread) {
  const int pairs = tokens * ACTIVE, warp = thread >> 5, lane = thread & 31;
  if (!LOGITS) read_ids(m, routing, weights, map, pairs, thread);
  __syncthreads();
  int count = 0, slots = 0, before = 0;
  if (warp < 4) {
    for (int i = 0; i < pairs; i++) count += m.ids[i] == thread;
    count = thread < EXPERTS ? count : 0;
    slots = (count + SLOT - 1) >> SLOT_LOG;
    before = sum_up_to(slots, lane);
    if (lane == 31) m.warp_sums[warp] = before;
    before -= slots;
  }
  __syncthreads();
  if (warp < 4) {
    int total = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      before += i < warp ? m.warp_sums[i] : 0;
      total += m.warp_sums[i];
    }
    if (thread == 0) m.slots = total;
    if (count) {
      for (int s = 0; s < slots; s++) {
        m.slot_expert[before + s] = thread;
        m.slot_count[before + s] = min(count - SLOT * s, SLOT);
      }
      int seen = 0;
      for (int i = 0; i < pairs; i++)
        if (m.ids[i] == thread) {
          m.slot_pair[before + (seen >> SLOT_LOG)][seen & (SLOT - 1)] = i;
          seen++;
        }
    }
  }
  __syncthreads();
  return m.slots;
}

// Finds where this block's share of the units begins and ends if that lies in the slots of one
// expert. The expert has `slots` slots, all full but the last. `before` slots precede them, of
// which `both_before` have more than 8 tokens. All blocks' shares have equal cost.
__device__ __forceinline__ void find_share(
    Meta& m, int before, int both_before, int slots, int count, int total) {
  int cost_before = before * COST + both_before * (BOTH_COST - COST);
  for (int s = 0; s < slots; s++) {
    const int cost = count - SLOT * s > 8 ? BOTH_COST : COST;
#pragma unroll
    for (int end = 0; end < 2; end++) {
      const int at = (int)((u64)total * NU * (blockIdx.x + end) / gridDim.x) - cost_before * NU;
      if (at >= 0 && at < cost * NU) (end ? m.last : m.first) = (before + s) * NU + at / cost;
    }
    cost_before += cost;
  }
}

// The slots where pairs are many: ranked by warps, SLOT of an expert to a slot; and this block's
// share of the units. Uses `seen`, of NWARPS x EXPERTS.
__device__ __forceinline__ int find_slots_sorted(Meta& m, u16* seen, const u8* routing,
    const float* weights, const int* map, int tokens, int thread) {
  constexpr int PASSES = (MAX_PAIRS + THREADS - 1) / THREADS;
  const int warp = thread >> 5, lane = thread & 31, pairs = tokens * ACTIVE;
  const int each = (pairs + THREADS - 1) / THREADS * 32;
  if (!LOGITS) {
    read_ids(m, routing, weights, map, pairs, thread);
    __syncthreads();
  }
  u16 ranks[PASSES];
  rank_pairs<PASSES>(
      ranks, seen + warp * EXPERTS, m.ids, warp * each, min(pairs, (warp + 1) * each), lane);
  __syncthreads();
  int count = 0, slots = 0,
      sums = 0;  // sums: slots, those for more than 8 tokens in the upper half
  if (warp < 4) {
    if (thread < EXPERTS) count = count_before_warps<NWARPS>(seen, thread);
    slots = (count + SLOT - 1) >> SLOT_LOG;
    const int own = slots | ((count + 7) >> SLOT_LOG) << 16;
    sums = sum_up_to(own, lane);
    if (lane == 31) m.warp_sums[warp] = sums;
    sums -= own;
  }
  __syncthreads();
  if (warp < 4) {
    int all = 0;
#pragma unroll
    for (int w = 0; w < 4; w++) {
      sums += w < warp ? m.warp_sums[w] : 0;
      all += m.warp_sums[w];
    }
    const int before = sums & 0xFFFF;
    const int total = (all & 0xFFFF) * COST + (all >> 16) * (BOTH_COST - COST);
    for (int s = 0; s < slots; s++) {
      m.slot_expert[before + s] = thread;
      m.slot_count[before + s] = min(count - SLOT * s, SLOT);
    }
    m.first_slot[thread] = before;
    find_share(m, before, sums >> 16, slots, count, total);
    if (thread == 0) {
      m.slots = all & 0xFFFF;
      if (total == 0) m.first = 0;
      if (total == 0 || blockIdx.x + 1 == gridDim.x) m.last = m.slots * NU;
    }
  }
  __syncthreads();
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int i = warp * each + p * 32 + lane;
    if (p * 32 < each && i < pairs && m.ids[i] >= 0) {
      const int at = seen[warp * EXPERTS + m.ids[i]] + ranks[p];
      m.slot_pair[m.first_slot[m.ids[i]] + (at >> SLOT_LOG)][at & (SLOT - 1)] = i;
    }
  }
  __syncthreads();
  return m.slots;
}

struct Routing {
  int slots;
  const u8* experts;  // of each slot
};

__device__ __forceinline__ Routing find_slots(Meta& m, u8* scratch, const u8* routing,
    const float* weights, const int* map, int tokens, int thread) {
  const int warp = thread >> 5, lane = thread & 31, pairs = tokens * ACTIVE;
  if (WIDE) {
    if (LOGITS) {
      choose_experts<4>(m.ids, m.weights, routing, map, tokens, warp, NWARPS, lane);
      __syncthreads();
    }
    u16* seen = reinterpret_cast<u16*>(scratch);
    const int slots = find_slots_sorted(m, seen, routing, weights, map, tokens, thread);
    return {slots, m.slot_expert};
  }
  if (LOGITS) {
    choose_experts<1, false>(m.ids, m.weights, routing, map, tokens, warp, NWARPS, lane);
    __syncthreads();
  }
  if (pairs <= 32) {
    const int slots = find_slots_near(m, routing, weights, map, pairs, warp, lane);
    if (slots >= 0) return {slots, m.near[warp]};
  }
  const int slots = find_slots_far(m, routing, weights, map, tokens, thread);
  return {slots, m.slot_expert};
}

struct Work {
  int first, last;  // units of this block
  int slots;
  const u8* experts;
  int warp, lane, group, part, tiles;
  u32 ring, scales;  // shared memory: this lane's values of tile 0, this warp's scales
};

__device__ __forceinline__ Work share(const Meta& m, const Routing& r, u32 ring_base, int thread) {
  Work w;
  const u64 units = (u64)r.slots * NU;
  w.first = WIDE ? m.first : (int)(units * blockIdx.x / gridDim.x);
  w.last = WIDE ? m.last : (int)(units * (blockIdx.x + 1) / gridDim.x);
  w.slots = r.slots;
  w.experts = r.experts;
  w.warp = thread >> 5;
  w.lane = thread & 31;
  w.group = w.warp / WPU;
  w.part = w.warp % WPU;
  w.tiles = min(KS, STEPS - w.part * KS);
  w.ring = ring_base + w.warp * WARP_RING + w.lane * 16;
  w.scales = ring_base + w.warp * WARP_RING + WARP_SCALES;
  return w;
}
