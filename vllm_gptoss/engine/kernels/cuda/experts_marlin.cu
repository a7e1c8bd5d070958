// MXFP4 experts of gpt-oss for few tokens over the weights of vLLM's Marlin experts, from sm_80 on.
// Compiled by NVRTC; see docs/kernels/.
//
// The same as experts.cu in another layout (marlin.cuh): a unit is 64 weight rows over all of K for
// one slot. Units are few, so all WPU warps of a group share one, each a part of K, and sum up in
// shared memory. Four of them, in turn, finish the unit's row tiles; the others work on. A step of
// a warp is 32 columns: 1,024 bytes of values and 64 of scales. Operands of a step are read from
// shared memory while the step before is multiplied. Stored rows and columns beyond those of the
// model are padding and are not read.
//
// Compile-time, where experts.cu has no such number: NROWS and KT are what is read, multiples of 64
// rows and tiles of 64 columns; NPAD, KPAD stored rows and columns; XPAD elements between rows of
// the activations, OPAD of the output; DEPTH steps in each warp's ring, at least 2.

#include "common.cuh"
#include "barriers.cuh"
#include "cp_async.cuh"
#include "marlin.cuh"
#include "routing.cuh"
#include "combine.cuh"
#include "swiglu.cuh"

constexpr int R = 4;                                  // row tiles of 16
constexpr int NU = NROWS / 64;                        // units of a slot
constexpr int STEPS = KT * 2, STEP_BYTES = 64;        // of 32 columns, of an activation row
constexpr int KS = (STEPS + WPU - 1) / WPU;           // those of a warp
constexpr int ROUNDS = (KS + DEPTH - 1) / DEPTH;      // turns of the ring in one unit
constexpr bool EVEN = STEPS == WPU * ROUNDS * DEPTH;  // no warp has a step less than another
constexpr int NGROUPS = NWARPS / WPU;
constexpr int THREADS = NWARPS * 32;
constexpr int WARP_SCALES = DEPTH * 1024;  // a warp's ring: 2 x 16 bytes a lane and step, scales
constexpr int WARP_RING = WARP_SCALES + DEPTH * 64;
constexpr int RING_BYTES = NWARPS * WARP_RING;
constexpr int BARS = NWARPS * R * 512;  // behind the warps' sums: two barriers of each group
constexpr int RED_BYTES = BARS + 128;
constexpr int XSTRIDE =
    KT * 128 + 16;  // one activation row in shared memory; the 16 bytes keep banks apart
constexpr int XROW = XPAD * 2;      // one in global memory
constexpr int TILE_ROW = NPAD * 8;  // 16 columns of all rows
constexpr u64 EXPERT_BYTES = (u64)NPAD * KPAD / 2;
constexpr u64 EXPERT_SCALE_BYTES = (u64)NPAD * KPAD / 32;
static_assert(
    NWARPS % WPU == 0 && NROWS % 64 == 0 && WPU >= R && NGROUPS <= 8 && DEPTH > 1, "shape");
static_assert(NPAD % 64 == 0 && NROWS <= NPAD && KT * 64 <= KPAD, "padding");

#include "experts/slots.cuh"
#include "experts/rows.cuh"

// Where one lane's share of one unit starts: its values, and the 16 bytes of scales it fetches.
struct Source {
  const u8 *values, *scales;
};

__device__ __forceinline__ Source source(
    const Work& w, const u8* __restrict__ values, const u8* __restrict__ scales, int unit) {
  const int slot = unit / NU, block = unit - slot * NU, expert = w.experts[slot];
  return {values + expert * EXPERT_BYTES + (u64)(w.part * KS * 2) * TILE_ROW + block * 512 +
              w.lane * 16,
      scales + expert * EXPERT_SCALE_BYTES + (u64)(w.part * KS) * NPAD + block * 64 +
          (w.lane & 3) * 16};
}

