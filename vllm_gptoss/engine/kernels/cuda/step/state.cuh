// What the step's phases share: sizes, the host's records, buffers between blocks, a thread's
// place.
//
// Offers: constants (in elements unless named bytes or rows), Layer, Group and Args
// (engine/kernels/step.py has their mirrors), Early, Late and Zeros (in global memory, zero between
// steps), Received (what other ranks write here), Shared, Block, Cursor and take (where the next
// chunk lies in the ring), sync_consumers, mark (clock marks: TRACE). Barriers: named barrier 1,
// the consumers.
#include "../barriers.cuh"
#include "../cache.cuh"
#include "../common.cuh"
#include "../online_softmax.cuh"
#include "../rope.cuh"

#ifndef TRACE
#define TRACE 0
#endif
#ifndef RANKS
#define RANKS 1
#endif

// Consumers; with the producer 16 warps of 128 registers.
constexpr int WARPS = 15, THREADS = WARPS * 32;
constexpr int C = HB * 64, Q = QB * 64, I = IB * 64, KVH = QB / 8;
// 64-column blocks of a warp
constexpr int HPW = HB / WARPS, QPW = (QB + WARPS - 1) / WARPS, IPW = (IB + WARPS - 1) / WARPS;
// Expert units between two sums over the warps; buffers of such sums.
constexpr int FLUSH = 3, BUFFERS = 4;

// Units of 8 rows of q/k/v, pairs of rows of out: all, a block's at most.
constexpr int Q_UNITS = (QB + 2 * KVH) * 8, Q_EACH = (Q_UNITS + GRID - 1) / GRID;
constexpr int O_PAIRS = C / 2, O_EACH = (O_PAIRS + GRID - 1) / GRID, O_ROWS = O_EACH * 2;
// Bytes from a row to the next: 16 mod 128, so that the quads of two rows cover all banks.
constexpr int Q_PITCH = C * 2 + 16, O_PITCH = Q * 2 + 16;
// Bytes of what is copied at once: half a unit, a pair, an expert unit's values, then scales.
constexpr int Q_CHUNK = 4 * Q_PITCH, O_CHUNK = 2 * O_PITCH;
constexpr int UP_CHUNK = 4 * HB * 128 + HB * 64, DOWN_CHUNK = 4 * IB * 128 + IB * 64;
constexpr int BARS = 16;  // chunks in the ring at most
// Chunks on their way at most: with more, small loads wait behind them for microseconds. A rank has
// fewer dense weights to read in the same time (docs/kernels/experiments.md).
__device__ constexpr u32 ahead(u32 chunk) {
  return RANKS == 1 || chunk == UP_CHUNK || chunk == O_CHUNK ? 2 : chunk == DOWN_CHUNK ? 3 : 1;
}
// Of the logits' sums: atomics on one address follow one another.
constexpr int REPLICAS = EXPERTS <= 32 ? 4 : 1;
constexpr int LOGITS = EXPERTS + 4;  // the logits, the sum of squares, padding
constexpr int EACH = EXPERTS / 32;
constexpr int R_PARTS = 256 / EXPERTS, R_EACH = (O_ROWS + R_PARTS - 1) / R_PARTS;
// Scratch: the staged row, sums of experts, sums of q/k/v and out; attention, in between, uses it
// from the start. X_BYTES is bytes, the others floats.
constexpr int X_BYTES = C * 2;
constexpr int SUM = FLUSH * WARPS * 16;  // a buffer
constexpr int O_SUMS = (O_ROWS + 15) / 16 * 16;
constexpr int DENSE_ROWS = Q_EACH * 8 > O_SUMS ? Q_EACH * 8 : O_SUMS;
constexpr int DENSE = DENSE_ROWS * WARPS + 2 * O_ROWS;
constexpr int A_WARP = GROUP * O_ROW;  // a warp's sums of 8 query heads
static_assert(
    X_BYTES + (BUFFERS * SUM + DENSE) * 4 >= (8 * A_WARP + 128) * 4, "attention's scratch");
