// All layers of a decode step of one token in one launch (sm_90): one block per multiprocessor, resident for the whole
// step, five phases a layer. With one token every weight is used once, so a step is at best as fast as memory is read;
// launch by launch memory rests at every boundary, here it is read through them.
//
//   qkv       x = h + experts' sums, RMSNorm, q/k/v projection, bias, RoPE, cache write
//   attend    sinks, window or all keys
//   out       projection, bias, residual h; each block's part of the router logits, added up as integers
//   up        top-k, RMSNorm, MXFP4 up projection, clamped SwiGLU of the chosen experts
//   down      MXFP4 down projection, weighted
//
// One warp produces: it walks the weights of all phases of all layers in order and copies this block's share through
// one ring in shared memory, as far ahead as the ring is long. Weights depend on nothing but the chosen experts, so
// memory is read while the 15 consuming warps wait for other blocks. Warps split K, so each stages only its own columns
// of the activations; sums over the warps go through shared memory.
//
// What one phase leaves for the next is its own flag: buffers are zero, a written zero is -0, and whoever reads looks
// until nothing is +0. The router's logits count their contributors in their upper bits. No fence and no barrier lie on
// the way, only the value. Buffers alternate between layers; a block that sees all logits of a layer knows that all
// blocks have read what came before, and zeroes its share of it.
//
// Nothing depends on an order of arrival: the logits are 64-bit fixed point (integer sums do not depend on the order),
// everything else has one writer. Repeats are equal to the bit.
//
// All blocks must be on the GPU at once: grid = multiprocessors, one block each. Whatever waits for another block gives
// up after SPIN_LIMIT looks with a trap: an error, not a hang.
//
// Macros set by the host (kernels/step.py): LAYERS; GRID; RING bytes; HB, QB, IB blocks of 64 of hidden, query heads,
// intermediate; EXPERTS, ACTIVE; SKU, SKD column pairs in the scale storage of up and down; SPLITS of a head's keys at
// most; TRACE: clock marks.
#include "common.cuh"
#include "bulk.cuh"
#include "mxfp4.cuh"
#include "topk.cuh"

constexpr int WARPS = 15, THREADS = WARPS * 32;  // consumers; with the producer 16 warps of 128 registers
constexpr int C = HB * 64, Q = QB * 64, I = IB * 64, KVH = QB / 8;
constexpr int HPW = HB / WARPS, QPW = (QB + WARPS - 1) / WARPS;  // 64-column blocks of a warp
constexpr int FLUSH = 3, BUFFERS = 4;  // expert units between two sums over the warps; buffers of such sums

constexpr int Q_UNITS = (QB + 2 * KVH) * 8, Q_EACH = (Q_UNITS + GRID - 1) / GRID;  // of 8 rows
constexpr int O_PAIRS = C / 2, O_EACH = (O_PAIRS + GRID - 1) / GRID, O_ROWS = O_EACH * 2;  // of 2 rows
constexpr int Q_PITCH = C * 2 + 16, O_PITCH = Q * 2 + 16;  // 16 mod 128: the quads of two rows then cover all banks
constexpr int Q_CHUNK = 4 * Q_PITCH, O_CHUNK = 2 * O_PITCH;
constexpr int UP_CHUNK = 4 * HB * 128 + HB * 64, DOWN_CHUNK = 4 * IB * 128 + IB * 64;  // a unit's values, then scales
constexpr int BARS = 16;  // chunks in the ring at most
constexpr u32 AHEAD = 2;  // chunks on their way at most: with more, small loads wait behind them for microseconds
constexpr int REPLICAS = EXPERTS <= 32 ? 4 : 1;  // of the logits' sums: atomics on one address follow one another
constexpr int LOGITS = EXPERTS + 4;              // the logits, the sum of squares, padding
constexpr int EACH = EXPERTS / 32;
constexpr int R_PARTS = 256 / EXPERTS, R_EACH = (O_ROWS + R_PARTS - 1) / R_PARTS;
// scratch: the staged row, sums of experts, sums of q/k/v and out; attention, in between, uses it from the start
constexpr int X_BYTES = C * 2;
constexpr int SUM = FLUSH * WARPS * 16;  // floats of a buffer
constexpr int DENSE_ROWS = Q_EACH * 8 > (O_ROWS + 15) / 16 * 16 ? Q_EACH * 8 : (O_ROWS + 15) / 16 * 16;
constexpr int DENSE = DENSE_ROWS * WARPS + 2 * O_ROWS;  // floats
constexpr int A_PITCH = 68, A_WARP = 8 * A_PITCH;  // a query head's 64 sums, a warp's
static_assert(X_BYTES + (BUFFERS * SUM + DENSE) * 4 >= (8 * A_WARP + 128) * 4, "attention's scratch");
static_assert(EXPERTS % 32 == 0 && EXPERTS <= 128 && HB % WARPS == 0 && HPW <= 4, "shape");
static_assert(IB == HB, "a warp's columns of the staged row are the same in all phases: no barrier between them");
static_assert(KVH * SPLITS <= GRID && KVH <= 64 && O_ROWS <= THREADS && ACTIVE == 4, "shape");

struct Layer {
  const bf16 *norm, *w_qkv, *b_qkv, *w_out, *b_out, *post_norm, *w_router, *b_router;
  const u8 *up_values, *up_scales;
  const float* up_bias;
  const u8 *down_values, *down_scales;
  const float* down_bias;
  const bf16* sinks;
  bf16* kv;
  long long kv_block, kv_head, kv_token;  // strides in elements
  int window, group, block_shift, unused;
};
struct Group {
  const int *block_table, *seq_lens, *query_start;
  const long long* slots;
  long long table_stride, requests;
};
struct Args {
  const Layer* layers;
  Group groups[4];
  const bf16 *x, *residual;  // [C]; residual may be null
  bf16 *out, *hidden;        // [C]
  float* attn;               // [KVH * SPLITS, 8, 66]
  u8* zeros;                 // what must be zero: `Zeros`
  const long long* positions;
  const void* cos_sin;
  long long* trace;
  int layer_count, group_count, cos_sin_bf16;
  u32 two_23;
  float eps, scale, alpha, limit;
};

struct Item {
  float bias_lo, bias_hi, cos, sin;
  bf16* dst;   // the paged cache; null: not written
  int column;  // in Early.q, from Q on in Early.fresh
};

// Read before a layer's logits are complete.
struct Early {
  bf16 q[Q], attended[Q], fresh[2 * KVH * 64];  // fresh: this step's key heads, then its value heads
};
// Read before the next layer's logits are complete.
struct Late {
  bf16 hidden[C], act[ACTIVE][I];
  float parts[ACTIVE][C];
};
struct Zeros {
  u32 tickets[64];  // [KVH]
  unsigned long long logits[2][REPLICAS][LOGITS];
  Early early[2];
  Late late[2];
};
static_assert(sizeof(Early) % 16 == 0 && sizeof(Late) % 16 == 0 && LOGITS % 2 == 0, "16 bytes at a time");

// The request, as one group of layers sees it.
struct Where {
  const int* table;
  int keys;  // the last of them is this step's
};

struct Shared {
  alignas(16) u64 bars[2 * BARS + 2 * BUFFERS + 1];
  u32 starts[BARS];
  Item items[Q_EACH * 4];
  Where where[4];
  float squares[WARPS];
  float scale;
  float kept[O_ROWS];  // the layer's input, this block's rows of out
  int log_rms;         // of the layer's input, rounded down: the unit of the fixed-point sums
  float weights[ACTIVE];
  int ids[ACTIVE];
  int last;
};

