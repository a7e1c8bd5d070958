// MXFP4 experts of gpt-oss for few tokens, from sm_80 on. Compiled by NVRTC; see docs/kernels/.
//
// Weight rows are the M dimension of mma.m16n8k16, tokens are N = 8. The weights lie as
// triton_kernels' HopperMXValueLayout and HopperMXScaleLayout put them (engine/experts/mxfp4.py has
// the index maps): for a tile of 16 rows x 64 columns, one 16-byte load per lane is the A operand
// of four mma steps and one 4-byte load its scales.
//
// A unit of work is R tiles of 16 rows over all of K for one "slot": an expert and up to SLOT of
// its tokens. Every block computes the slots from the top-k ids itself, takes an equal share of
// consecutive units, and its groups of WPU warps take units in turn, each warp a share of K.
// Weights stream through a ring in shared memory that is private to each lane: cp.async in, 16-byte
// load out, no barrier.
//
// Up to 16 tokens a slot is 8 tokens. A block's share of the units then touches two slots at most,
// and their activations are staged at once. For up to 64 tokens (TOKENS = 64) a slot is 16 tokens,
// so that an expert's weights are decoded once for two mma. The second mma is skipped for up to 8
// tokens, and blocks take shares of equal cost instead of equal size. A block stages as many of its
// slots as fit, works on them, and stages the next. TOKENS = 256 is the same with more memory for
// pairs. WIDE_SLOT = 8 halves the rows that must fit, for GPUs with 99 KB of shared memory.
//
// Compile-time: TOKENS at most, 16, 64 or 256, KT tiles of 64 columns, NROWS weight rows (multiple
// of 16), SKT column pairs of 32 in the scale storage, EXPERTS local experts, ACTIVE experts per
// token, NWARPS, R, WPU warps per unit, DEPTH tiles in each warp's ring, CHUNK tiles per cp.async
// group (divides DEPTH), MINBLOCKS per multiprocessor (caps the registers), LOGITS 1: the ids come
// as router logits [T, ROUTED] and are chosen here, ID64: ids are int64, MAPPED: expert map, ONLY 1
// or 2: the up or the down kernel alone, which halves the time to compile.

#include "common.cuh"
#include "bulk.cuh"
#include "cp_async.cuh"
#include "mxfp4.cuh"
#include "routing.cuh"
#include "combine.cuh"
#include "swiglu.cuh"

constexpr int NT = NROWS / 16;                     // row tiles of an expert
constexpr int NU = NT / R;                         // units of a slot
constexpr int STEPS = KT, STEP_BYTES = 128;        // tiles of 64 columns, of an activation row
constexpr int KS = (STEPS + WPU - 1) / WPU;        // those of a warp
constexpr int ROUNDS = (KS + DEPTH - 1) / DEPTH;   // turns of the ring in one unit
constexpr bool EVEN = KT == WPU * ROUNDS * DEPTH;  // no warp has a tile less than another
constexpr int NCH = DEPTH / CHUNK;
constexpr int NGROUPS = NWARPS / WPU;
constexpr int THREADS = NWARPS * 32;
constexpr int WARP_SCALES =
    DEPTH * R * 512;  // a warp's ring: 16 bytes a lane and tile, then two turns of scales
constexpr int TURN_SCALES = DEPTH * R * 32;
constexpr int WARP_RING = WARP_SCALES + 2 * TURN_SCALES;
constexpr int RING_BYTES = NWARPS * WARP_RING;
static_assert(
    DEPTH * R <= 16 && NT % R == 0, "one instruction fetches a turn's scales, two lanes a tile");
constexpr int RED_BYTES = WPU > 1 ? NWARPS * 2 * R * 512 : 0;
constexpr int XSTRIDE =
    KT * 128 + 16;  // one activation row in shared memory; the 16 bytes keep banks apart
constexpr int XROW = KT * 128;        // one in global memory
constexpr int QUAD_BYTES = KT * 128;  // four weight rows
constexpr u64 EXPERT_BYTES = (u64)(NROWS / 4) * QUAD_BYTES;
constexpr int SCALE_ROWS = (NROWS + 255) / 256 * 8;
constexpr u64 EXPERT_SCALE_BYTES = (u64)SCALE_ROWS * SKT * 64;
static_assert(NWARPS % WPU == 0 && NROWS % 16 == 0 && NWARPS >= 4 && DEPTH % CHUNK == 0, "shape");

