// Phase 2: attention with sinks, over a window or all keys, heads of 64. Few keys: one block a
// key/value head; many: several, and the last one merges.
//
// Offers: find_request (once a step), next_blocks (ahead of the layer), attend. Leaves
// Early.attended. Barriers: named barrier 1; Zeros.tickets counts the blocks of a head.
#include "../online_softmax.cuh"
#include "flags.cuh"
#include "rows.cuh"

// Keys low <= key < end of one request, in aligned chunks of 16: a chunk lies in one block of the
// cache.
struct Keys {
  int head, split, splits, low, end, chunk, last;  // this warp's first chunk, the block's last
  int blocks;                                      // lane i: the cache block of this warp's chunk i
  const Where* where;
};
using Scales = Cache::Scales;
// Where one block of the cache has its keys.
struct InBlock {
  const Element* kv;
  long long stride;
  int mask;
  __device__ __forceinline__ const Element* operator()(int key) const {
    return kv + (key & mask) * stride;
  }
};
__device__ __forceinline__ void clear(ChunkOf<Bf16>& c) {
#pragma unroll
  for (int n = 0; n < 4; ++n) c.k[n >> 1][n & 1] = c.v[n] = make_int4(0, 0, 0, 0);
}
__device__ __forceinline__ void clear(ChunkOf<E4m3>& c) {
  c.k[0] = c.k[1] = make_int4(0, 0, 0, 0);
#pragma unroll
  for (int n = 0; n < 4; ++n) c.v[n] = make_uint2(0, 0);
}
__device__ __forceinline__ void load_keys(
    Chunk& c, const Block& b, const Layer& y, const Keys& k, int i) {
  const int base = (k.chunk + i * WARPS) * 16, block = __shfl_sync(~0u, k.blocks, i),
            mask = (1 << y.block_shift) - 1;
  if (base >= k.end) {
    clear(c);
    return;
  }
  const Element* kv = y.kv + k.head * y.kv_head + (long long)block * y.kv_block;
  load_chunk(c, base, k.end, b.g, b.j, InBlock{kv, y.kv_token, mask});
}
// 16 published elements of a key and 8 of a value as a chunk has them.
__device__ __forceinline__ void put_key(ChunkOf<Bf16>& c, int n, int4 low, int4 high) {
  c.k[n][0] = low;
  c.k[n][1] = high;
}
__device__ __forceinline__ void put_value(ChunkOf<Bf16>& c, int n, int4 v) { c.v[n] = v; }
__device__ __forceinline__ uint2 codes_of(int4 v) {
  return make_uint2(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420));
}
__device__ __forceinline__ void put_key(ChunkOf<E4m3>& c, int n, int4 low, int4 high) {
  const uint2 l = codes_of(low), h = codes_of(high);
  c.k[n] = make_int4(l.x, l.y, h.x, h.y);
}
__device__ __forceinline__ void put_value(ChunkOf<E4m3>& c, int n, int4 v) { c.v[n] = codes_of(v); }

// The key and value of this very step, which the cache may not hold yet.
__device__ __forceinline__ void load_fresh(
    Chunk& c, const Block& b, const Keys& k, int i, const Early& early) {
  const int base = (k.chunk + i * WARPS) * 16, fresh = k.where->keys - 1;
  if (base >= k.end || base + 16 <= fresh) return;
  int head = k.head;
  // or the loop over chunks keeps both addresses in registers, and others are spilled
  asm volatile("" : "+r"(head));
  const bf16 *key = early.fresh + head * 64 + b.j * 16,
             *value = early.fresh + (KVH + head) * 64 + b.g * 8;
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
    if (base + n * 8 + b.g >= fresh) put_key(c, n, low, high);
#pragma unroll
  for (int n = 0; n < 4; ++n)
    if (base + 2 * b.j + (n & 1) + (n >> 1) * 8 >= fresh) put_value(c, n, v);
}