struct Cursor {
  u32 i, at, end;  // chunks so far; offset in the ring; bytes so far, skipped ones included
};
__device__ __forceinline__ u32 take(Cursor& c, u32 size) {
  if (c.at + size > RING) { c.end += RING - c.at; c.at = 0; }
  const u32 at = c.at;
  c.at += size; c.end += size; c.i++;
  return at;
}

constexpr u32 SPIN_LIMIT = 1u << 25;

struct Block {
  Shared* s;
  u8* ring;
  u8* xs;
  float *sums, *dense;
  u32 full, empty, sums_full, sums_free, chosen;  // mbarriers
  int tid, warp, lane, g, j;
  Cursor cursor;
  u32 flush;   // sums over the warps so far
  int blocks;  // of the cache, the next layer's: Keys
};

__device__ __forceinline__ void sync_consumers() { asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory"); }

__device__ __forceinline__ void mark(const Args& a, const Block& b, int layer, int what) {
#ifdef TRACE
  if (b.tid == 0) a.trace[((long long)layer * TRACE + what) * GRID + blockIdx.x] = clock64();
#endif
}

__device__ __forceinline__ Zeros& zeros(const Args& a) { return *(Zeros*)a.zeros; }

// Values as flags. +0 means "not there yet", so a zero is written as -0.
__device__ __forceinline__ bf16 flagged(float v) {
  const bf16 h = to_bf16(v);
  return h ? h : 0x8000;
}
__device__ __forceinline__ float flagged32(float v) { return __float_as_uint(v) ? v : -0.f; }
__device__ __forceinline__ int4 look16(const void* p) {
  int4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 empty_half(u32 w) { return (w - 0x00010001u) & ~w & 0x80008000u; }
__device__ __forceinline__ bool whole(int4 v) {  // eight bf16
  return (empty_half(v.x) | empty_half(v.y) | empty_half(v.z) | empty_half(v.w)) == 0;
}
__device__ __forceinline__ bool whole32(int4 v) { return v.x && v.y && v.z && v.w; }  // four floats
__device__ __forceinline__ void count_look(u32& looks) {
  if (++looks > SPIN_LIMIT) __trap();
}
__device__ __forceinline__ int4 settle(int4 v, const void* p) {
  u32 looks = 0;
  while (!whole(v)) { count_look(looks); v = look16(p); }
  return v;
}

// Consumers: the next chunk's offset in the ring, once it is there.
__device__ __forceinline__ u32 next_chunk(Block& b, u32 size) {
  const u32 i = b.cursor.i, at = take(b.cursor, size);
  bar_wait(b.full + 8 * (i % BARS), (i / BARS) & 1);
  return at;
}
__device__ __forceinline__ void release_chunks(const Block& b, int count) {
  __syncwarp();
#if SPEAKERS == 1
  if (b.lane < count) bar_arrive(b.empty + 8 * ((b.cursor.i - 1 - b.lane) % BARS));
#else
  for (int i = 0; i < count; ++i) bar_arrive(b.empty + 8 * ((b.cursor.i - 1 - i) % BARS));
#endif
}

// 16 weight rows of one block of 64 columns, rows g and g + 8 of each lane, 16 of their columns.
struct Rows {
  int4 low[2], high[2];
};
__device__ __forceinline__ void load_rows(Rows& r, const u8* low, const u8* high, bool both) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    r.low[h] = *(const int4*)(low + h * 16);
    r.high[h] = make_int4(0, 0, 0, 0);
    if (both) r.high[h] = *(const int4*)(high + h * 16);
  }
}
// Plus the rows times the token's fragments; two sums, so that fewer mma wait for one another. Of the product's eight
// columns the first is the token's and the second what its rounding leaves, where it is kept: lanes of groups 0 and 1
// hold them as operands, lanes with j = 0 as results.
__device__ __forceinline__ void multiply_add(float (&c)[4], float (&odd)[4], const Rows& r, const u32 (&frag)[8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int4 v = r.low[h], w = r.high[h];
    mma(c, v.x, w.x, v.y, w.y, frag[4 * h], frag[4 * h + 1]);
    mma(odd, v.z, w.z, v.w, w.w, frag[4 * h + 2], frag[4 * h + 3]);
  }
}
// A warp's share of 16 rows from `row` on, to be summed: [rows][WARPS].
__device__ __forceinline__ void put_dense(const Block& b, const float (&c)[4], const float (&odd)[4], int row) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = row + b.g + h * 8;
    if (b.j == 0 && r < DENSE_ROWS)
      b.dense[r * WARPS + b.warp] = (c[2 * h] + odd[2 * h]) + (c[2 * h + 1] + odd[2 * h + 1]);
  }
}
__device__ __forceinline__ float sum_dense(const Block& b, int row) {
  float sum = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) sum += b.dense[row * WARPS + w];
  return sum;
}
// This warp's columns of the staged row, as column `group` of the operand.
__device__ __forceinline__ void load_frag(u32 (&frag)[HPW][8], const Block& b, int group) {
  if (b.g != group) return;
#pragma unroll
  for (int k = 0; k < HPW; ++k) {
    const int4* p = (const int4*)(b.xs + (b.warp * HPW + k) * 128 + b.j * 32);
    const int4 v = p[0], w = p[1];
    frag[k][0] = v.x; frag[k][1] = v.y; frag[k][2] = v.z; frag[k][3] = v.w;
    frag[k][4] = w.x; frag[k][5] = w.y; frag[k][6] = w.z; frag[k][7] = w.w;
  }
}

__device__ __forceinline__ int share(int total, int block) { return (int)((long long)total * block / GRID); }
__device__ __forceinline__ int qkv_row(int unit, int n) {
  // rows i..i+3 and i+32..i+35 of a head: RoPE turns (i, i + 32) together
  return (unit >> 3) * 64 + (unit & 7) * 4 + (n & 3) + ((n >> 2) << 5);
}

// ---- the producer -------------------------------------------------------------------------------------------------