#include "experts/slots.cuh"
static_assert(!WIDE || WPU == 1, "two halves of a slot are not exchanged between warps");
#include "experts/rows.cuh"

// Prefetches the first tiles of this warp's ring into L2 before the routing is known. Assumes one
// slot per expert, which holds for most experts if there are many tokens.
__device__ __forceinline__ void foresee(const u8* values, int tokens, int thread) {
  if (!WIDE || tokens * ACTIVE < 2 * EXPERTS) return;
  const int lane = thread & 31,
            unit = (int)((u64)EXPERTS * NU * blockIdx.x / gridDim.x) + (thread >> 5);
  if (unit >= EXPERTS * NU) return;
  const u8* from =
      values + unit / NU * EXPERT_BYTES + (u64)row_tile(unit % NU, NT) * 4 * QUAD_BYTES;
  for (int i = lane; i < 4 * DEPTH; i += 32)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from + i / DEPTH * QUAD_BYTES + i % DEPTH * 128));
}

// Where one lane's share of one unit starts: its values in each row tile, and the 16 bytes of
// scales it fetches.
struct Source {
  const u8* values[R];
  const u8* scales;
};

__device__ __forceinline__ Source source(
    const Work& w, const u8* __restrict__ values, const u8* __restrict__ scales, int unit) {
  const int slot = unit / NU, first = (unit - slot * NU) * R, expert = w.experts[slot];
  const int g = w.lane >> 2, t = w.lane & 3;
  Source s;
#pragma unroll
  for (int r = 0; r < R; r++)
    s.values[r] = values + expert * EXPERT_BYTES +
                  (u64)(row_tile(first + r, NT) * 4 + (g >> 1)) * QUAD_BYTES + (g & 1) * 64 +
                  t * 16 + w.part * KS * 128;
  const int tile = row_tile(first + (R == 1 ? 0 : (w.lane >> 1) & (R - 1)), NT);
  s.scales = scales + expert * EXPERT_SCALE_BYTES +
             (u64)(((tile >> 4) * 8 + (tile & 7)) * SKT + w.part * KS + w.lane / (2 * R)) * 64 +
             ((tile >> 3) & 1) * 32 + (w.lane & 1) * 16;
  return s;
}

// Starts the loads of chunk `ch` of one turn of the ring; `s` points at the turn's first tile, of
// which this warp has `left`. The first chunk brings the whole turn's scales into buffer `turn`.
// Always commits, so that every thread counts the same groups.
__device__ __forceinline__ void fetch(
    const Work& w, const Source& s, int left, int ch, int turn, bool live) {
  if (live) {
    if (ch == 0 && w.lane < 2 * R * (EVEN ? DEPTH : min(DEPTH, left)))
      cp16_once(w.scales + turn * TURN_SCALES + w.lane * 16, s.scales);
#pragma unroll
    for (int k = ch * CHUNK; k < (ch + 1) * CHUNK; k++)
#pragma unroll
      for (int r = 0; r < R; r++)
        if (EVEN || k < left) cp16_once(w.ring + (k * R + r) * 512, s.values[r] + k * 128);
  }
  cp_commit();
}

// Starts the first unit's first turn. Everything after it is fetched by `multiply`.
__device__ __forceinline__ Source prefetch(const Work& w, const u8* values, const u8* scales) {
  const int unit = w.first + w.group;
  const bool live = unit < w.last;
  Source s = {};
  if (live) s = source(w, values, scales, unit);
#pragma unroll
  for (int ch = 0; ch < NCH; ch++) fetch(w, s, w.tiles, ch, 0, live);
  return s;
}

