// MXFP4 experts of gpt-oss for large steps on sm90: weight rows are the M of wgmma, up to 192 of an
// expert's tokens its N. Compiled by NVRTC for sm_90a; see docs/kernels/. Weights lie as in
// experts.cu, and mxfp4.cuh decodes them.
//
// Three launches. `prefill_route` chooses experts and sorts the pairs (a token and one of its
// experts) by expert: a pair's place there is its slot. `prefill_experts` is both projections.
// `prefill_combine` adds each token's pairs, weighted, in the order of its choices.
//
// An expert's slots are cut into chunks of equal size, up to MOST. A tile of work is 192 weight
// rows over all of K for one chunk: three warpgroups of 64 rows, each decoding 32 columns into the
// A registers of wgmma while the 32 before are multiplied. Four more warps copy weights and
// activations, 64 columns a stage. Blocks take tiles in turn from one counter, all of up before all
// of down, an expert's chunks for the same rows one after the other, so that blocks that run at the
// same time share what L2 holds. A tile of down waits until its chunk's tiles of up are counted.
//
// Compile-time: KT_UP and KT_DOWN tiles of 64 columns (so 128 KT_DOWN and 64 KT_UP weight rows),
// SKT_UP and SKT_DOWN column pairs of 32 in the scale storage, EXPERTS local experts, ACTIVE per
// token, ROUTED, BLOCKS of routing at most, LOGITS, ID64, MAPPED as in routing.cuh.

#include "common.cuh"
#include "barriers.cuh"
#include "cp_async.cuh"
#include "mxfp4.cuh"
#include "wgmma.cuh"
#include "wgmma_any.cuh"
#include "routing.cuh"
#include "choose_alone.cuh"
#include "fragments.cuh"

// A thread's registers once the roles are known, out of the 128 that all had at first.
constexpr int MULTIPLYING = 152, COPYING = 56;
// Cycles by which a warpgroup begins after the one before, so that their epilogues do not come all
// at once: 1 % less time.
constexpr int SKEW = 1000;
constexpr int STAGES = 7;  // of 64 columns
constexpr int MOST = 192, GROUPS = 3, CONSUMERS = GROUPS * 4, COPIERS = 4,
              THREADS = (CONSUMERS + COPIERS) * 32;
constexpr int ROWS = GROUPS * 64, ROW_TILES = ROWS / 16;  // of a tile of work
constexpr int X_STAGE = MOST * 128, W_STAGE = ROW_TILES * 512, STAGE = W_STAGE + ROW_TILES * 32;
constexpr int ROUTERS = 128;  // tokens and threads of a block of prefill_route
constexpr int AHEAD = 4;      // tiles of work that a block knows of

// One of the projections.
template <bool IS_DOWN> struct Of {
  static constexpr bool DOWN = IS_DOWN;
  static constexpr int KT = DOWN ? KT_DOWN : KT_UP, NROWS = DOWN ? 64 * KT_UP : 128 * KT_DOWN,
                       SKT = DOWN ? SKT_DOWN : SKT_UP;
  static constexpr int NT = NROWS / 16, TILES = (NROWS + ROWS - 1) / ROWS;  // of an expert
  static constexpr int QUAD_BYTES = KT * 128;
  static constexpr u64 EXPERT_BYTES = (u64)(NROWS / 4) * QUAD_BYTES;
  static constexpr u64 EXPERT_SCALE_BYTES = (u64)((NROWS + 255) / 256 * 8) * SKT * 64;
};
using Up = Of<false>;
using Down = Of<true>;

// Values that one launch passes to the next. `arrived` is 0 between launches.
struct State {
  u32 arrived, taken;
  int chunks[EXPERTS + 1], slots[EXPERTS + 1];  // of the experts before
};
struct Routing {
  State* state;
  u32* ready;      // of a chunk: how often a warpgroup has finished a tile of up
  u16* seen;       // [EXPERTS][BLOCKS]: pairs of an expert that a block of routing has
  int* tokens;     // of a slot
  int* slots;      // of a pair, -1 of none
  float* weights;  // of a pair
};