struct Producer {
  Cursor cursor;
  u32 tail;
  u64 policy;
};
// Room for the next chunk: waits for old ones to be used up. Returns its offset.
__device__ __forceinline__ u32 make_room(const Block& b, Producer& p, u32 size) {
  const u32 i = p.cursor.i, at = take(p.cursor, size);
  if (i >= AHEAD) bar_wait(b.full + 8 * ((i - AHEAD) % BARS), ((i - AHEAD) / BARS) & 1);
  while (p.tail < i && (p.cursor.end > b.s->starts[p.tail % BARS] + RING || i - p.tail >= BARS)) {
    bar_wait(b.empty + 8 * (p.tail % BARS), (p.tail / BARS) & 1);
    p.tail++;
  }
  __syncwarp();
  if (b.lane == 0) b.s->starts[i % BARS] = p.cursor.end - size;
  __syncwarp();
  return at;
}
__device__ __forceinline__ void produce_rows(
    const Block& b, Producer& p, const bf16* w, int row, int rows, int columns, int pitch) {
  const u32 at = make_room(b, p, rows * pitch), bar = b.full + 8 * ((p.cursor.i - 1) % BARS);
  if (b.lane == 0) bar_expect(bar, rows * columns * 2);
  __syncwarp();
  if (b.lane < rows)
    bulk_load(smem_u32(b.ring) + at + b.lane * pitch, w + (long long)(row + b.lane) * columns, columns * 2, bar,
              p.policy);
}
// This block's units of a choice: a share of each, so that each is finished by all blocks early; shares differ by a
// unit, so they turn from choice to choice.
template <int UNITS> __device__ __forceinline__ int first_unit(int choice, int next) {
  return share(UNITS, (int)(blockIdx.x + choice) % GRID + next);
}
template <int ROWS, int K, int PAIRS>
__device__ __forceinline__ void produce_experts(
    const Block& b, Producer& p, const u8* values, const u8* scales) {
  constexpr int UNITS = ROWS / 16, BYTES = 4 * K * 128;
  for (int choice = 0; choice < ACTIVE; ++choice) {
    // Stays until this block has consumed all that is produced here; read by the lane whose arrivals say so.
    const long long expert = __shfl_sync(~0u, b.lane == 0 ? b.s->ids[choice] : 0, 0);
    const int last = first_unit<UNITS>(choice, 1);
    for (int unit = first_unit<UNITS>(choice, 0); unit < last; ++unit) {
      const int tile = row_tile(unit, UNITS);
      const u32 at = make_room(b, p, BYTES + K * 64), bar = b.full + 8 * ((p.cursor.i - 1) % BARS);
      if (b.lane == 0) bar_expect(bar, BYTES + K * 64);
      __syncwarp();
      if (b.lane == 0)
        bulk_load(smem_u32(b.ring) + at, values + (expert * (ROWS / 4) + tile * 4) * (K * 128), BYTES, bar, p.policy);
      if (b.lane == 1)
        bulk_load(smem_u32(b.ring) + at + BYTES,
                  scales + (expert * ((ROWS + 255) / 256 * 8) + (tile >> 4) * 8 + (tile & 7)) * (PAIRS * 64), K * 64,
                  bar, p.policy);
    }
  }
}
__device__ __forceinline__ void produce(const Args& a, Block& b, const Layer* layers) {
  Producer p = {};
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p.policy));
  const int q_last = share(Q_UNITS, blockIdx.x + 1), o_last = share(O_PAIRS, blockIdx.x + 1);
  for (int l = 0; l < a.layer_count; ++l) {
    const Layer& y = layers[l];
    for (int unit = share(Q_UNITS, blockIdx.x); unit < q_last; ++unit) {
      produce_rows(b, p, y.w_qkv, qkv_row(unit, 0), 4, C, Q_PITCH);
      produce_rows(b, p, y.w_qkv, qkv_row(unit, 4), 4, C, Q_PITCH);
    }
    for (int pair = share(O_PAIRS, blockIdx.x); pair < o_last; ++pair)
      produce_rows(b, p, y.w_out, pair * 2, 2, Q, O_PITCH);
    bar_wait(b.chosen, l & 1);
    produce_experts<2 * I, HB, SKU>(b, p, y.up_values, y.up_scales);
    produce_experts<C, IB, SKD>(b, p, y.down_values, y.down_scales);
  }
}

// ---- qkv ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ Item make_item(const Args& a, const Layer& y, int unit, int i) {
  const int row = qkv_row(unit, i), head = row >> 6, d = row & 63;
  Item item = {to_float(y.b_qkv[row]), to_float(y.b_qkv[row + 32]), 1.f, 0.f, nullptr, row};
  if (head < QB + KVH) {
    const long long at = a.positions[0] * 64 + d;
    if (a.cos_sin_bf16) {
      item.cos = to_float(((const bf16*)a.cos_sin)[at]); item.sin = to_float(((const bf16*)a.cos_sin)[at + 32]);
    } else {
      item.cos = ((const float*)a.cos_sin)[at]; item.sin = ((const float*)a.cos_sin)[at + 32];
    }
  }
  if (head >= QB) {
    const long long slot = a.groups[y.group].slots[0];
    const int kv = head - QB, is_v = kv >= KVH;
    if (slot >= 0)
      item.dst = y.kv + (slot >> y.block_shift) * y.kv_block + (long long)(kv - (is_v ? KVH : 0)) * y.kv_head +
                 (slot & ((1 << y.block_shift) - 1)) * y.kv_token + d + (is_v ? 64 : 0);
  }
  return item;
}

// Nothing of it depends on the layer before: made early.
__device__ __forceinline__ void make_items(const Args& a, const Block& b, const Layer& y) {
  const int first = share(Q_UNITS, blockIdx.x), last = share(Q_UNITS, blockIdx.x + 1);
  for (int e = b.tid; e < (last - first) * 4; e += THREADS)
    b.s->items[e] = make_item(a, y, first + (e >> 2), e & 3);
}

__device__ __forceinline__ void split8(float (&f)[8], int4 v) {
  const u32 w[4] = {(u32)v.x, (u32)v.y, (u32)v.z, (u32)v.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) { const float2 p = unpack(w[e]); f[2 * e] = p.x; f[2 * e + 1] = p.y; }
}
__device__ __forceinline__ int4 join8(const float (&f)[8]) {
  return make_int4(pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7]));
}
__device__ __forceinline__ u32 word(const int4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
__device__ __forceinline__ float rounded(float v) { return to_float(to_bf16(v)); }

// The sum of the experts in the order of the choices, 8 columns, rounded to bf16.
__device__ __forceinline__ void mix8(float (&f)[8], const Late& late, int column) {
  const float* from = late.parts[0] + column;
  int4 v[ACTIVE][2];
#pragma unroll
  for (int k = 0; k < ACTIVE; ++k) v[k][0] = v[k][1] = make_int4(0, 0, 0, 0);
  u32 looks = 0;
  bool there;
  do {
    count_look(looks);
#pragma unroll
    for (int k = 0; k < ACTIVE; ++k)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (!whole32(v[k][h])) v[k][h] = look16(from + k * C + 4 * h);
    there = true;
#pragma unroll
    for (int k = 0; k < ACTIVE; ++k) there &= whole32(v[k][0]) && whole32(v[k][1]);
  } while (!there);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float sum = 0.f;
#pragma unroll
    for (int k = 0; k < ACTIVE; ++k) sum += __uint_as_float(word(v[k][e >> 2], e & 3));
    f[e] = rounded(sum);
  }
}

// A warp's columns of the layer's input x: their share of the squares; x times the norm's weight as fragments of two
// columns, itself and what rounding it to bf16 leaves, so that q, k and v carry no rounding of their input.
__device__ __forceinline__ void load_input(
    const Args& a, const Block& b, const Layer& y, int layer, u32 (&frag)[HPW][8]) {
  const int column = (b.warp * HPW * 8 + b.lane) * 8;
  const bool mine = b.lane < HPW * 8;
  int4 norm = make_int4(0, 0, 0, 0);
  if (mine) norm = __ldg((const int4*)(y.norm + column));
  float ss = 0.f;
  int4 rest = make_int4(0, 0, 0, 0);
  if (mine) {
    const Late& late = zeros(a).late[(layer - 1) & 1];
    const bf16* before = layer == 0 ? a.residual : late.hidden;
    float x[8], nw[8];
    int4 r = make_int4(0, 0, 0, 0);
    if (before != nullptr) r = __ldcg((const int4*)(before + column));  // all there since the layer before's up
    if (layer == 0) split8(x, __ldcg((const int4*)(a.x + column)));
    else mix8(x, late, column);
    split8(nw, norm);
    if (before != nullptr) {
      float h[8];
      split8(h, r);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = rounded(x[e] + h[e]);
    }
    const int row = column - share(O_PAIRS, blockIdx.x) * 2;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if ((u32)(row + e) < (u32)O_ROWS) b.s->kept[row + e] = x[e];
      ss += x[e] * x[e];
      x[e] *= nw[e];
    }
    const int4 part = join8(x);
    *(int4*)(b.xs + column * 2) = part;
    split8(nw, part);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] -= nw[e];
    rest = join8(x);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) ss += __shfl_xor_sync(~0u, ss, d);
  if (b.lane == 0) b.s->squares[b.warp] = ss;
  __syncwarp();
  load_frag(frag, b, 0);
  __syncwarp();
  if (mine) *(int4*)(b.xs + column * 2) = rest;
  __syncwarp();
  load_frag(frag, b, 1);
}