static_assert(EXPERTS % 32 == 0 && EXPERTS <= 128 && HB % WARPS == 0 && HPW <= 4, "shape");
static_assert(
    IPW <= HPW, "a warp stages in its own part of the row in all phases: no barrier between them");
static_assert(KVH * SPLITS <= GRID && KVH <= 64 && O_ROWS <= THREADS && ACTIVE == 4, "shape");

struct Layer {
  const bf16 *norm, *w_qkv, *b_qkv, *w_out, *b_out, *post_norm, *w_router, *b_router;
  const u8 *up_values, *up_scales;
  const float* up_bias;
  const u8 *down_values, *down_scales;
  const float* down_bias;
  const bf16* sinks;
  Element* kv;
  long long kv_block, kv_head, kv_token;  // strides in elements
  int window, group, block_shift, unused;
};
struct Group {
  const int *block_table, *seq_lens, *query_start;
  const long long* slots;
  long long table_stride, requests;
};
struct CacheScales {
  const float *k_scale, *v_scale;
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
  const CacheScales* scales;  // E4m3: of the layers' caches
  u8* received;               // what peers write here: `Received`
  u8* peers[7];               // the peers' `Received`, from the next rank on
  int rank, unused;
};

template <class C> struct ItemOf;
template <> struct ItemOf<Bf16> : Pair<bf16> {  // dst: in the cache
  int column;                                   // in Early.q, from Q on in Early.fresh
};
template <> struct ItemOf<E4m3> : Pair<u8> {
  int column;
  float scale;
};
using Item = ItemOf<Cache>;

// Read before a layer's logits are complete.
struct Early {
  bf16 q[Q], attended[Q],
      fresh[2 * KVH * 64];  // fresh: this step's key heads, then its value heads; E4m3: codes
};
// Read before the next layer's logits are complete. Every block reads the parts of all ranks: in
// bf16, those of two take no longer than one rank's floats.
#if RANKS > 1
using Part = bf16;
#else
using Part = float;
#endif
struct Late {
  bf16 hidden[C], act[ACTIVE][I];
  Part parts[ACTIVE][C];
};
struct Zeros {
  u32 tickets[64];  // [KVH]
  unsigned long long logits[2][REPLICAS][LOGITS];
  Early early[2];
  Late late[2];
};
static_assert(
    sizeof(Early) % 16 == 0 && sizeof(Late) % 16 == 0 && LOGITS % 2 == 0, "16 bytes at a time");

// Of each rank that sends, by the parity of the layer; its own place stays empty. Zero before the
// first step of a process. A step leaves the last layer's parts, which the next one zeroes.
struct Received {
  float sums[2][RANKS][C];          // of out
  Part parts[2][RANKS][ACTIVE][C];  // of down
};

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
  if (c.at + size > RING) {
    c.end += RING - c.at;
    c.at = 0;
  }
  const u32 at = c.at;
  c.at += size;
  c.end += size;
  c.i++;
  return at;
}

// With peers a wait may be as long as vLLM's for a step, 300 s: 170 ns a look.
constexpr u32 SPIN_LIMIT = RANKS == 1 ? 1u << 25 : 1u << 31;

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

__device__ __forceinline__ void sync_consumers() { named_sync<1, THREADS>(); }

__device__ __forceinline__ void mark(const Args& a, const Block& b, int layer, int what) {
  if (TRACE > 0 && b.tid == 0)
    a.trace[((long long)layer * TRACE + what) * GRID + blockIdx.x] = clock64();
}

__device__ __forceinline__ Zeros& zeros(const Args& a) { return *(Zeros*)a.zeros; }
__device__ __forceinline__ Received& received(const Args& a) { return *(Received*)a.received; }

__device__ __forceinline__ int share(int total, int block) {
  return (int)((long long)total * block / GRID);
}