__device__ __forceinline__ u32 look_acquire(const u32* p) {
  u32 seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(p) : "memory");
  return seen;
}
// What this thread wrote, and what others wrote before a barrier with it, is there for who sees the
// count.
__device__ __forceinline__ void count_release(u32* p, u32 more) {
  asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(more)
      : "memory");
}

// ---- routing

// Where a token's choices go.
struct Chosen {
  signed char* ids;
  float* weights;
};
// The block's tokens' experts, and all their weights in global memory.
__device__ __forceinline__ void read_routing(signed char* ids, float* to, const u8* routing,
    const float* weights, const int* map, int first, int tokens, int thread) {
  constexpr int SIZE = LOGITS == 2 ? 4 : 2;
  const u8* logits = routing + (u64)first * ROUTED * SIZE;
  if (LOGITS && ROUTED % 8 == 0) {
    if (thread < tokens) {
      Chosen t = {ids + thread * ACTIVE, to + (first + thread) * ACTIVE};
      choose_alone(t, logits + (u64)thread * ROUTED * SIZE, map, 0);
    }
  } else if (LOGITS) {
    choose_experts<4>(
        ids, to + first * ACTIVE, logits, map, tokens, thread >> 5, ROUTERS / 32, thread & 31);
  } else {
    for (int i = thread; i < tokens * ACTIVE; i += ROUTERS) {
      ids[i] = local_id(routing, map, first * ACTIVE + i);
      to[first * ACTIVE + i] = ld_cg(weights + first * ACTIVE + i);
    }
  }
  __syncthreads();
}

// All blocks have come here. They are on the GPU at once: BLOCKS is less than its multiprocessors.
__device__ __forceinline__ void meet(u32* arrived, int thread) {
  __syncthreads();
  if (thread == 0) {
    count_release(arrived, 1);
    while (look_acquire(arrived) < gridDim.x) {
    }
  }
  __syncthreads();
}

__device__ __forceinline__ int chunks_of(int count) { return (count + MOST - 1) / MOST; }

// An expert's pairs, of all blocks and of those before this one.
__device__ __forceinline__ int2 count_all(const u16* seen) {
  int all = 0, before = 0;
  for (int b = 0; b < gridDim.x; b += 8) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(seen + b));
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int here = b + i < gridDim.x ? words[i / 2] >> (i & 1) * 16 & 0xFFFF : 0;
      all += here;
      before += b + i < blockIdx.x ? here : 0;
    }
  }
  return make_int2(all, before);
}

struct Sorting {
  signed char ids[ROUTERS * ACTIVE];  // of the block's pairs
  u16 seen[ROUTERS / 32 * EXPERTS];   // pairs of an expert that the warps before have
  int offset[ROUTERS];                // of an expert: the slot of the block's first pair
  int sums[2][ROUTERS / 32];
};
// Thread e finds where the slots of expert e begin. The first block writes the result for the next
// kernel and sets that kernel's counters to 0.
__device__ __forceinline__ void find_slots(Sorting& t, const Routing& to, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const int2 count = thread < EXPERTS ? count_all(to.seen + thread * BLOCKS) : make_int2(0, 0);
  int slots = sum_up_to(count.x, lane), chunks = sum_up_to(chunks_of(count.x), lane);
  if (lane == 31) {
    t.sums[0][warp] = slots;
    t.sums[1][warp] = chunks;
  }
  __syncthreads();
  for (int w = 0; w < warp; w++) {
    slots += t.sums[0][w];
    chunks += t.sums[1][w];
  }
  t.offset[thread] = slots - count.x + count.y;
  if (blockIdx.x) return;
  State& state = *to.state;
  if (thread < EXPERTS) {
    state.slots[thread + 1] = slots;
    state.chunks[thread + 1] = chunks;
    for (int i = chunks - chunks_of(count.x); i < chunks; i++) to.ready[i] = 0;
  }
  if (thread == 0) state.slots[0] = state.chunks[0] = state.taken = 0;
}