__device__ __forceinline__ void qkv(const Args& a, Block& b, const Layer& y, int layer) {
  const int first = share(Q_UNITS, blockIdx.x), units = share(Q_UNITS, blockIdx.x + 1) - first;
  mark(a, b, layer, 0);
  // The first unit waits in registers: the ring alone does not hold the block's share.
  Rows held[HPW];
  {
    const u32 low = next_chunk(b, Q_CHUNK), high = next_chunk(b, Q_CHUNK);
    const u8* from = b.ring + (b.g >> 2 ? high : low) + (b.g & 3) * Q_PITCH + b.warp * HPW * 128 + b.j * 32;
#pragma unroll
    for (int k = 0; k < HPW; ++k) load_rows(held[k], from + k * 128, from, false);
    release_chunks(b, 2);
  }
  u32 frag[HPW][8] = {};
  load_input(a, b, y, layer, frag);
  mark(a, b, layer, 1);
  {
    float c[4] = {}, odd[4] = {};
#pragma unroll
    for (int k = 0; k < HPW; ++k) multiply_add(c, odd, held[k], frag[k]);
    put_dense(b, c, odd, 0);
  }
#pragma unroll 1
  for (int u = 1; u < units; u += 2) {
    const bool both = u + 1 < units;
    u32 low = next_chunk(b, Q_CHUNK), at = next_chunk(b, Q_CHUNK);
    low = b.g >> 2 ? at : low;
    u32 high = low;
    if (both) {
      high = next_chunk(b, Q_CHUNK);
      at = next_chunk(b, Q_CHUNK);
      high = b.g >> 2 ? at : high;
    }
    const u8* from = b.ring + (b.g & 3) * Q_PITCH + b.warp * HPW * 128 + b.j * 32;
    float c[4] = {}, odd[4] = {};
#pragma unroll
    for (int k = 0; k < HPW; ++k) {
      Rows rows;
      load_rows(rows, from + low + k * 128, from + high + k * 128, both);
      multiply_add(c, odd, rows, frag[k]);
    }
    release_chunks(b, both ? 4 : 2);
    put_dense(b, c, odd, u * 8);
  }
  mark(a, b, layer, 2);
  sync_consumers();
  Early& early = zeros(a).early[layer & 1];
  for (int e = b.tid; e < units * 4; e += THREADS) {
    const int i = e & 3, u = e >> 2;
    const Item item = b.s->items[e];
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) s += b.s->squares[w];
    const float norm = rsqrtf(s / C + a.eps);
    // rounded to bf16 before the rotation, as a projection that stands alone is
    const float lo = rounded(sum_dense(b, u * 8 + i) * norm + item.bias_lo);
    const float hi = rounded(sum_dense(b, u * 8 + i + 4) * norm + item.bias_hi);
    const bf16 low = flagged(lo * item.cos - hi * item.sin), high = flagged(hi * item.cos + lo * item.sin);
    bf16* next = item.column < Q ? early.q + item.column : early.fresh + item.column - Q;
    __stcg(next, low);
    __stcg(next + 32, high);
    if (item.dst != nullptr) { item.dst[0] = low; item.dst[32] = high; }
  }
  if (b.warp == WARPS - 1 && b.lane == 0) {
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) s += b.s->squares[w];
    const int log2 = (int)(__float_as_uint(s / C) >> 23) - 127;
    b.s->log_rms = max(-50, min(50, log2 >> 1));  // twice that and SQUARE_BITS are still exponents of a float
  }
  sync_consumers();  // the scratch is free
}

// ---- attend -------------------------------------------------------------------------------------------------------

#define NEG __int_as_float(0xff800000)

struct Chunk {
  int4 k[2][2];  // two groups of 8 keys
  int4 v[4];     // keys 2j, 2j + 1, 2j + 8, 2j + 9 of the 16; 8 columns each
};
// Keys low <= key < end of one request, in aligned chunks of 16: a chunk lies in one block of the cache.
struct Keys {
  int head, split, splits, low, end, chunk, last;  // this warp's first chunk, the block's last
  int blocks;  // lane i: the cache block of this warp's chunk i
  const Where* where;
};
// Keys past the end are clamped to the last one: their scores are masked, their values finite.
__device__ __forceinline__ void load_chunk(Chunk& c, const Block& b, const Layer& y, const Keys& k, int i) {
  const int base = (k.chunk + i * WARPS) * 16, block = __shfl_sync(~0u, k.blocks, i), mask = (1 << y.block_shift) - 1;
  if (base >= k.end) {
#pragma unroll
    for (int n = 0; n < 4; ++n) c.k[n >> 1][n & 1] = c.v[n] = make_int4(0, 0, 0, 0);
    return;
  }
  const bf16* kv = y.kv + k.head * y.kv_head + (long long)block * y.kv_block;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const bf16* p = kv + (min(base + n * 8 + b.g, k.end - 1) & mask) * y.kv_token + b.j * 16;
    c.k[n][0] = __ldcg((const int4*)p);
    c.k[n][1] = __ldcg((const int4*)(p + 8));
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int key = min(base + 2 * b.j + (n & 1) + (n >> 1) * 8, k.end - 1);
    c.v[n] = __ldcg((const int4*)(kv + (key & mask) * y.kv_token + 64 + b.g * 8));
  }
}
// The key and value of this very step, which the cache may not hold yet.
__device__ __forceinline__ void load_fresh(Chunk& c, const Block& b, const Keys& k, int i, const Early& early) {
  const int base = (k.chunk + i * WARPS) * 16, fresh = k.where->keys - 1;
  if (base >= k.end || base + 16 <= fresh) return;
  int head = k.head;
  asm volatile("" : "+r"(head));  // or the loop over chunks keeps both addresses in registers, and others are spilled
  const bf16 *key = early.fresh + head * 64 + b.j * 16, *value = early.fresh + (KVH + head) * 64 + b.g * 8;
  int4 low, high, v;
  u32 looks = 0;
  do {
    count_look(looks);
    low = look16(key);
    high = look16(key + 8);
    v = look16(value);
  } while (!(whole(low) && whole(high) && whole(v)));
#pragma unroll
  for (int n = 0; n < 2; ++n)
    if (base + n * 8 + b.g >= fresh) { c.k[n][0] = low; c.k[n][1] = high; }
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (base + 2 * b.j + (n & 1) + (n >> 1) * 8 >= fresh) c.v[n] = v;
}