// Starts the loads of step k of one turn of the ring; `s` points at the turn's first step, of which
// this warp has `left`. Always commits, so that every thread counts the same groups.
__device__ __forceinline__ void fetch(const Work& w, const Source& s, int left, int k, bool live) {
  if (live && (EVEN || k < left)) {
    if (w.lane < 4) cp16(w.scales + k * 64 + w.lane * 16, s.scales + k * NPAD);
    cp16_once(w.ring + k * 1024, s.values + 2 * k * TILE_ROW);
    cp16_once(w.ring + k * 1024 + 512, s.values + (2 * k + 1) * TILE_ROW);
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
  for (int k = 0; k < DEPTH; k++) fetch(w, s, w.tiles, k, live);
  return s;
}

// What a lane multiplies in one step.
template <int H> struct Operands {
  uint4 v, u;
  uint2 s;
  u32 b[H][4];
};
// Of the oldest step of the ring, which is its k-th. `column`: of the activations.
template <int H>
__device__ __forceinline__ void read_step(
    Operands<H>& o, const Work& w, const u32 (&xrow)[HALVES], int k, int column) {
  cp_wait<DEPTH - 1>();
  __syncwarp();
  o.v = lds16(w.ring + k * 1024);
  o.u = lds16(w.ring + k * 1024 + 512);
  o.s = lds8(w.scales + k * 64 + (w.lane >> 2) * 8);
#pragma unroll
  for (int h = 0; h < H; h++) ldmatrix4(o.b[h], xrow[h] + column);
}

// The product of one unit's share of K, 64 rows x 8 tokens in each of H halves of c as mma lays
// them out, while the ring refills: from the same unit, in its last turn from the next one.
template <int H>
__device__ __forceinline__ void multiply(float (&c)[HALVES][R][4], const Work& w, Source now,
    const Source& next, bool live, const u32 (&xrow)[HALVES], u32 two_23) {
#pragma unroll
  for (int i = 0; i < 4 * R * H; i++) c[i / (4 * R)][i / 4 % R][i & 3] = 0.f;
  int left = w.tiles, column = 0;
  Operands<H> ahead;
  if (EVEN || left > 0) read_step<H>(ahead, w, xrow, 0, 0);
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++) {
    now.values += DEPTH * 2 * TILE_ROW;
    now.scales += DEPTH * NPAD;
    const bool last = round == ROUNDS - 1;
    if (last) now = next;
    const bool more = !last || live;
    const int then = last ? w.tiles : left - DEPTH;
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
      const Operands<H> o = ahead;
      __syncwarp();  // all lanes have read this step
      fetch(w, now, then, k, more);
      column += STEP_BYTES;
      if ((k < DEPTH - 1 || !last) && (EVEN || k + 1 < left))
        read_step<H>(ahead, w, xrow, (k + 1) % DEPTH, column);
      if (EVEN || k < left) {
        marlin_group<H>(c, 0, o.v.x, o.u.x, scale<0>(o.s.x, two_23), scale<2>(o.s.x, two_23), o.b);
        marlin_group<H>(c, 1, o.v.y, o.u.y, scale<1>(o.s.x, two_23), scale<3>(o.s.x, two_23), o.b);
        marlin_group<H>(c, 2, o.v.z, o.u.z, scale<0>(o.s.y, two_23), scale<2>(o.s.y, two_23), o.b);
        marlin_group<H>(c, 3, o.v.w, o.u.w, scale<1>(o.s.y, two_23), scale<3>(o.s.y, two_23), o.b);
      }
    }
    left -= DEPTH;
  }
}

// The row tile that a warp finishes of its group's sums number `done`; R and more: none.
__device__ __forceinline__ int finishes(const Work& w, int done) {
  return (w.part + (WPU - R % WPU) * done) % WPU;
}

// Publishes a warp's sums of 8 tokens of a unit, and adds up the group's of row tile r, in warp
// order, if the warp finishes it.
__device__ __forceinline__ float4 exchange(
    const float (&c)[R][4], const Work& w, float4* red, int r, int done) {
  const u32 read = smem_u32(red) + BARS + w.group * 16, written = read + 8;
  if (done > 0) bar_wait(read, (done - 1) & 1);
#pragma unroll
  for (int i = 0; i < R; i++)
    red[(w.warp * R + i) * 32 + w.lane] = make_float4(c[i][0], c[i][1], c[i][2], c[i][3]);
  __syncwarp();
  if (w.lane == 0) bar_arrive(written);
  if (r >= R) return {};
  bar_wait(written, done & 1);
  const float4* shares = red + (w.group * WPU * R + r) * 32 + w.lane;
  float4 sum = shares[0];
#pragma unroll
  for (int i = 1; i < WPU; i++) {
    const float4 v = shares[i * R * 32];
    sum.x += v.x;
    sum.y += v.y;
    sum.z += v.z;
    sum.w += v.w;
  }
  __syncwarp();
  if (w.lane == 0) bar_arrive(read);
  return sum;
}
#define BARRIERS                                           \
  if (thread < NGROUPS) {                                  \
    bar_init(smem_u32(red) + BARS + thread * 16, R);       \
    bar_init(smem_u32(red) + BARS + thread * 16 + 8, WPU); \
  }