extern "C" __global__ void __launch_bounds__(ROUTERS) prefill_route(const u8* __restrict__ routing,
    const float* __restrict__ weights, const int* __restrict__ map, Routing to, int tokens) {
  __shared__ Sorting t;
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31;
  const int first = blockIdx.x * ROUTERS, here = min(ROUTERS, tokens - first);
  pdl_wait();
  pdl_launch();
  read_routing(t.ids, to.weights, routing, weights, map, first, here, thread);
  u16 ranks[ACTIVE];
  u16* seen = t.seen + warp * EXPERTS;
  rank_pairs<ACTIVE>(ranks, seen, t.ids, warp * 32 * ACTIVE, here * ACTIVE, lane);
  __syncthreads();
  if (thread < EXPERTS)
    to.seen[thread * BLOCKS + blockIdx.x] = count_before_warps<ROUTERS / 32>(t.seen, thread);
  meet(&to.state->arrived, thread);
  find_slots(t, to, thread);
  __syncthreads();
#pragma unroll
  for (int p = 0; p < ACTIVE; p++) {
    const int i = warp * 32 * ACTIVE + p * 32 + lane;
    if (i < here * ACTIVE) {
      const int e = t.ids[i], slot = e < 0 ? -1 : t.offset[e] + seen[e] + ranks[p];
      to.slots[first * ACTIVE + i] = slot;
      if (e >= 0) to.tokens[slot] = first + i / ACTIVE;
    }
  }
}

// ---- both projections

// 192 rows from row tile `rows` on, for slots [start, start + count) of an expert.
struct Tile {
  int kind, expert, rows, start, count, chunk;  // kind: 0 up, 1 down, -1 the end
};
struct Meta {
  u64 full[STAGES], empty[STAGES], given[AHEAD], read[AHEAD];
  Tile tiles[AHEAD];
  int chunks[EXPERTS + 1], slots[EXPERTS + 1];
};
constexpr int RING_BYTES = STAGES * (X_STAGE + STAGE);
constexpr int SHARED_BYTES = RING_BYTES + (sizeof(Meta) + 127) / 128 * 128;

struct Weights {
  const u8 *values, *scales;
  const float* bias;
};

// The tile of work number `index`, by one warp.
__device__ __forceinline__ Tile find_tile(const Meta& m, int index, int lane) {
  const int all = m.chunks[EXPERTS];
  Tile t;
  t.kind = index >= all * Up::TILES;
  if (t.kind) index -= all * Up::TILES;
  const int tiles = t.kind ? Down::TILES : Up::TILES;
  if (index >= all * tiles) return {-1, 0, 0, 0, 0, 0};
  t.expert = 0;
#pragma unroll
  for (int e = 0; e < EXPERTS; e += 32)
    t.expert +=
        __popc(__ballot_sync(~0u, e + lane < EXPERTS && m.chunks[e + lane + 1] * tiles <= index));
  const int before = m.chunks[t.expert], chunks = m.chunks[t.expert + 1] - before;
  const int rest = index - before * tiles, chunk = rest % chunks;
  const int slots = m.slots[t.expert + 1] - m.slots[t.expert];
  const int size = ((slots + chunks - 1) / chunks + 7) / 8 * 8;
  t.rows = rest / chunks * ROW_TILES;
  t.start = m.slots[t.expert] + chunk * size;
  t.count = min(size, slots - chunk * size);
  t.chunk = before + chunk;
  return t;
}