// Once a step: the request that the token is of, the first that has one, in each group of layers. One warp a group.
__device__ __forceinline__ void find_request(const Args& a, const Block& b) {
  if (b.warp >= a.group_count) return;
  const Group& group = a.groups[b.warp];
  const int requests = (int)group.requests;
  int request = 0;
  for (int r = 0; r < requests; r += 32)
    request += __popc(__ballot_sync(~0u, r + b.lane < requests && group.query_start[r + b.lane + 1] == 0));
  Where w = {group.block_table, 0};
  if (request < requests) {
    w.table += group.table_stride * request;
    w.keys = group.seq_lens[request];
  }
  if (b.lane == 0) b.s->where[b.warp] = w;
}
// What this block attends to: one key/value head with its 8 query heads, one of `splits` shares of the keys.
__device__ __forceinline__ bool find_keys(Keys& k, const Block& b, const Layer& y) {
  k.split = blockIdx.x % SPLITS;
  k.head = blockIdx.x / SPLITS;
  if (k.head >= KVH) return false;
  k.where = b.s->where + y.group;
  k.low = y.window > 0 ? max(0, k.where->keys - y.window) : 0;
  const int first = k.low / 16, chunks = (k.where->keys + 15) / 16 - first;
  // merging several blocks costs as much as a few turns of one
  k.splits = chunks <= 64 ? 1 : min(SPLITS, (chunks + 31) / 32);
  if (k.split >= k.splits) return false;
  const int each = (chunks + k.splits - 1) / k.splits;
  k.last = min(first + chunks, first + (k.split + 1) * each);
  k.chunk = first + k.split * each + b.warp;
  k.end = min(k.where->keys, k.last * 16);
  return true;
}
// The cache blocks of this warp's next 32 chunks.
__device__ __forceinline__ int find_blocks(const Keys& k, const Block& b, const Layer& y) {
  const int chunk = k.chunk + b.lane * WARPS;
  return chunk < k.last ? k.where->table[(chunk * 16) >> y.block_shift] : 0;
}
__device__ __forceinline__ int next_blocks(const Block& b, const Layer& y) {
  Keys k;
  return find_keys(k, b, y) ? find_blocks(k, b, y) : 0;
}

// One warp's running softmax over its keys: o[t] = (column 16j + t, column 16j + 8 + t) of query head g.
struct Running {
  float m, l, o[8][2];
};
__device__ __forceinline__ void attend_chunk(
    Running& r, const Args& a, const Block& b, const Keys& k, int i, const Chunk& now, const u32 (&q)[8]) {
  const int base = (k.chunk + i * WARPS) * 16;
  float s[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      mma(s[n], q[2 * e], 0, q[2 * e + 1], 0, word(now.k[n][e >> 1], (e & 1) * 2),
          word(now.k[n][e >> 1], (e & 1) * 2 + 1));
  }
  float top = r.m;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = base + n * 8 + 2 * b.j + e;
      s[n][e] = key >= k.low && key < k.end ? s[n][e] * a.scale : NEG;
      top = fmaxf(top, s[n][e]);
    }
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  const float keep = exp2f(r.m - top);  // the chunk has at least one key, so top is finite
  r.m = top;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) { s[n][e] = exp2f(s[n][e] - top); sum += s[n][e]; }
  r.l = r.l * keep + sum;
  const u32 p0 = pack(s[0][0], s[0][1]), p1 = pack(s[1][0], s[1][1]);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const u32 pick = (t & 1) ? 0x7632u : 0x5410u;
    const u32 b0 = __byte_perm(word(now.v[0], t >> 1), word(now.v[1], t >> 1), pick);
    const u32 b1 = __byte_perm(word(now.v[2], t >> 1), word(now.v[3], t >> 1), pick);
    float c[4] = {r.o[t][0] * keep, r.o[t][1] * keep, 0.f, 0.f};
    mma(c, p0, 0, p1, 0, b0, b1);
    r.o[t][0] = c[0]; r.o[t][1] = c[1];
  }
}
// All of this warp's chunks, of which `now` is the first.
__device__ __forceinline__ void attend_keys(
    Running& r, const Args& a, const Block& b, const Layer& y, Keys& k, Chunk& now, const u32 (&q)[8],
    const Early& early) {
#pragma unroll 1
  for (int i = 0; k.chunk + i * WARPS < k.last;) {
    attend_chunk(r, a, b, k, i, now, q);
    if (++i == 32) {
      k.chunk += 32 * WARPS;
      k.blocks = find_blocks(k, b, y);
      i = 0;
    }
    if (k.chunk + i * WARPS >= k.last) break;
    load_chunk(now, b, y, k, i);
    load_fresh(now, b, k, i, early);
    __syncwarp();
  }
  r.l += __shfl_xor_sync(~0u, r.l, 1);
  r.l += __shfl_xor_sync(~0u, r.l, 2);
}

__device__ __forceinline__ void put_running(const Running& r, float* to, float* m, float* l, int g, int j) {
#pragma unroll
  for (int t = 0; t < 8; t += 4) {
    *(float4*)&to[g * A_PITCH + 16 * j + t] = make_float4(r.o[t][0], r.o[t + 1][0], r.o[t + 2][0], r.o[t + 3][0]);
    *(float4*)&to[g * A_PITCH + 16 * j + 8 + t] = make_float4(r.o[t][1], r.o[t + 1][1], r.o[t + 2][1], r.o[t + 3][1]);
  }
  if (j == 0) { m[g] = r.m; l[g] = r.l; }
}
// Adds the sums of the warp 8 further on.
__device__ __forceinline__ void add_running(
    Running& r, const float* from, const float* m, const float* l, int g, int j) {
  const float top = fmaxf(r.m, m[g]);
  const float mine = r.m == NEG ? 0.f : exp2f(r.m - top), its = m[g] == NEG ? 0.f : exp2f(m[g] - top);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    r.o[t][0] = r.o[t][0] * mine + from[g * A_PITCH + 16 * j + t] * its;
    r.o[t][1] = r.o[t][1] * mine + from[g * A_PITCH + 16 * j + 8 + t] * its;
  }
  r.l = r.l * mine + l[g] * its;
  r.m = top;
}
// The block that comes last adds up what the blocks of one head have written: [8, 66] sums, top, denominator.
__device__ __forceinline__ void merge_splits(const Args& a, Block& b, const Layer& y, const Keys& k, Early& early) {
  __threadfence();
  sync_consumers();
  if (b.tid == 0) {
    const u32 before = atomicAdd(zeros(a).tickets + k.head, 1);
    b.s->last = before == (u32)k.splits - 1;
    if (b.s->last) zeros(a).tickets[k.head] = 0;
    __threadfence();
  }
  sync_consumers();
  if (!b.s->last) return;
  for (int e = b.tid; e < 512; e += THREADS) {
    const int h = e >> 6, d = e & 63;
    const float sink = to_float(y.sinks[k.head * 8 + h]) * 1.4426950408889634f;
    const float* from = a.attn + (k.head * SPLITS * 8 + h) * 66;
    float all = sink;
    for (int i = 0; i < k.splits; ++i) all = fmaxf(all, __ldcg(from + i * 8 * 66 + 64));
    float value = 0.f, total = exp2f(sink - all);
    for (int i = 0; i < k.splits; ++i) {
      const float f = exp2f(__ldcg(from + i * 8 * 66 + 64) - all);
      value += f * __ldcg(from + i * 8 * 66 + d);
      total += f * __ldcg(from + i * 8 * 66 + 65);
    }
    __stcg(early.attended + k.head * 512 + e, flagged(value / total));
  }
}

