// Phase 1: x = h + the experts' sums, RMSNorm, q/k/v projection, bias, RoPE, cache write.
//
// Offers: make_items (ahead of the layer), mix8 (the experts' sums), clear_received, qkv. Leaves
// Early.q and Early.fresh. Barriers: named barrier 1, the ring's.
#include "../rope.cuh"
#include "flags.cuh"
#include "rows.cuh"

// Sets where a key or a value goes. kv: its head, from KVH on of the values. Templates, because
// only one of the two is for this cache.
template <class Paged>
__device__ __forceinline__ void aim(
    ItemOf<Bf16>& item, const Args& a, const Paged& y, int, int kv, int d) {
  item.dst = cache_place(y, a.groups[y.group].slots[0], kv, KVH, d);
}
template <class Paged>
__device__ __forceinline__ void aim(
    ItemOf<E4m3>& item, const Args& a, const Paged& y, int layer, int kv, int d) {
  item.dst = cache_place(y, a.groups[y.group].slots[0], kv, KVH, d);
  item.scale = __ldg(kv < KVH ? a.scales[layer].k_scale : a.scales[layer].v_scale);
}
__device__ __forceinline__ Item make_item(
    const Args& a, const Layer& y, int layer, int unit, int i) {
  const int row = rope_row(unit, i), head = row >> 6;
  Item item = {
      make_pair<Element>(row, QB + KVH, y.b_qkv, a.cos_sin, a.cos_sin_bf16, a.positions), row};
  if (head >= QB) aim(item, a, y, layer, head - QB, row & 63);
  return item;
}

// Nothing of it depends on the layer before: made early.
__device__ __forceinline__ void make_items(
    const Args& a, const Block& b, const Layer& y, int layer) {
  const int first = share(Q_UNITS, blockIdx.x), last = share(Q_UNITS, blockIdx.x + 1);
  for (int e = b.tid; e < (last - first) * 4; e += THREADS)
    b.s->items[e] = make_item(a, y, layer, first + (e >> 2), e & 3);
}

// An item's outputs, for the other blocks and into the cache. What others read is never zero. A
// code gets a second byte for that, and others read the key or value that the cache gets.
__device__ __forceinline__ void publish(const ItemOf<Bf16>& item, float2 out, Early& early) {
  const bf16 low = flagged(out.x), high = flagged(out.y);
  bf16* next = item.column < Q ? early.q + item.column : early.fresh + item.column - Q;
  __stcg(next, low);
  __stcg(next + 32, high);
  if (item.dst != nullptr) {
    item.dst[0] = low;
    item.dst[32] = high;
  }
}
__device__ __forceinline__ void publish(const ItemOf<E4m3>& item, float2 out, Early& early) {
  const u32 codes = encode(rounded(out.x), rounded(out.y), item.scale);
  const bool is_query = item.column < Q;
  bf16* next = is_query ? early.q + item.column : early.fresh + item.column - Q;
  __stcg(next, is_query ? flagged(out.x) : (bf16)(0x100 | (codes & 0xff)));
  __stcg(next + 32, is_query ? flagged(out.y) : (bf16)(0x100 | codes >> 8));
  if (item.dst != nullptr) {
    item.dst[0] = codes;
    item.dst[32] = codes >> 8;
  }
}