// The product of one unit's share of K, R x 16 rows x 8 tokens in each of H halves of c as mma lays
// them out, while the ring refills: from the same unit, in its last turn from the next one. `turn`
// counts the ring's turns.
template <int H>
__device__ __forceinline__ void multiply(float (&c)[HALVES][R][4], const Work& w, Source now,
    const Source& next, bool live, u32 (&xrow)[HALVES], int& turn, u32 two_23) {
#pragma unroll
  for (int i = 0; i < 4 * R * H; i++) c[i / (4 * R)][i / 4 % R][i & 3] = 0.f;
  int left = w.tiles;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
    for (int r = 0; r < R; r++) now.values[r] += DEPTH * 128;
    now.scales += DEPTH * 64;
    bool more = true;
    int ahead = left - DEPTH;
    if (round == ROUNDS - 1) {
      now = next;
      more = live;
      ahead = w.tiles;
    }
    const u32 scales = w.scales + (turn & 1) * TURN_SCALES + (w.lane >> 2) * 4;
#pragma unroll
    for (int ch = 0; ch < NCH; ch++) {
      cp_wait<NCH - 1>();
      __syncwarp();
#pragma unroll
      for (int k = ch * CHUNK; k < (ch + 1) * CHUNK; k++) {
        if (EVEN || k < left) {
          u32 b[H][4], d[H][4];
#pragma unroll
          for (int h = 0; h < H; h++) {
            ldmatrix4(b[h], xrow[h] + k * 128);
            ldmatrix4(d[h], xrow[h] + k * 128 + 64);
          }
#pragma unroll
          for (int r = 0; r < R; r++) {
            const uint4 v = lds16(w.ring + (k * R + r) * 512);
            const u32 s4 = lds4(scales + (k * R + r) * 32);
#pragma unroll
            for (int h = 0; h < H; h++) {
              group(c[h][r], v.x, v.y, scale<0>(s4, two_23), scale<1>(s4, two_23), b[h]);
              group(c[h][r], v.z, v.w, scale<2>(s4, two_23), scale<3>(s4, two_23), d[h]);
            }
          }
        }
      }
      fetch(w, now, ahead, ch, (turn + 1) & 1, more);
    }
#pragma unroll
    for (int h = 0; h < H; h++) xrow[h] += DEPTH * 128;
    left -= DEPTH;
    turn++;
  }
}

// Publishes a warp's share of a unit and waits for its group's. Buffers alternate: `done` counts
// the group's units.
__device__ __forceinline__ float4* exchange(
    const float (&c)[HALVES][R][4], const Work& w, float4* red, int done) {
  float4* shares = red + ((done & 1) * NWARPS + w.group * WPU) * (R * 32);
  if (WPU > 1) {
#pragma unroll
    for (int r = 0; r < R; r++)
      shares[(w.part * R + r) * 32 + w.lane] =
          make_float4(c[0][r][0], c[0][r][1], c[0][r][2], c[0][r][3]);
    asm volatile("bar.sync %0, %1;" ::"r"(1 + w.group), "n"(WPU * 32) : "memory");
  }
  return shares;
}

// Whether this warp finishes row tile `r` of the group's unit number `done`: they take turns.
__device__ __forceinline__ bool finishes(const Work& w, int done, int r) {
  return WPU == 1 || (done * R + r) % WPU == w.part;
}