// One warp adds up a query head, 2 of its 64 columns a lane: the output, or what `merge_splits` takes.
__device__ __forceinline__ void finish_head(
    const Args& a, const Block& b, const Keys& k, const float* sums, float sink, Early& early) {
  const float *m = sums + 8 * A_WARP, *l = m + 64;
  const int h = b.warp, from = b.lane & 7;
  const float its = m[from * 8 + h];
  float top = its;
#pragma unroll
  for (int d = 4; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float factor = its == NEG ? 0.f : exp2f(its - top);
  float den = factor * l[from * 8 + h];
#pragma unroll
  for (int d = 4; d; d >>= 1) den += __shfl_xor_sync(~0u, den, d);
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float f = __shfl_sync(~0u, factor, i);
    const float2 v = *(const float2*)(sums + i * A_WARP + h * A_PITCH + 2 * b.lane);
    sum.x += f * v.x;
    sum.y += f * v.y;
  }
  if (k.splits > 1) {
    float* to = a.attn + ((k.head * SPLITS + k.split) * 8 + h) * 66;
    __stcg((float2*)(to + 2 * b.lane), sum);
    if (b.lane == 0) __stcg((float2*)(to + 64), make_float2(top, den));
  } else {
    const float all = fmaxf(top, sink), f = top == NEG ? 0.f : exp2f(top - all), whole = den * f + exp2f(sink - all);
    const u32 low = flagged(sum.x * f / whole), high = flagged(sum.y * f / whole);
    __stcg((u32*)(early.attended + (k.head * 8 + h) * 64) + b.lane, low | high << 16);
  }
}

__device__ __forceinline__ void attend(const Args& a, Block& b, const Layer& y, int layer) {
  Keys k;
  Early& early = zeros(a).early[layer & 1];
  const bool mine = find_keys(k, b, y);
  mark(a, b, layer, 3);
  if (mine) {
    const float sink = to_float(y.sinks[k.head * 8 + (b.warp & 7)]) * 1.4426950408889634f;
    Chunk now;
    k.blocks = b.blocks;
    load_chunk(now, b, y, k, 0);
    u32 q[8];
    {
      const bf16* p = early.q + (k.head * 8 + b.g) * 64 + b.j * 16;
      int4 v = look16(p), w = look16(p + 8);
      load_fresh(now, b, k, 0, early);
      v = settle(v, p);
      w = settle(w, p + 8);
      q[0] = v.x; q[1] = v.y; q[2] = v.z; q[3] = v.w; q[4] = w.x; q[5] = w.y; q[6] = w.z; q[7] = w.w;
    }
    __syncwarp();
    mark(a, b, layer, 12);
    Running r;
    r.m = NEG;
    r.l = 0.f;
#pragma unroll
    for (int t = 0; t < 8; ++t) r.o[t][0] = r.o[t][1] = 0.f;
    const bool wide = k.last - (k.chunk - b.warp) > 8;  // warps 8 to 14 have keys
    attend_keys(r, a, b, y, k, now, q, early);
    mark(a, b, layer, 13);
    float *sums = (float*)b.xs, *m = sums + 8 * A_WARP, *l = m + 64;
    const int w = b.warp & 7;
    if (wide) {
      if (b.warp >= 8) put_running(r, sums + w * A_WARP, m + w * 8, l + w * 8, b.g, b.j);
      sync_consumers();
      if (b.warp < WARPS - 8) add_running(r, sums + w * A_WARP, m + w * 8, l + w * 8, b.g, b.j);
      __syncwarp();  // one lane of four writes the maximum that all four have read
    }
    if (b.warp < 8) put_running(r, sums + w * A_WARP, m + w * 8, l + w * 8, b.g, b.j);
    sync_consumers();
    if (b.warp < 8) finish_head(a, b, k, sums, sink, early);
    if (k.splits > 1) merge_splits(a, b, y, k, early);
    sync_consumers();  // the scratch is free
  }
  mark(a, b, layer, 4);
}

// ---- out and the router's logits ----------------------------------------------------------------------------------

// A logit's sum: contributions in units of the layer's input, each plus 2^47 so that it is positive, below 2^48; the
// upper 8 bits count them.
constexpr int LOGIT_BITS = 34, SQUARE_BITS = 16;
static_assert((GRID + REPLICAS - 1) / REPLICAS < 256, "contributors are counted in 8 bits");
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float((u32)(max(-126, min(127, e)) + 127) << 23);
}
__device__ __forceinline__ void add_fixed(unsigned long long* to, float v, int bits) {
  const long long n = __float2ll_rn(fminf(fmaxf(v * power_of_two(bits), -1.4e14f), 1.4e14f));
  const unsigned long long sum = (1ull << 56) + (1ull << 47) + n;
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(sum) : "memory");
}
__device__ __forceinline__ unsigned long long look8(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// The sums of all blocks' contributions at N places of replica 0, once all are there.
template <int N>
__device__ __forceinline__ void settle_fixed(long long (&sum)[N], const unsigned long long* const (&at)[N]) {
  unsigned long long v[N][REPLICAS];
  u32 looks = 0;
  bool there;
  do {
    count_look(looks);
    there = true;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int r = 0; r < REPLICAS; ++r) v[i][r] = look8(at[i] + r * LOGITS);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int r = 0; r < REPLICAS; ++r) there &= (int)(v[i][r] >> 56) == (GRID - r + REPLICAS - 1) / REPLICAS;
  } while (!there);
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] = -((long long)GRID << 47);
#pragma unroll
    for (int r = 0; r < REPLICAS; ++r) sum[i] += (long long)(v[i][r] & ((1ull << 56) - 1));
  }
}

