// MXFP4 experts of gpt-oss for few tokens over the weights of vLLM's Marlin experts, from sm_80 on.
// Compiled by NVRTC; see docs/kernels/.
//
// The same as experts.cu in another layout (marlin.cuh): a unit is 64 weight rows over all of K for
// one slot. Units are few, so all WPU warps of a group share one, each a part of K, and exchange
// their sums in shared memory. A step of a warp is 32 columns: 1,024 bytes of values and 64 of
// scales. Stored rows and columns beyond those of the model are padding and are not read.
//
// Compile-time, where experts.cu has no such number: NROWS and KT are what is read, multiples of 64
// rows and tiles of 64 columns; NPAD, KPAD stored rows and columns; XPAD elements between rows of
// the activations, OPAD of the output; DEPTH steps in each warp's ring, CHUNK steps per cp.async
// group (divides DEPTH, at most 8).

#include "common.cuh"
#include "barriers.cuh"
#include "cp_async.cuh"
#include "marlin.cuh"
#include "routing.cuh"
#include "combine.cuh"

constexpr int R = 4;                                // row tiles of 16
constexpr int NU = NROWS / 64;                      // units of a slot
constexpr int STEPS = KT * 2, STEP_BYTES = 64;      // of 32 columns, of an activation row
constexpr int KS = (STEPS + WPU - 1) / WPU;         // those of a warp
constexpr int ROUNDS = (KS + DEPTH - 1) / DEPTH;    // turns of the ring in one unit
constexpr bool EVEN = STEPS == WPU * ROUNDS * DEPTH;  // no warp has a step less than another
constexpr int NCH = DEPTH / CHUNK;
constexpr int NGROUPS = NWARPS / WPU;
constexpr int THREADS = NWARPS * 32;
constexpr int WARP_SCALES = DEPTH * 1024;  // a warp's ring: 2 x 16 bytes a lane and step, scales
constexpr int WARP_RING = WARP_SCALES + DEPTH * 64;
constexpr int RING_BYTES = NWARPS * WARP_RING;
constexpr int RED_BYTES = WPU > 1 ? NWARPS * R * 512 : 0;
constexpr int XSTRIDE =
    KT * 128 + 16;  // one activation row in shared memory; the 16 bytes keep banks apart
constexpr int XROW = XPAD * 2;      // one in global memory
constexpr int TILE_ROW = NPAD * 8;  // 16 columns of all rows
constexpr u64 EXPERT_BYTES = (u64)NPAD * KPAD / 2;
constexpr u64 EXPERT_SCALE_BYTES = (u64)NPAD * KPAD / 32;
static_assert(NWARPS % WPU == 0 && NROWS % 64 == 0 && NWARPS >= 4 && DEPTH % CHUNK == 0, "shape");
static_assert(NPAD % 64 == 0 && NROWS <= NPAD && KT * 64 <= KPAD && CHUNK <= 8, "padding");

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
      scales + expert * EXPERT_SCALE_BYTES + (u64)(w.part * KS + (w.lane >> 2)) * NPAD +
          block * 64 + (w.lane & 3) * 16};
}