// Adds 8 columns of floats, or of bf16.
__device__ __forceinline__ void add8(float (&f)[8], const int4 (&v)[2]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) f[e] += __uint_as_float(word(v[e >> 2], e & 3));
}
__device__ __forceinline__ void add8(float (&f)[8], const int4 (&v)[1]) {
  float more[8];
  split8(more, v[0]);
#pragma unroll
  for (int e = 0; e < 8; ++e) f[e] += more[e];
}
__device__ __forceinline__ bool whole_parts(int4 v) { return RANKS == 1 ? whole32(v) : whole(v); }
// The parts of rank r.
__device__ __forceinline__ const Part* parts_of(const Args& a, int layer, int r) {
  const Part* own = zeros(a).late[layer & 1].parts[0];
  return RANKS == 1 || r == a.rank ? own : received(a).parts[layer & 1][r][0];
}
// The sum of the experts of all ranks, in their order and that of the choices, 8 columns, rounded
// to bf16. Two ranks at a time: more do not fit in registers.
__device__ __forceinline__ void mix8(float (&f)[8], const Args& a, int layer, int column) {
  constexpr int WORDS = sizeof(Part) / 2, SIDE = RANKS == 1 ? 1 : 2;
#pragma unroll
  for (int e = 0; e < 8; ++e) f[e] = 0.f;
#pragma unroll
  for (int first = 0; first < RANKS; first += SIDE) {
    int4 v[SIDE][ACTIVE][WORDS] = {};
    poll([&] {
      bool there = true;
#pragma unroll
      for (int r = 0; r < SIDE; ++r) {
        const Part* from = parts_of(a, layer, first + r) + column;
#pragma unroll
        for (int k = 0; k < ACTIVE; ++k)
#pragma unroll
          for (int h = 0; h < WORDS; ++h)
            if (!whole_parts(v[r][k][h])) v[r][k][h] = look16((const u8*)(from + k * C) + 16 * h);
      }
#pragma unroll
      for (int r = 0; r < SIDE; ++r)
#pragma unroll
        for (int k = 0; k < ACTIVE; ++k)
#pragma unroll
          for (int h = 0; h < WORDS; ++h) there &= whole_parts(v[r][k][h]);
      return there;
    });
#pragma unroll
    for (int r = 0; r < SIDE; ++r)
#pragma unroll
      for (int k = 0; k < ACTIVE; ++k) add8(f, v[r][k]);
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) f[e] = rounded(f[e]);
}

// Zeroes what peers wrote and all blocks have read, each block a share; the next layer waits until
// it is done. A peer writes there again once it has the sums of the next layer's `out` of all
// blocks of this rank.
constexpr int RECEIVED_PARTS = sizeof(Received::parts) / 32,
              RECEIVED_SUMS = sizeof(Received::sums) / 32;
__device__ __forceinline__ int clear_share(int block) {
  return share(RECEIVED_PARTS + RECEIVED_SUMS, block);
}
static_assert(RECEIVED_PARTS + RECEIVED_SUMS <= THREADS * (GRID - 1), "one of 16 bytes a thread");
__device__ __forceinline__ void clear_received(const Args& a, const Block& b, int layer) {
  Received& from = received(a);
  const int i = clear_share(blockIdx.x) + b.tid - RECEIVED_PARTS;
  if (i >= clear_share(blockIdx.x + 1) - RECEIVED_PARTS) return;
  auto* const parts = (int4*)from.parts[layer & 1 ^ 1];  // of the layer before
  auto* const sums = (int4*)from.sums[layer & 1];
  __stcg(i < 0 ? parts + RECEIVED_PARTS + i : sums + i, make_int4(0, 0, 0, 0));
}
__device__ __forceinline__ void wait_cleared(const Block& b) {
  if (b.tid < clear_share(blockIdx.x + 1) - clear_share(blockIdx.x)) __threadfence_system();
}

// A warp's columns of the layer's input x: their share of the squares; x times the norm's weight as
// fragments of two columns, itself and what rounding it to bf16 leaves, so that q, k and v carry no
// rounding of their input.
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
    if (before != nullptr)
      r = __ldcg((const int4*)(before + column));  // all there since the layer before's up
    if (layer == 0)
      split8(x, __ldcg((const int4*)(a.x + column)));
    else
      mix8(x, a, layer - 1, column);
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
    const u8* from =
        b.ring + (b.g >> 2 ? high : low) + (b.g & 3) * Q_PITCH + b.warp * HPW * 128 + b.j * 32;
#pragma unroll
    for (int k = 0; k < HPW; ++k) load_rows(held[k], from + k * 128, from, false);
    release_chunks(b, 2);
  }
  u32 frag[HPW][8] = {};
  if (RANKS > 1 && layer > 0) wait_cleared(b);
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
    const float2 turned =
        rotate(item, sum_dense(b, u * 8 + i) * norm, sum_dense(b, u * 8 + i + 4) * norm);
    publish(item, turned, early);
  }
  if (b.warp == WARPS - 1 && b.lane == 0) {
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) s += b.s->squares[w];
    const int log2 = (int)(__float_as_uint(s / C) >> 23) - 127;
    // twice that and SQUARE_BITS are still exponents of a float
    b.s->log_rms = max(-50, min(50, log2 >> 1));
  }
  sync_consumers();  // the scratch is free
}