__device__ __forceinline__ void out(const Args& a, Block& b, const Layer& y, int layer) {
  const int first = share(O_PAIRS, blockIdx.x), pairs = share(O_PAIRS, blockIdx.x + 1) - first, rows = pairs * 2;
  // one output a thread
  const int row = b.tid, column = first * 2 + row;
  const bool mine = row < rows;
  float bias = 0.f, norm = 0.f;
  if (mine) {
    bias = to_float(y.b_out[column]);
    norm = to_float(y.post_norm[column]);
  }
  const int expert = b.tid / R_PARTS, part = b.tid % R_PARTS;
  float wr[R_EACH];
#pragma unroll
  for (int i = 0; i < R_EACH; ++i) {
    const int r = part + i * R_PARTS;
    wr[i] = b.tid < 256 && r < rows ? to_float(y.w_router[(long long)expert * C + first * 2 + r]) : 0.f;
  }
  u32 frag[QPW][8];
  const int blocks = b.warp + (QPW - 1) * WARPS < QB ? QPW : QPW - 1;
  const bf16* attended = zeros(a).early[layer & 1].attended + b.warp * 64 + b.j * 16;
  u32 looks = 0;
  bool there;
  do {
    count_look(looks);
    there = true;
#pragma unroll
    for (int k = 0; k < QPW; ++k) {
      int4 v = make_int4(0, 0, 0, 0), w = v;
      if (b.g == 0 && (k < QPW - 1 || blocks == QPW)) {
        v = look16(attended + k * WARPS * 64);
        w = look16(attended + k * WARPS * 64 + 8);
        there &= whole(v) && whole(w);
      }
      frag[k][0] = v.x; frag[k][1] = v.y; frag[k][2] = v.z; frag[k][3] = v.w;
      frag[k][4] = w.x; frag[k][5] = w.y; frag[k][6] = w.z; frag[k][7] = w.w;
    }
  } while (!there);
  __syncwarp();
  mark(a, b, layer, 5);
#pragma unroll 1
  for (int u = 0; u < pairs; u += 8) {
    const int chunks = min(8, pairs - u);
    // rows past the share are the first ones again: their rows of the product are not read
    u32 low = next_chunk(b, O_CHUNK), high = low;
    for (int i = 1; i < chunks; ++i) {
      const u32 here = next_chunk(b, O_CHUNK);
      low = b.g >> 1 == i ? here : low;
      high = (b.g >> 1) + 4 == i ? here : high;
    }
    const u8* from = b.ring + (b.g & 1) * O_PITCH + b.warp * 128 + b.j * 32;
    float c[4] = {}, odd[4] = {};
#pragma unroll
    for (int k = 0; k < QPW; ++k) {
      if (k == QPW - 1 && blocks < QPW) continue;
      Rows here;
      load_rows(here, from + low + k * WARPS * 128, from + high + k * WARPS * 128, chunks > 4);
      multiply_add(c, odd, here, frag[k]);
    }
    release_chunks(b, chunks);
    put_dense(b, c, odd, u * 2);
  }
  mark(a, b, layer, 6);
  sync_consumers();
  float* normed = b.dense + DENSE_ROWS * WARPS;  // [O_ROWS]: h times the norm's weight
  float* squares = normed + O_ROWS;
  if (row < O_ROWS) {
    float h = 0.f;
    if (mine) {
      // rounded to bf16 before the addition, as a projection that stands alone is
      h = rounded(rounded(sum_dense(b, row) + bias) + b.s->kept[row]);
      __stcg(zeros(a).late[layer & 1].hidden + column, flagged(h));
    }
    normed[row] = h * norm;
    squares[row] = h * h;
  }
  sync_consumers();
  unsigned long long* sums = zeros(a).logits[layer & 1][blockIdx.x % REPLICAS];
  if (b.tid < 256) {
    float v = 0.f;
#pragma unroll
    for (int i = 0; i < R_EACH; ++i)
      if (part + i * R_PARTS < O_ROWS) v += wr[i] * normed[part + i * R_PARTS];
#pragma unroll
    for (int d = R_PARTS / 2; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (part == 0) add_fixed(sums + expert, v, LOGIT_BITS - b.s->log_rms);
  }
  if (b.warp == WARPS - 1 && b.lane == 0) {
    float v = 0.f;
#pragma unroll
    for (int r = 0; r < O_ROWS; ++r) v += squares[r];
    add_fixed(sums + EXPERTS, v, SQUARE_BITS - 2 * b.s->log_rms);
  }
}

// ---- experts ------------------------------------------------------------------------------------------------------

// One warp: the choices.
__device__ __forceinline__ void choose_experts(const Args& a, Block& b, const float (&bias)[EACH], int layer) {
  const unsigned long long* sums = zeros(a).logits[layer & 1][0];
  const int log = b.s->log_rms;
  const unsigned long long* at[EACH + 1];
  long long v[EACH + 1];
#pragma unroll
  for (int i = 0; i < EACH; ++i) at[i] = sums + b.lane * EACH + i;
  at[EACH] = sums + EXPERTS;
  settle_fixed<EACH + 1>(v, at);
  float f[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) f[i] = (float)v[i] * power_of_two(log - LOGIT_BITS);
  const float square = (float)v[EACH] * power_of_two(2 * log - SQUARE_BITS);
  const float norm = rsqrtf(square / C + a.eps);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < EACH; ++i) f[i] = f[i] * norm + bias[i];
  choose<EACH, ACTIVE>(f, b.s->weights, b.s->ids, b.lane);
  if (b.lane == 0) b.s->scale = norm;
  __syncwarp();
  bar_arrive_warp(b.chosen, b.lane);
}
__device__ __forceinline__ int4 times_two_64(int4 v) {
  return make_int4(mul_bf16x2(v.x, TWO_64), mul_bf16x2(v.y, TWO_64), mul_bf16x2(v.z, TWO_64), mul_bf16x2(v.w, TWO_64));
}

// This warp's share of one unit: 16 rows times the token, in c[0] and c[2] of lanes with j = 0.
template <int K>
__device__ __forceinline__ void expert_product(
    float (&c)[4], const u8* unit, int half, int first, const u32 (&x)[HPW][8], int lane, u32 two_23) {
  const u32 values = smem_u32(unit) + (lane >> 3) * (K * 128) + ((lane >> 2) & 1) * 64 + (lane & 3) * 16 + first * 128;
  const u32 scales = smem_u32(unit) + 4 * K * 128 + half * 32 + (lane >> 2) * 4 + first * 64;
  c[0] = c[1] = c[2] = c[3] = 0.f;
#pragma unroll
  for (int i = 0; i < HPW; ++i) {
    const uint4 v = lds16(values + i * 128);
    const u32 s = lds4(scales + i * 64);
    group(c, v.x, v.y, scale<0>(s, two_23), scale<1>(s, two_23), x[i]);
    group(c, v.z, v.w, scale<2>(s, two_23), scale<3>(s, two_23), x[i] + 4);
  }
}

// The fragments of this warp's columns of the staged row, which are all eight columns of the operand.
__device__ __forceinline__ void load_x(u32 (&x)[HPW][8], const Block& b) {
  const u32 at = smem_u32(b.xs) + b.warp * HPW * 128 + (b.lane >> 3) * 16;
#pragma unroll
  for (int k = 0; k < HPW; ++k) {
    u32 lo[4], hi[4];
    ldmatrix4(lo, at + k * 128);
    ldmatrix4(hi, at + k * 128 + 64);
#pragma unroll
    for (int e = 0; e < 4; ++e) { x[k][e] = lo[e]; x[k][4 + e] = hi[e]; }
  }
}

// This block's units of one choice. UP: act[choice] = swiglu(w13 x + b13); else parts[choice] = weight x (w2 act + b2).
// Warps take turns in summing up and finishing; the others go on.
template <bool UP>
__device__ __forceinline__ void expert_units(const Args& a, Block& b, const Layer& y, int choice, Late& late) {
  constexpr int K = UP ? HB : IB, ROWS = UP ? 2 * I : C, UNITS = ROWS / 16;
  constexpr int OUTS = UP ? 8 : 16, TURNS = (FLUSH * OUTS + 31) / 32;  // outputs of a unit; of a flush, a lane
  const int last = first_unit<UNITS>(choice, 1);
  const float* biases = (UP ? y.up_bias : y.down_bias) + (long long)b.s->ids[choice] * ROWS;
  u32 x[HPW][8];
  load_x(x, b);
  for (int start = first_unit<UNITS>(choice, 0); start < last; start += FLUSH, ++b.flush) {
    const int count = min(FLUSH, last - start), buffer = b.flush % BUFFERS, round = b.flush / BUFFERS;
    const bool finish = b.flush % WARPS == (u32)b.warp;
    float* sums = b.sums + buffer * SUM;  // [FLUSH][WARPS][16]
    // bias of this lane's outputs, r of unit u: asked for early
    float2 bias[TURNS];
    if (finish) {
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        const int o = i * 32 + b.lane, u = min(o / OUTS, count - 1), r = o % OUTS;
        const float* from = biases + row_tile(start + u, UNITS) * 16 + (UP ? 2 * r : r);
        bias[i] = UP ? __ldg((const float2*)from) : make_float2(__ldg(from), 0.f);
      }
    }
    if (round > 0) bar_wait(b.sums_free + 8 * buffer, (round - 1) & 1);
    for (int i = 0; i < count; ++i) {
      const u32 at = next_chunk(b, UP ? UP_CHUNK : DOWN_CHUNK);
      float c[4];
      expert_product<K>(c, b.ring + at, (row_tile(start + i, UNITS) >> 3) & 1, b.warp * HPW, x, b.lane, a.two_23);
      float* to = sums + (i * WARPS + b.warp) * 16 + b.g;
      if (b.j == 0) { to[0] = c[0]; to[8] = c[2]; }
      release_chunks(b, 1);
    }
    bar_arrive_warp(b.sums_full + 8 * buffer, b.lane);
    if (!finish) continue;
    bar_wait(b.sums_full + 8 * buffer, round & 1);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int o = i * 32 + b.lane, u = o / OUTS, r = o % OUTS;
      if (u >= count) continue;
      const int tile = row_tile(start + u, UNITS);
      const float* from = sums + u * WARPS * 16;
      float first = bias[i].x, second = bias[i].y;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        first += from[w * 16 + (UP ? 2 * r : r)];
        if (UP) second += from[w * 16 + 2 * r + 1];
      }
      if (UP) {
        const float gate = fminf(first, a.limit), lin = fminf(fmaxf(second, -a.limit), a.limit);
        __stcg(late.act[choice] + tile * 8 + r, flagged(gate / (1.f + __expf(-a.alpha * gate)) * (lin + 1.f)));
      } else {
        __stcg(late.parts[choice] + tile * 16 + r, flagged32(first * b.s->weights[choice]));
      }
    }
    __syncwarp();
    bar_arrive_warp(b.sums_free + 8 * buffer, b.lane);
  }
}