// Where a group of warps is in its block's units. done: sums exchanged.
struct Progress {
  int unit, done;
  Source now;  // of `unit`; its first turn of the ring is on its way
};

// Processes the group's units before `until`. The slots from `first` on are staged. Calls
// finish(slot, row, half, sum, bias) for each row tile that this warp finishes; `row` is the lane's
// first, of both is the bias.
template <class Finish>
__device__ __forceinline__ void work(Progress& p, const Work& w, const Meta& m, const u8* xs,
    float4* red, const u8* __restrict__ values, const u8* __restrict__ scales,
    const bf16* __restrict__ bias, int first, int until, int divisor, int rows, u32 two_23,
    Finish finish) {
  for (; p.unit < until; p.unit += NGROUPS) {
    const int slot = p.unit / NU, next = p.unit + NGROUPS, block = p.unit - slot * NU;
    Source then = p.now;
    if (next < w.last) then = source(w, values, scales, next);
    const bool both = WIDE && m.slot_count[slot] > 8;
    float c[HALVES][R][4];
    u32 xrow[HALVES];
    int tile[HALVES];
    bf16 two[HALVES][2];  // loaded before they are needed
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      xrow[h] = row_address(w, m, xs, first, slot, h, divisor, rows);
      tile[h] = finishes(w, p.done + h);
      const int row = block * 64 + (tile[h] & (R - 1)) * 16 + (w.lane >> 2);
      const bf16* b = bias + (u64)w.experts[slot] * NPAD;
      two[h][0] = b[marlin_bias(row)];
      two[h][1] = b[marlin_bias(row + 8)];
    }
    if (both)
      multiply<HALVES>(c, w, p.now, then, next < w.last, xrow, two_23);
    else
      multiply<1>(c, w, p.now, then, next < w.last, xrow, two_23);
    p.now = then;
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      if (h > 0 && !both) break;
      const float4 sum = exchange(c[h], w, red, tile[h], p.done++);
      if (tile[h] < R)
        finish(slot, block * 64 + tile[h] * 16 + (w.lane >> 2), h, sum,
            make_float2(to_float(two[h][0]), to_float(two[h][1])));
    }
  }
}

// All of the group's units: slots are staged, as many as fit, and worked on.
template <class Finish>
__device__ __forceinline__ void work_wide(Progress& p, const Work& w, const Meta& m, u8* xs,
    float4* red, const u8* __restrict__ x, const u8* __restrict__ values,
    const u8* __restrict__ scales, const bf16* __restrict__ bias, int divisor, int rows, u32 two_23,
    int thread, Finish finish) {
  for (int slot = w.first / NU; slot * NU < w.last;) {
    const int after = slots_that_fit(w, m, slot, rows);
    __syncthreads();  // all warps have read what was staged before
    load_rows(m, xs, x, slot, after - 1, divisor, rows, thread);
    __syncthreads();
    work(p, w, m, xs, red, values, scales, bias, slot, min(w.last, after * NU), divisor, rows,
        two_23, finish);
    slot = after;
  }
}