// All of K of a tile: weights of P, and rows of x that are tokens' or slots'.
template <class P>
__device__ __forceinline__ void copy_tile(Place<STAGES>& s, u32 smem, u32 full, u32 empty,
    const Weights& w, const u8* x, const int* tokens, const Tile& t, int thread) {
  constexpr int EACH = MOST / 16, W_EACH = ROW_TILES / 4;
  const int row = thread >> 3, piece = thread & 7;
  u32 from[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) {
    const int r = row + i * 16, slot = t.start + r;
    from[i] = (r < t.count ? P::DOWN ? slot : __ldcg(tokens + slot) : 0) * (u32)P::QUAD_BYTES +
              piece * 16;
  }
  const u32 to_x = smem + row * 128 + ((piece ^ (row & 7)) << 4);
  const u32 to_w = smem + STAGES * X_STAGE + thread * 16;
  const u8* values =
      w.values + t.expert * P::EXPERT_BYTES + (u64)(t.rows * 4 + row) * P::QUAD_BYTES + piece * 16;
  const int left = P::NT - t.rows, tile = t.rows + (thread >> 1);
  const u8* scales = w.scales + t.expert * P::EXPERT_SCALE_BYTES +
                     (u64)((tile >> 4) * 8 + (tile & 7)) * P::SKT * 64 + (tile >> 3 & 1) * 32 +
                     (thread & 1) * 16;
  const bool scaling = thread < 2 * min(ROW_TILES, left);
#pragma unroll 1
  for (int k = 0; k < P::KT; k++) {
    bar_wait(empty + 8 * s.at, s.parity ^ 1);
    const u32 xs = to_x + s.at * X_STAGE, ws = to_w + s.at * STAGE;
#pragma unroll
    for (int i = 0; i < W_EACH; i++)
      if (i * 4 < left) cp16(ws + i * 2048, values + i * 16 * P::QUAD_BYTES);
    if (scaling) cp16(ws + W_STAGE, scales);
#pragma unroll
    for (int i = 0; i < EACH; i++)
      if (row + i * 16 < t.count) cp16(xs + i * 2048, x + from[i]);
    cp_arrive(full + 8 * s.at);
    values += 128;
    scales += 64;
    x += 128;
    s.next();
  }
}

struct Inputs {
  Weights up, down;
  const u8 *x, *act;
};
// The warps that copy. The first one takes tiles of work and publishes them.
__device__ __forceinline__ void copy(
    Meta& m, u32 smem, const Inputs& from, const Routing& r, int thread) {
  const int warp = thread >> 5, lane = thread & 31;
  const u32 full = smem_u32(m.full), empty = smem_u32(m.empty), given = smem_u32(m.given),
            read = smem_u32(m.read);
  Place<STAGES> s = {0, 0};
  Place<AHEAD> at = {0, 0};
  int next = 0;
  if (warp == 0 && lane == 0) next = atomicAdd(&r.state->taken, 1);
#pragma unroll 1
  while (true) {
    if (warp == 0) {
      const Tile t = find_tile(m, __shfl_sync(~0u, next, 0), lane);
      bar_wait(read + 8 * at.at, at.parity ^ 1);
      if (lane == 0) {
        m.tiles[at.at] = t;
        if (t.kind == 1)
          while (look_acquire(r.ready + t.chunk) < Up::TILES * GROUPS) {
          }
        bar_arrive(given + 8 * at.at);
        if (t.kind >= 0) next = atomicAdd(&r.state->taken, 1);
      }
    }
    bar_wait(given + 8 * at.at, at.parity);
    const Tile t = m.tiles[at.at];
    __syncwarp();
    bar_arrive_warp(read + 8 * at.at, lane);
    at.next();
    if (t.kind < 0) break;
    if (t.kind)
      copy_tile<Down>(s, smem, full, empty, from.down, from.act, r.tokens, t, thread);
    else
      copy_tile<Up>(s, smem, full, empty, from.up, from.x, r.tokens, t, thread);
  }
}