// Sums the group's shares of row tile `r`, in warp order.
__device__ __forceinline__ void sum_shares(
    float (&c)[4], const Work& w, const float4* shares, int r) {
  if (WPU == 1) return;
  float4 sum = shares[r * 32 + w.lane];
#pragma unroll
  for (int i = 1; i < WPU; i++) {
    const float4 v = shares[(i * R + r) * 32 + w.lane];
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  c[0] = sum.x;
  c[1] = sum.y;
  c[2] = sum.z;
  c[3] = sum.w;
}

// Where a group of warps is in its block's units.
struct Progress {
  int unit, done, turn;
  Source now;  // of `unit`; its first turn of the ring is on its way
};

// Processes the group's units before `until`. The slots from `first` on are staged. Calls
// finish(slot, first tile, done, c) for each unit.
template <class Finish>
__device__ __forceinline__ void work(Progress& p, const Work& w, const Meta& m, const u8* xs,
    const u8* __restrict__ values, const u8* __restrict__ scales, int first, int until, int divisor,
    int rows, u32 two_23, Finish finish) {
  for (; p.unit < until; p.unit += NGROUPS, p.done++) {
    const int slot = p.unit / NU, next = p.unit + NGROUPS;
    Source then = p.now;
    if (next < w.last) then = source(w, values, scales, next);
    float c[HALVES][R][4];
    u32 xrow[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; h++) xrow[h] = row_address(w, m, xs, first, slot, h, divisor, rows);
    if (WIDE && m.slot_count[slot] > 8)
      multiply<HALVES>(c, w, p.now, then, next < w.last, xrow, p.turn, two_23);
    else
      multiply<1>(c, w, p.now, then, next < w.last, xrow, p.turn, two_23);
    p.now = then;
    finish(slot, (p.unit - slot * NU) * R, p.done, c);
  }
}

// All of the group's units: slots are staged, as many as fit, and worked on.
template <class Finish>
__device__ __forceinline__ void work_wide(Progress& p, const Work& w, const Meta& m, u8* xs,
    const u8* __restrict__ x, const u8* __restrict__ values, const u8* __restrict__ scales,
    int divisor, int rows, u32 two_23, int thread, Finish finish) {
  for (int slot = w.first / NU; slot * NU < w.last;) {
    const int after = slots_that_fit(w, m, slot, rows);
    __syncthreads();  // all warps have read what was staged before
    load_rows(m, xs, x, slot, after - 1, divisor, rows, thread);
    __syncthreads();
    work(p, w, m, xs, values, scales, slot, min(w.last, after * NU), divisor, rows, two_23, finish);
    slot = after;
  }
}

#if ONLY != 2
// up: act[pair, I] = swiglu(w13[expert] x[token] + b13[expert]); gate and up rows are interleaved.
extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    experts_up(const u8* __restrict__ values, const u8* __restrict__ scales,
        const float* __restrict__ bias, const u8* __restrict__ x, const u8* __restrict__ routing,
        const float* __restrict__ weights, const int* __restrict__ map, u16* __restrict__ act,
        int tokens, int rows, u32 two_23, float alpha, float limit) {
  PROLOGUE
  foresee(values, tokens, thread);
  pdl_wait();
  pdl_launch();
  Rows early;
  if (!rows) ask_all(early, x, tokens, thread);
  const Work w = share(m, find_slots(m, xs, routing, nullptr, map, tokens, thread), ring, thread);
  Progress p = {w.first + w.group, 0, 0, prefetch(w, values, scales)};
  const auto finish = [&](int slot, int first, int done, float (&c)[HALVES][R][4]) {
    const int g = w.lane >> 2, t = w.lane & 3;
    const float* b = bias + (u64)w.experts[slot] * NROWS + g;
    const float4* shares = exchange(c, w, red, done);
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (!finishes(w, done, r)) continue;
      const int tile = row_tile(first + r, NT);
      const float bias0 = b[tile * 16], bias8 = b[tile * 16 + 8];
      sum_shares(c[0][r], w, shares, r);
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        if (half * 8 >= m.slot_count[slot]) break;
        float (&d)[4] = c[half][r];
        d[0] += bias0;
        d[1] += bias0;
        d[2] += bias8;
        d[3] += bias8;
        // Lanes of an even row hold gates, of the odd row above it ups: each finishes one of its
        // two tokens.
        const bool up = g & 1;
        const float r0 = __shfl_xor_sync(~0u, up ? d[0] : d[1], 4);
        const float r1 = __shfl_xor_sync(~0u, up ? d[2] : d[3], 4);
        const int n = half * 8 + 2 * t + up;
        if (n < m.slot_count[slot]) {
          u16* out = act + (u64)m.slot_pair[slot][n] * (NROWS / 2) + tile * 8 + (g >> 1);
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float mine = h ? (up ? d[3] : d[2]) : (up ? d[1] : d[0]), other = h ? r1 : r0;
            out[4 * h] = to_bf16(Gate{alpha, limit}(up ? other : mine, up ? mine : other));
          }
        }
      }
    }
  };
  if (WIDE) {
    work_wide(p, w, m, xs, x, values, scales, ACTIVE, rows, two_23, thread, finish);
    return;
  }
  const int first = w.first / NU;
  if (rows) {
    __syncthreads();
    if (w.first < w.last) load_rows(m, xs, x, first, (w.last - 1) / NU, ACTIVE, rows, thread);
  } else {
    put_all(early, xs, x, tokens, thread);
  }
  __syncthreads();
  work(p, w, m, xs, values, scales, first, w.last, ACTIVE, rows, two_23, finish);
}