#if ONLY != 2
// up: act[pair, I] = swiglu(w13[expert] x[token] + b13[expert]); gate and up rows are interleaved.
extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    experts_up(const u8* __restrict__ values, const u8* __restrict__ scales,
        const bf16* __restrict__ bias, const u8* __restrict__ x, const u8* __restrict__ routing,
        const float* __restrict__ weights, const int* __restrict__ map, u16* __restrict__ act,
        int tokens, int rows, u32 two_23, float alpha, float limit) {
  PROLOGUE
  BARRIERS
  pdl_wait();
  pdl_launch();
  Rows early;
  if (!rows) ask_all(early, x, tokens, thread);
  const Work w = share(m, find_slots(m, xs, routing, nullptr, map, tokens, thread), ring, thread);
  Progress p = {w.first + w.group, 0, prefetch(w, values, scales)};
  const auto finish = [&](int slot, int row, int half, float4 d, float2 b) {
    d.x += b.x;
    d.y += b.x;
    d.z += b.y;
    d.w += b.y;
    // Lanes of an even row hold gates, of the odd row above it ups: each finishes one of its two
    // tokens.
    const bool up = w.lane >> 2 & 1;
    const float r0 = __shfl_xor_sync(~0u, up ? d.x : d.y, 4);
    const float r1 = __shfl_xor_sync(~0u, up ? d.z : d.w, 4);
    const int n = half * 8 + 2 * (w.lane & 3) + up;
    if (n < m.slot_count[slot]) {
      u16* out = act + (u64)m.slot_pair[slot][n] * (NROWS / 2) + row / 2;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float mine = h ? (up ? d.w : d.z) : (up ? d.y : d.x), other = h ? r1 : r0;
        out[4 * h] = to_bf16(Gate{alpha, limit}(up ? other : mine, up ? mine : other));
      }
    }
  };
  if (WIDE) {
    work_wide(p, w, m, xs, red, x, values, scales, bias, ACTIVE, rows, two_23, thread, finish);
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
  work(p, w, m, xs, red, values, scales, bias, first, w.last, ACTIVE, rows, two_23, finish);
}
#endif

#if ONLY != 1
// down: out[token] = sum over its choices of weight x (w2[expert] act[pair] + b2[expert]); columns
// from NROWS to OPAD are zero. Blocks exchange partial sums and wait for one another at the end, so
// all of the grid must fit on the GPU at once: one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    experts_down(const u8* __restrict__ values, const u8* __restrict__ scales,
        const bf16* __restrict__ bias, const u8* __restrict__ act, const u8* __restrict__ routing,
        const float* __restrict__ weights, const int* __restrict__ map, u32* parts,
        u16* __restrict__ out, int tokens, int rows, u32 two_23) {
  PROLOGUE
  BARRIERS
  // Safe before the wait: `experts_up` launched us after its own wait, so the routing is complete
  // and visible.
  const Work w = share(m, find_slots(m, xs, routing, weights, map, tokens, thread), ring, thread);
  Progress p = {w.first + w.group, 0, prefetch(w, values, scales)};
  pdl_wait();
  pdl_launch();
  const auto finish = [&](int slot, int row, int half, float4 d, float2 b) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int n = half * 8 + 2 * (w.lane & 3) + h;
      if (n < m.slot_count[slot]) {
        const int pair = m.slot_pair[slot][n];
        u32* to = parts + (u64)pair * NROWS + row;
        give(to, ((h ? d.y : d.x) + b.x) * m.weights[pair]);
        give(to + 8, ((h ? d.w : d.z) + b.y) * m.weights[pair]);
      }
    }
  };
  if (WIDE) {
    work_wide(p, w, m, xs, red, act, values, scales, bias, 1, rows, two_23, thread, finish);
  } else {
    const int first = w.first / NU;
    __syncthreads();
    if (w.first < w.last) load_rows(m, xs, act, first, (w.last - 1) / NU, 1, rows, thread);
    __syncthreads();
    work(p, w, m, xs, red, values, scales, bias, first, w.last, 1, rows, two_23, finish);
  }
  combine_all<ACTIVE, NROWS, THREADS, OPAD>(m.ids, parts, out, tokens, thread);
  constexpr int PAD = (OPAD - NROWS) / 8;  // 16-byte pieces behind a row
  if constexpr (PAD > 0)
    for (int i = blockIdx.x * THREADS + thread; i < tokens * PAD; i += gridDim.x * THREADS)
      *reinterpret_cast<uint4*>(out + (u64)(i / PAD) * OPAD + NROWS + i % PAD * 8) =
          make_uint4(0, 0, 0, 0);
}
#endif