// c = the 64 rows x n products of a tile, times 2^-64.
__device__ __forceinline__ void multiply(float (&c)[MOST / 2], Place<STAGES>& s, u32 smem, u32 full,
    u32 empty, int turns, int n, u32 two_7, int warp, int lane) {
  const u32 ring = smem + STAGES * X_STAGE + warp * 512 + lane * 16,
            scale = smem + STAGES * X_STAGE + W_STAGE + warp * 32 + (lane >> 2) * 4;
#pragma unroll
  for (int i = 0; i < MOST / 2; i++) c[i] = 0.f;
  u32 a[2][8];
  u32 before = 0;
#pragma unroll 1
  for (int k = 0; k < turns; k++) {
    bar_wait(full + 8 * s.at, s.parity);
    const uint4 v = lds16(ring + s.at * STAGE);
    const u32 s4 = lds4(scale + s.at * STAGE);
    // Of one lane, so that the compiler knows it for the same in all and keeps it in a uniform
    // register.
    const u64 d = whole_descriptor(__shfl_sync(~0u, b_descriptor(smem + s.at * X_STAGE), 0));
#pragma unroll
    for (int half = 0; half < 2; half++) {
      scaled(a[half], half ? v.z : v.x, half ? v.w : v.y,
          half ? scales16<2>(s4, two_7) : scales16<0>(s4, two_7));
      wgmma_fence();
      products(c, a[half], d + half * 4, d + half * 4 + 2, n);
      wgmma_wait<1>();
      if (half == 0 && k) bar_arrive_warp(before, lane);
    }
    before = empty + 8 * s.at;
    s.next();
  }
  wgmma_wait<0>();
  bar_arrive_warp(before, lane);
}

// act[slot, I] = swiglu(w13[expert] x[token] + b13[expert]); gate and up rows are interleaved.
__device__ __forceinline__ void finish_up(
    float (&c)[MOST / 2], u16* out, int count, float2 bias, const Gate& gate, int lane) {
  out += lane_column(lane) + lane_token(lane) * (Up::NROWS / 2);
#pragma unroll
  for (int j = 0; j < MOST / 8; j += AT_ONCE) {
    if (j * 8 >= count) break;
    u32 two[AT_ONCE];
    gated(two, c, j, bias, gate, lane);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if ((j + i) * 8 + lane_token(lane) < count)
        *reinterpret_cast<u32*>(out + (j + i) * 8 * (Up::NROWS / 2)) = two[i];
  }
}

// parts[slot] = w2[expert] act[slot] + b2[expert], before the routing's weight.
__device__ __forceinline__ void finish_down(
    float (&c)[MOST / 2], u16* out, int count, float2 bias, int lane) {
  out += lane_row(lane) + lane_token(lane) * Down::NROWS;
#pragma unroll
  for (int j = 0; j < MOST / 8; j += AT_ONCE) {
    if (j * 8 >= count) break;
    uint2 four[AT_ONCE];
    plain(four, c, j, bias, lane);
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      if ((j + i) * 8 + lane_token(lane) < count)
        *reinterpret_cast<uint2*>(out + (j + i) * 8 * Down::NROWS) = four[i];
  }
}

struct Outputs {
  u16 *act, *parts;
  Gate gate;
};
// The warps that multiply.
__device__ __forceinline__ void work(Meta& m, u32 smem, const float* up_bias,
    const float* down_bias, const Outputs& to, u32* ready, u32 two_7) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = threadIdx.x >> 7;
  const u32 full = smem_u32(m.full), empty = smem_u32(m.empty);
  Place<STAGES> s = {0, 0};
  Place<AHEAD> at = {0, 0};
  const long long begun = clock64();
  while (clock64() - begun < group * SKEW) {
  }