// Prefetches a chunk into L2: memory would be idle during the wait for the queries.
__device__ __forceinline__ void prefetch_keys(
    const Block& b, const Layer& y, const Keys& k, int i) {
  const int base = (k.chunk + i * WARPS) * 16, block = __shfl_sync(~0u, k.blocks, i);
  if (base >= k.end) return;
  const int row = (base & ((1 << y.block_shift) - 1)) + (b.lane >> 1);  // 64 elements a lane
  const Element* at = y.kv + k.head * y.kv_head + (long long)block * y.kv_block + row * y.kv_token +
                      (b.lane & 1) * 64;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// Once a step: the request that the token is of, the first that has one, in each group of layers.
// One warp a group.
__device__ __forceinline__ void find_request(const Args& a, const Block& b) {
  if (b.warp >= a.group_count) return;
  const Group& group = a.groups[b.warp];
  const int requests = (int)group.requests;
  int request = 0;
  for (int r = 0; r < requests; r += 32)
    request +=
        __popc(__ballot_sync(~0u, r + b.lane < requests && group.query_start[r + b.lane + 1] == 0));
  Where w = {group.block_table, 0};
  if (request < requests) {
    w.table += group.table_stride * request;
    w.keys = group.seq_lens[request];
  }
  if (b.lane == 0) b.s->where[b.warp] = w;
}
// What this block attends to: one key/value head with its 8 query heads, one of `splits` shares of
// the keys.
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

// All of this warp's chunks, of which `now` is the first.
__device__ __forceinline__ void attend_keys(Running& r, const Args& a, const Block& b,
    const Layer& y, const Scales& scales, Keys& k, Chunk& now, const u32 (&q)[8],
    const Early& early) {
#pragma unroll 1
  for (int i = 0; k.chunk + i * WARPS < k.last;) {
    attend_chunk(r, now, q, (k.chunk + i * WARPS) * 16, k.low, k.end, b.j, scales.softmax(a.scale));
    if (++i == 32) {
      k.chunk += 32 * WARPS;
      k.blocks = find_blocks(k, b, y);
      i = 0;
    }
    if (k.chunk + i * WARPS >= k.last) break;
    load_keys(now, b, y, k, i);
    load_fresh(now, b, k, i, early);
    __syncwarp();
  }
  end_running(r);
}

// Adds the sums of the warp 8 further on.
__device__ __forceinline__ void add_running(
    Running& r, const float* from, const float* m, const float* l, int g, int j) {
  const float top = fmaxf(r.m, m[g]);
  const float mine = weight_of(r.m, top), its = weight_of(m[g], top);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    r.o[t][0] = r.o[t][0] * mine + from[g * O_ROW + 16 * j + t] * its;
    r.o[t][1] = r.o[t][1] * mine + from[g * O_ROW + 16 * j + 8 + t] * its;
  }
  r.l = r.l * mine + l[g] * its;
  r.m = top;
}
// The block that comes last adds up what the blocks of one head have written: [8, 66] sums, top,
// denominator.
__device__ __forceinline__ void merge_splits(
    const Args& a, Block& b, const Layer& y, const Scales& scales, const Keys& k, Early& early) {
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
    const float sink = to_float(y.sinks[k.head * 8 + h]) * LOG2_E;
    const float* from = a.attn + (k.head * SPLITS * 8 + h) * 66;
    float all = sink;
    for (int i = 0; i < k.splits; ++i) all = fmaxf(all, __ldcg(from + i * 8 * 66 + 64));
    float value = 0.f, total = exp2f(sink - all);
    for (int i = 0; i < k.splits; ++i) {
      const float f = exp2f(__ldcg(from + i * 8 * 66 + 64) - all);
      value += f * __ldcg(from + i * 8 * 66 + d);
      total += f * __ldcg(from + i * 8 * 66 + 65);
    }
    __stcg(early.attended + k.head * 512 + e, flagged(scales.out(value / total)));
  }
}