#endif
#if ONLY != 1
__device__ __forceinline__ u32 look(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// One output: the sum of a token's partial sums in the order of its choices, as soon as all have
// arrived.
__device__ __forceinline__ u16 combine(const Meta& m, u32* parts, int token, int row) {
  u32* from = parts + (u64)token * ACTIVE * NROWS + row;
  u32 seen[ACTIVE];
#pragma unroll
  for (int a = 0; a < ACTIVE; a++)
    seen[a] = m.ids[token * ACTIVE + a] < 0 ? 0u : look(from + a * NROWS);
  float sum = 0.f;
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) {
    while (seen[a] == EMPTY) {
      __nanosleep(40);
      seen[a] = look(from + a * NROWS);
    }
    sum += __uint_as_float(seen[a]);
  }
#pragma unroll
  for (int a = 0; a < ACTIVE; a++)
    if (m.ids[token * ACTIVE + a] >= 0) from[a * NROWS] = EMPTY;
  return to_bf16(sum);
}

// down: out[token] = sum over its choices of weight x (w2[expert] act[pair] + b2[expert]). Blocks
// exchange partial sums and wait for one another at the end, so all of the grid must fit on the GPU
// at once: one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    experts_down(const u8* __restrict__ values, const u8* __restrict__ scales,
        const float* __restrict__ bias, const u8* __restrict__ act, const u8* __restrict__ routing,
        const float* __restrict__ weights, const int* __restrict__ map, u32* parts,
        u16* __restrict__ out, int tokens, int rows, u32 two_23) {
  PROLOGUE
  foresee(values, tokens, thread);
  // Safe before the wait: `experts_up` launched us after its own wait, so the routing is complete
  // and visible.
  const Work w = share(m, find_slots(m, xs, routing, weights, map, tokens, thread), ring, thread);
  Progress p = {w.first + w.group, 0, 0, prefetch(w, values, scales)};
  pdl_wait();
  pdl_launch();
  const auto finish = [&](int slot, int first, int done, float (&c)[HALVES][R][4]) {
    const int g = w.lane >> 2, t = w.lane & 3;
    const float* b = bias + (u64)w.experts[slot] * NROWS + g;
    const float4* shares = exchange(c, w, red, done);
#pragma unroll
    for (int r = 0; r < R; r++) {
      if (!finishes(w, done, r)) continue;
      const int row = row_tile(first + r, NT) * 16 + g;
      const float bias0 = b[row - g], bias8 = b[row - g + 8];
      sum_shares(c[0][r], w, shares, r);
#pragma unroll
      for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int n = half * 8 + 2 * t + h;
          if (n < m.slot_count[slot]) {
            const int pair = m.slot_pair[slot][n];
            u32* to = parts + (u64)pair * NROWS + row;
            give(to, (c[half][r][h] + bias0) * m.weights[pair]);
            give(to + 8, (c[half][r][2 + h] + bias8) * m.weights[pair]);
          }
        }
    }
  };
  if (WIDE) {
    work_wide(p, w, m, xs, act, values, scales, 1, rows, two_23, thread, finish);
  } else {
    const int first = w.first / NU;
    __syncthreads();
    if (w.first < w.last) load_rows(m, xs, act, first, (w.last - 1) / NU, 1, rows, thread);
    __syncthreads();
    work(p, w, m, xs, values, scales, first, w.last, 1, rows, two_23, finish);
  }
  if (WIDE) {
    combine_all<ACTIVE, NROWS, THREADS>(m.ids, parts, out, tokens, thread);
    return;
  }
  const int total = tokens * NROWS, each = (total + gridDim.x - 1) / gridDim.x;
  for (int i = thread; i < each; i += THREADS) {
    const int at = blockIdx.x * each + i;
    if (at < total) out[at] = combine(m, parts, at / NROWS, at % NROWS);
  }
}
#endif