#pragma unroll 1
  while (true) {
    bar_wait(smem_u32(m.given) + 8 * at.at, at.parity);
    const Tile t = m.tiles[at.at];
    __syncwarp();
    bar_arrive_warp(smem_u32(m.read) + 8 * at.at, lane);
    at.next();
    if (t.kind < 0) break;
    const int turns = t.kind ? Down::KT : Up::KT, tile = t.rows + warp;
    const int n = __shfl_sync(~0u, (t.count + 7) / 8 * 8, 0);
    if (t.rows + group * 4 < (t.kind ? Down::NT : Up::NT)) {
      const float* bias =
          (t.kind ? down_bias + (u64)t.expert * Down::NROWS : up_bias + (u64)t.expert * Up::NROWS) +
          tile * 16 + (lane >> 2);
      float c[MOST / 2];
      multiply(c, s, smem, full, empty, turns, n, two_7, warp, lane);
      const float2 both = {__ldg(bias), __ldg(bias + 8)};
      if (t.kind)
        finish_down(c, to.parts + (u64)t.start * Down::NROWS + tile * 16, t.count, both, lane);
      else
        finish_up(
            c, to.act + (u64)t.start * (Up::NROWS / 2) + tile * 8, t.count, both, to.gate, lane);
    } else {
      for (int k = 0; k < turns; k++) {
        bar_wait(full + 8 * s.at, s.parity);
        bar_arrive_warp(empty + 8 * s.at, lane);
        s.next();
      }
    }
    if (!t.kind) {
      asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
      if ((threadIdx.x & 127) == 0) count_release(ready + t.chunk, 1);
    }
  }
}

// act [slots, I] and parts [slots, hidden] of all slots, bf16.
extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_experts(const u8* __restrict__ up,
    const u8* __restrict__ up_scales, const float* __restrict__ up_bias,
    const u8* __restrict__ down, const u8* __restrict__ down_scales,
    const float* __restrict__ down_bias, const u8* __restrict__ x, Routing r, u16* act, u16* parts,
    u32 two_7, float alpha, float limit) {
  extern __shared__ __align__(1024) u8 smem[];
  Meta& m = *reinterpret_cast<Meta*>(smem + RING_BYTES);
  const int thread = threadIdx.x;
  if (thread < STAGES) {
    bar_init(smem_u32(m.full + thread), COPIERS * 32);
    bar_init(smem_u32(m.empty + thread), CONSUMERS * SPEAKERS);
  }
  if (thread < AHEAD) {
    bar_init(smem_u32(m.given + thread), 1);
    bar_init(smem_u32(m.read + thread), (CONSUMERS + COPIERS) * SPEAKERS);
  }
  pdl_wait();
  pdl_launch();
  if (thread <= EXPERTS) {
    m.chunks[thread] = __ldcg(r.state->chunks + thread);
    m.slots[thread] = __ldcg(r.state->slots + thread);
  }
  if (blockIdx.x == 0 && thread == 0) r.state->arrived = 0;
  fence_async();
  __syncthreads();
  if (thread >= CONSUMERS * 32) {
    registers<COPYING, false>();
    copy(m, smem_u32(smem),
        {{up, up_scales, up_bias}, {down, down_scales, down_bias}, x,
            reinterpret_cast<const u8*>(act)},
        r, thread - CONSUMERS * 32);
  } else {
    registers<MULTIPLYING, true>();
    work(m, smem_u32(smem), up_bias, down_bias, {act, parts, {alpha, limit}}, r.ready, two_7);
  }
}

// ---- the weighted sums

constexpr int ADDERS = 256;
extern "C" __global__ void __launch_bounds__(ADDERS)
    prefill_combine(const int* __restrict__ slots, const float* __restrict__ weights,
        const u16* __restrict__ parts, u16* __restrict__ out, int tokens) {
  constexpr int EACH = Down::NROWS / 8;
  const int i = blockIdx.x * ADDERS + threadIdx.x, token = i / EACH, at = i % EACH * 8;
  pdl_wait();
  pdl_launch();
  if (token >= tokens) return;
  float sum[8] = {};
  uint4 v[ACTIVE];
  float weight[ACTIVE];
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) {
    const int slot = __ldcg(slots + token * ACTIVE + a);
    weight[a] = __ldcg(weights + token * ACTIVE + a);
    v[a] = slot < 0 ? make_uint4(0, 0, 0, 0)
                    : __ldcg(reinterpret_cast<const uint4*>(parts + (u64)slot * Down::NROWS + at));
  }
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) add_weighted(sum, v[a], weight[a]);
  *reinterpret_cast<uint4*>(out + (u64)token * Down::NROWS + at) = pack8(sum);
}