// One warp adds up a query head, 2 of its 64 columns a lane: the output, or what `merge_splits`
// takes.
__device__ __forceinline__ void finish_head(const Args& a, const Block& b, const Scales& scales,
    const Keys& k, const float* sums, float sink, Early& early) {
  const float *m = sums + 8 * A_WARP, *l = m + 64;
  const int h = b.warp, from = b.lane & 7;
  const float its = m[from * 8 + h];
  float top = its;
#pragma unroll
  for (int d = 4; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  const float factor = weight_of(its, top);
  float den = factor * l[from * 8 + h];
#pragma unroll
  for (int d = 4; d; d >>= 1) den += __shfl_xor_sync(~0u, den, d);
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float f = __shfl_sync(~0u, factor, i);
    const float2 v = *(const float2*)(sums + i * A_WARP + h * O_ROW + 2 * b.lane);
    sum.x += f * v.x;
    sum.y += f * v.y;
  }
  if (k.splits > 1) {
    float* to = a.attn + ((k.head * SPLITS + k.split) * 8 + h) * 66;
    __stcg((float2*)(to + 2 * b.lane), sum);
    if (b.lane == 0) __stcg((float2*)(to + 64), make_float2(top, den));
  } else {
    const float all = fmaxf(top, sink), f = weight_of(top, all),
                whole = den * f + exp2f(sink - all);
    const u32 low = flagged(scales.out(sum.x * f / whole)),
              high = flagged(scales.out(sum.y * f / whole));
    __stcg((u32*)(early.attended + (k.head * 8 + h) * 64) + b.lane, low | high << 16);
  }
}

__device__ __forceinline__ void attend(const Args& a, Block& b, const Layer& y, int layer) {
  Keys k;
  Early& early = zeros(a).early[layer & 1];
  const bool mine = find_keys(k, b, y);
  mark(a, b, layer, 3);
  if (mine) {
    const float sink = to_float(y.sinks[k.head * 8 + (b.warp & 7)]) * LOG2_E;
    const Scales scales(a.scales[layer]);
    Chunk now;
    k.blocks = b.blocks;
    load_keys(now, b, y, k, 0);
    if (k.splits > 1) prefetch_keys(b, y, k, 1);
    u32 q[8];
    {
      const bf16* p = early.q + (k.head * 8 + b.g) * 64 + b.j * 16;
      int4 v = look16(p), w = look16(p + 8);
      load_fresh(now, b, k, 0, early);
      v = settle(v, p);
      w = settle(w, p + 8);
      words(q, v, w);
    }
    __syncwarp();
    mark(a, b, layer, 12);
    Running r;
    begin_running(r);
    const bool wide = k.last - (k.chunk - b.warp) > 8;  // warps 8 to 14 have keys
    attend_keys(r, a, b, y, scales, k, now, q, early);
    mark(a, b, layer, 13);
    float *sums = (float*)b.xs, *m = sums + 8 * A_WARP, *l = m + 64;
    const int w = b.warp & 7;
    if (wide) {
      if (b.warp >= 8)
        put_running(r, (float (*)[O_ROW])(sums + w * A_WARP), m + w * 8, l + w * 8, b.g, b.j);
      sync_consumers();
      if (b.warp < WARPS - 8) add_running(r, sums + w * A_WARP, m + w * 8, l + w * 8, b.g, b.j);
      __syncwarp();  // one lane of four writes the maximum that all four have read
    }
    if (b.warp < 8)
      put_running(r, (float (*)[O_ROW])(sums + w * A_WARP), m + w * 8, l + w * 8, b.g, b.j);
    sync_consumers();
    if (b.warp < 8) finish_head(a, b, scales, k, sums, sink, early);
    if (k.splits > 1) merge_splits(a, b, y, scales, k, early);
    sync_consumers();  // the scratch is free
  }
  mark(a, b, layer, 4);
}