// Starts the loads of chunk `ch` of one turn of the ring; `s` points at the turn's first step, of
// which this warp has `left`. Always commits, so that every thread counts the same groups.
__device__ __forceinline__ void fetch(const Work& w, const Source& s, int left, int ch, bool live) {
  if (live) {
    const int begin = ch * CHUNK;
    if (w.lane < 4 * CHUNK && (EVEN || begin + (w.lane >> 2) < left))
      cp16(w.scales + begin * 64 + w.lane * 16, s.scales + begin * NPAD);
#pragma unroll
    for (int k = begin; k < begin + CHUNK; k++)
      if (EVEN || k < left) {
        cp16_once(w.ring + k * 1024, s.values + 2 * k * TILE_ROW);
        cp16_once(w.ring + k * 1024 + 512, s.values + (2 * k + 1) * TILE_ROW);
      }
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
  for (int ch = 0; ch < NCH; ch++) fetch(w, s, w.tiles, ch, live);
  return s;
}

// The product of one unit's share of K, 64 rows x 8 tokens in each of H halves of c as mma lays
// them out, while the ring refills: from the same unit, in its last turn from the next one.
template <int H>
__device__ __forceinline__ void multiply(float (&c)[HALVES][R][4], const Work& w, Source now,
    const Source& next, bool live, u32 (&xrow)[HALVES], int&, u32 two_23) {
#pragma unroll
  for (int i = 0; i < 4 * R * H; i++) c[i / (4 * R)][i / 4 % R][i & 3] = 0.f;
  int left = w.tiles;
  const u32 scales = w.scales + (w.lane >> 2) * 8;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++) {
    now.values += DEPTH * 2 * TILE_ROW;
    now.scales += DEPTH * NPAD;
    bool more = true;
    int ahead = left - DEPTH;
    if (round == ROUNDS - 1) {
      now = next;
      more = live;
      ahead = w.tiles;
    }
#pragma unroll
    for (int ch = 0; ch < NCH; ch++) {
      cp_wait<NCH - 1>();
      __syncwarp();
#pragma unroll
      for (int k = ch * CHUNK; k < (ch + 1) * CHUNK; k++) {
        if (EVEN || k < left) {
          u32 b[H][4];
#pragma unroll
          for (int h = 0; h < H; h++) ldmatrix4(b[h], xrow[h] + k * 64);
          const uint4 v = lds16(w.ring + k * 1024), u = lds16(w.ring + k * 1024 + 512);
          const uint2 s = lds8(scales + k * 64);
          marlin_group<H>(c, 0, v.x, u.x, scale<0>(s.x, two_23), scale<2>(s.x, two_23), b);
          marlin_group<H>(c, 1, v.y, u.y, scale<1>(s.x, two_23), scale<3>(s.x, two_23), b);
          marlin_group<H>(c, 2, v.z, u.z, scale<0>(s.y, two_23), scale<2>(s.y, two_23), b);
          marlin_group<H>(c, 3, v.w, u.w, scale<1>(s.y, two_23), scale<3>(s.y, two_23), b);
        }
      }
      __syncwarp();  // other lanes' scales have been read
      fetch(w, now, ahead, ch, more);
    }
#pragma unroll
    for (int h = 0; h < H; h++) xrow[h] += DEPTH * 64;
    left -= DEPTH;
  }
}

// Publishes a warp's share of 8 tokens of a unit and waits for its group's.
__device__ __forceinline__ void exchange(const float (&c)[R][4], const Work& w, float4* red) {
  if (WPU == 1) return;
  // the shares before these have been read
  asm volatile("bar.sync %0, %1;" ::"r"(1 + w.group), "n"(WPU * 32) : "memory");
#pragma unroll
  for (int r = 0; r < R; r++)
    red[(w.warp * R + r) * 32 + w.lane] = make_float4(c[r][0], c[r][1], c[r][2], c[r][3]);
  asm volatile("bar.sync %0, %1;" ::"r"(1 + w.group), "n"(WPU * 32) : "memory");
}

// Whether this warp finishes row tile `r` of the group's unit number `done`: they take turns.
__device__ __forceinline__ bool finishes(const Work& w, int done, int r) {
  return WPU == 1 || (done * R + r) % WPU == w.part;
}

// The group's shares of row tile `r`, in warp order.
__device__ __forceinline__ float4 sum_shares(
    const float (&c)[4], const Work& w, const float4* red, int r) {
  if (WPU == 1) return make_float4(c[0], c[1], c[2], c[3]);
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
  return sum;
}

#include "experts/work.cuh"