__device__ __forceinline__ int clear(void* what, int bytes, const Block& b) {
  int done = 0;
  for (int i = blockIdx.x * THREADS + b.tid; i < bytes / 16; i += GRID * THREADS, ++done)
    __stcg((int4*)what + i, make_int4(0, 0, 0, 0));
  return done;
}
// What all blocks have read by now, for the layer after the next; before whatever this block writes from here on.
__device__ __forceinline__ void clear_read(const Args& a, const Block& b, int layer) {
  Zeros& z = zeros(a);
  int done = clear(z.early + (layer & 1), sizeof(Early), b);
  if (layer > 0) done += clear(z.late + ((layer - 1) & 1), sizeof(Late), b);
  done += clear(z.logits[(layer + 1) & 1], sizeof(z.logits[0]), b);
  if (done) __threadfence();
}

__device__ __forceinline__ void up(const Args& a, Block& b, const Layer& y, const Layer* after, int layer) {
  Late& late = zeros(a).late[layer & 1];
  const int column = (b.warp * HPW * 8 + b.lane) * 8;
  const bool mine = b.lane < HPW * 8;
  int4 norm = make_int4(0, 0, 0, 0);
  float bias[EACH];
  if (mine) norm = __ldg((const int4*)(y.post_norm + column));
#pragma unroll
  for (int i = 0; i < EACH; ++i) bias[i] = b.warp == 0 ? to_float(y.b_router[b.lane * EACH + i]) : 0.f;
  if (after != nullptr) {
    make_items(a, b, *after);
    b.blocks = next_blocks(b, *after);
  }
  mark(a, b, layer, 7);
  int4 h = make_int4(0, 0, 0, 0);
  if (mine) h = look16(late.hidden + column);
  if (b.warp == 0) choose_experts(a, b, bias, layer);
  if (mine) h = settle(h, late.hidden + column);
  sync_consumers();  // the choices are known
  mark(a, b, layer, 8);
  if (mine) {
    float nw[8], x[8];
    split8(nw, norm);
    split8(x, h);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = x[e] * b.s->scale * nw[e];
    *(int4*)(b.xs + column * 2) = times_two_64(join8(x));
  }
  __syncwarp();
  clear_read(a, b, layer);
  for (int choice = 0; choice < ACTIVE; ++choice) expert_units<true>(a, b, y, choice, late);
  mark(a, b, layer, 9);
}

__device__ __forceinline__ void down(const Args& a, Block& b, const Layer& y, int layer) {
  Late& late = zeros(a).late[layer & 1];
  const int column = (b.warp * HPW * 8 + b.lane) * 8;
  const bool mine = b.lane < HPW * 8;
  int4 act = make_int4(0, 0, 0, 0);
  if (mine) act = look16(late.act[0] + column);
  for (int choice = 0; choice < ACTIVE; ++choice) {
    __syncwarp();  // all lanes have read what was staged before
    if (mine) *(int4*)(b.xs + column * 2) = times_two_64(settle(act, late.act[choice] + column));
    __syncwarp();
    if (choice == 0) mark(a, b, layer, 10);
    if (mine && choice + 1 < ACTIVE) act = look16(late.act[choice + 1] + column);
    expert_units<false>(a, b, y, choice, late);
  }
  mark(a, b, layer, 11);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1) decode_step(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Shared s;
  __shared__ Layer layers[LAYERS];
  Block b;
  b.s = &s;
  b.ring = memory;
  b.xs = memory + RING;
  b.sums = (float*)(b.xs + X_BYTES);
  b.dense = b.sums + BUFFERS * SUM;
  b.full = smem_u32(s.bars);
  b.empty = b.full + 8 * BARS;
  b.sums_full = b.empty + 8 * BARS;
  b.sums_free = b.sums_full + 8 * BUFFERS;
  b.chosen = b.sums_free + 8 * BUFFERS;
  b.tid = threadIdx.x;
  b.warp = b.tid >> 5;
  b.lane = b.tid & 31;
  b.g = b.lane >> 2;
  b.j = b.lane & 3;
  b.cursor = {};
  b.flush = 0;
  for (int i = b.tid; i < a.layer_count * (int)(sizeof(Layer) / 8); i += THREADS + 32)
    ((u64*)layers)[i] = ((const u64*)a.layers)[i];
  if (b.tid == 0) {
    for (int i = 0; i < BARS; ++i) { bar_init(b.full + 8 * i, 1); bar_init(b.empty + 8 * i, WARPS * SPEAKERS); }
    for (int i = 0; i < BUFFERS; ++i) {
      bar_init(b.sums_full + 8 * i, WARPS * SPEAKERS);
      bar_init(b.sums_free + 8 * i, SPEAKERS);
    }
    bar_init(b.chosen, SPEAKERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (b.warp == WARPS) {
    produce(a, b, layers);
    return;
  }
  pdl_wait();
  find_request(a, b);
  make_items(a, b, layers[0]);
  sync_consumers();
  b.blocks = next_blocks(b, layers[0]);
  for (int l = 0; l < a.layer_count; ++l) {
    const Layer& y = layers[l];
    qkv(a, b, y, l);
    attend(a, b, y, l);
    out(a, b, y, l);
    up(a, b, y, l + 1 < a.layer_count ? layers + l + 1 : nullptr, l);
    down(a, b, y, l);
  }
  const Late& late = zeros(a).late[(a.layer_count - 1) & 1];
  const int column = (b.warp * HPW * 8 + b.lane) * 8;
  if (b.lane < HPW * 8)
    if (column / 8 % GRID == blockIdx.x) {
      float x[8];
      mix8(x, late, column);
      *(int4*)(a.out + column) = join8(x);
      *(int4*)(a.hidden + column) = __ldcg((const int4*)(late.hidden + column));
    }
}