// Calls row_tile(half, r, sum) for the row tiles that this warp finishes of a unit.
template <class RowTile>
__device__ __forceinline__ void finish_unit(float (&c)[HALVES][R][4], const Work& w, const Meta& m,
    float4* red, int slot, int done, RowTile row_tile) {
#pragma unroll
  for (int half = 0; half < HALVES; half++) {
    if (half * 8 >= m.slot_count[slot]) break;
    exchange(c[half], w, red);
#pragma unroll
    for (int r = 0; r < R; r++)
      if (finishes(w, done, r)) row_tile(half, r, sum_shares(c[half][r], w, red, r));
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
  pdl_wait();
  pdl_launch();
  Rows early;
  if (!rows) ask_all(early, x, tokens, thread);
  const Work w = share(m, find_slots(m, xs, routing, nullptr, map, tokens, thread), ring, thread);
  Progress p = {w.first + w.group, 0, 0, prefetch(w, values, scales)};
  const auto finish = [&](int slot, int first, int done, float (&c)[HALVES][R][4]) {
    const int g = w.lane >> 2, t = w.lane & 3;
    const bf16* b = bias + (u64)w.experts[slot] * NPAD;
    finish_unit(c, w, m, red, slot, done, [&](int half, int r, float4 d) {
      const int row = (first + r) * 16 + g;
      const float bias0 = to_float(b[marlin_bias(row)]), bias8 = to_float(b[marlin_bias(row + 8)]);
      d.x += bias0;
      d.y += bias0;
      d.z += bias8;
      d.w += bias8;
      // Lanes of an even row hold gates, of the odd row above it ups: each finishes one of its two
      // tokens.
      const bool up = g & 1;
      const float r0 = __shfl_xor_sync(~0u, up ? d.x : d.y, 4);
      const float r1 = __shfl_xor_sync(~0u, up ? d.z : d.w, 4);
      const int n = half * 8 + 2 * t + up;
      if (n < m.slot_count[slot]) {
        u16* out = act + (u64)m.slot_pair[slot][n] * (NROWS / 2) + row / 2;
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float mine = h ? (up ? d.w : d.z) : (up ? d.y : d.x), other = h ? r1 : r0;
          const float gate = fminf(up ? other : mine, limit);
          const float lin = fminf(fmaxf(up ? mine : other, -limit), limit);
          out[4 * h] = to_bf16(gate / (1.f + __expf(-alpha * gate)) * (lin + 1.f));
        }
      }
    });
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
// down: out[token] = sum over its choices of weight x (w2[expert] act[pair] + b2[expert]); columns
// from NROWS to OPAD are zero. Blocks exchange partial sums and wait for one another at the end, so
// all of the grid must fit on the GPU at once: one block per multiprocessor.
extern "C" __global__ void __launch_bounds__(THREADS, MINBLOCKS)
    experts_down(const u8* __restrict__ values, const u8* __restrict__ scales,
        const bf16* __restrict__ bias, const u8* __restrict__ act, const u8* __restrict__ routing,
        const float* __restrict__ weights, const int* __restrict__ map, u32* parts,
        u16* __restrict__ out, int tokens, int rows, u32 two_23) {
  PROLOGUE
  // Safe before the wait: `experts_up` launched us after its own wait, so the routing is complete
  // and visible.
  const Work w = share(m, find_slots(m, xs, routing, weights, map, tokens, thread), ring, thread);
  Progress p = {w.first + w.group, 0, 0, prefetch(w, values, scales)};
  pdl_wait();
  pdl_launch();
  const auto finish = [&](int slot, int first, int done, float (&c)[HALVES][R][4]) {
    const int g = w.lane >> 2, t = w.lane & 3;
    const bf16* b = bias + (u64)w.experts[slot] * NPAD;
    finish_unit(c, w, m, red, slot, done, [&](int half, int r, float4 d) {
      const int row = (first + r) * 16 + g;
      const float bias0 = to_float(b[marlin_bias(row)]), bias8 = to_float(b[marlin_bias(row + 8)]);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int n = half * 8 + 2 * t + h;
        if (n < m.slot_count[slot]) {
          const int pair = m.slot_pair[slot][n];
          u32* to = parts + (u64)pair * NROWS + row;
          give(to, ((h ? d.y : d.x) + bias0) * m.weights[pair]);
          give(to + 8, ((h ? d.w : d.z) + bias8) * m.weights[pair]);
        }
      }
    });
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
  combine_all<ACTIVE, NROWS, THREADS, OPAD>(m.ids, parts, out, tokens, thread);
  constexpr int PAD = (OPAD - NROWS) / 8;  // 16-byte pieces behind a row
  if constexpr (PAD > 0)
    for (int i = blockIdx.x * THREADS + thread; i < tokens * PAD; i += gridDim.x * THREADS)
      *reinterpret_cast<uint4*>(out + (u64)(i / PAD) * OPAD + NROWS + i % PAD * 8) =
          make_uint4(0, 0, 0, 0);
}
#endif
