// Attention with sinks over a paged cache (cache.cuh) for a decode step (sm_90): one launch, no
// combine kernel.
//
// Clusters of SPLITS CTAs. A cluster takes one token, one key/value head with its 8 query heads,
// and all its keys or a run of them, a piece. CTAs take equal parts of it, their warps chunks of 16
// keys in turn (online_softmax.cuh). Warps merge in shared memory, CTAs of the cluster through
// distributed shared memory.
//
// A token of long context is several pieces. Which tokens are cut is decided on the GPU, from the
// lengths of the step, so a captured graph serves any. A share is all keys of a head over `shares`,
// at least `least`; a token of n shares becomes n pieces, rounded. The first `tokens * heads`
// clusters take each token's first piece, the others the further ones, or end at once. CTAs of a
// piece leave the sums of their outputs in global memory. The last to arrive adds them in the order
// of the keys, so repeats are equal to the bit.
//
// Keys of earlier steps, block table and lengths do not depend on the kernel before, so the first
// chunk is loaded before griddepcontrol.wait; only chunks with keys that this very step writes are
// loaded again after it.
//
// Macros: SPLITS (cluster size), WARPS, WINDOW (keys a token sees, itself included; 0: all. With a
// window there are no pieces), CACHE.
#include "barriers.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "online_softmax.cuh"

// The values of the macros; nothing else reads them.
struct Traits {
  static constexpr int splits = SPLITS, warps = WARPS, window = WINDOW;
  static constexpr int threads = warps * 32;
  // Outputs that a CTA writes, consecutive from split * outs.
  static constexpr int outs = GROUP * HEAD / splits;
  static constexpr int outs_each = (outs + threads - 1) / threads;
};
#if SPLITS > 1
#define CLUSTERED __cluster_dims__(SPLITS, 1, 1)
#else
#define CLUSTERED
#endif
constexpr int PART = GROUP * HEAD + 2 * GROUP;  // floats of a piece: sums, maxima, denominators

struct Args {
  const bf16* q;           // [T, q_stride], H heads of 64
  const Element* kv;       // paged cache; K at 0, V at 64 of each (block, head, token)
  bf16* out;               // [T, out_stride]
  const bf16* sinks;       // [H]
  const int* block_table;  // [requests, table_stride]
  const int* seq_lens;     // [requests] keys of each request, this step's included
  const int* query_start;  // [requests + 1]
  float* parts;            // [2 * shares * kv_heads, PART]
  int* arrived;  // [T * kv_heads * SPLITS] CTAs that have left their sums, zero between launches
  long long kv_block, kv_head, kv_token;  // strides in elements
  int tokens, kv_heads, requests, table_stride, block_shift, q_stride, out_stride;
  int shares;                      // of a head's keys at most
  int least;                       // keys of a share at least
  float scale;                     // softmax scale times log2(e)
  const float *k_scale, *v_scale;  // E4m3: of the cache
};
using Scales = Cache::Scales;

// The keys of one CTA.
struct Share {
  int split, head, token;
  int piece, pieces;  // of the token
  int first;          // of its further pieces in the list of all tokens'
  int begin, end;     // keys of the CTA, whole chunks
  int fresh;          // the first key that this step writes
  const int* table;   // of the request's cache blocks
};
struct Request {
  int index, start, queries, keys;  // start: its first token
  int pieces;                       // of each of its tokens
  int first;                        // further pieces of the requests before it
};
// The request that lane `by` has, of 32 that begin at `from`.
__device__ __forceinline__ Request take_from(const Request& r, int by, int from) {
  return {from + by, __shfl_sync(~0u, r.start, by), __shfl_sync(~0u, r.queries, by),
      __shfl_sync(~0u, r.keys, by), 1, 0};
}
// One request a lane.
__device__ __forceinline__ Request look_up(const Args& a, int index) {
  const int r = min(index, a.requests - 1), start = a.query_start[r];
  return {index, start, index < a.requests ? a.query_start[r + 1] - start : 0, a.seq_lens[r], 1, 0};
}
// The request of the token (`further` < 0), or of number `further` in the list of all tokens'
// further pieces; into how many pieces its tokens are cut. False: the list is shorter. By all
// lanes.
__device__ __forceinline__ bool find_cut(
    Request& to, const Args& a, int share, int token, int further, int lane) {
  for (int from = 0, before = 0; from < a.requests; from += 32) {
    const Request r = look_up(a, from + lane);
    const int pieces = max(1, (2 * r.keys + share) / (2 * share)), more = r.queries * (pieces - 1);
    int upto = more;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int other = __shfl_up_sync(~0u, upto, d);
      if (lane >= d) upto += other;
    }
    const int at = before + upto - more;
    const bool is_it = further < 0 ? token >= r.start && token - r.start < r.queries
                                   : further >= at && further - at < more;
    const u32 found = __ballot_sync(~0u, is_it);
    if (found) {
      const int by = __ffs(found) - 1;
      to = take_from(r, by, from);
      to.pieces = __shfl_sync(~0u, pieces, by);
      to.first = __shfl_sync(~0u, at, by);
      return true;
    }
    before += __shfl_sync(~0u, upto, 31);
  }
  return further < 0;
}
// What the cluster attends to, found by each warp. False: nothing.
template <class T> __device__ __forceinline__ bool find_keys(Share& s, const Args& a, int lane) {
  const int cluster = blockIdx.x / T::splits, further = cluster - a.tokens * a.kv_heads;
  const int index = further < 0 ? cluster : further;
  const int head = index % a.kv_heads, number = index / a.kv_heads;
  s = {(int)blockIdx.x % T::splits, head, number, 0, 1, 0, 0, 0, 0, nullptr};
  Request mine = {a.requests, s.token, 1, 0, 1, 0};  // padding: no key
  int all = 0, longest = 0;
  for (int from = 0; from < a.requests; from += 32) {
    const Request r = look_up(a, from + lane);
    all += r.queries * r.keys;
    longest = max(longest, r.queries ? r.keys : 0);
    const u32 found = __ballot_sync(~0u, s.token >= r.start && s.token - r.start < r.queries);
    if (found) mine = take_from(r, __ffs(found) - 1, from);
  }
  if constexpr (T::window == 0) {
    all = max(__reduce_add_sync(~0u, all), a.least * a.shares);
    const bool is_cut = 2ll * __reduce_max_sync(~0u, longest) * a.shares >= 3ll * all;
    if (!is_cut && further >= 0) return false;
    if (is_cut) {
      const int share = (all + a.shares - 1) / a.shares;
      if (!find_cut(mine, a, share, s.token, further < 0 ? -1 : s.token, lane)) return false;
      const int each = max(1, mine.pieces - 1);
      if (further < 0) {
        s.first = mine.first + (s.token - mine.start) * (mine.pieces - 1);
      } else {
        const int of_request = s.token - mine.first;
        s.first = s.token - of_request % each;
        s.piece = 1 + of_request % each;
        s.token = mine.start + of_request / each;
      }
      s.pieces = mine.pieces;
    }
  }
  const int keys = max(0, mine.keys - (mine.start + mine.queries - 1 - s.token));
  const int low = T::window > 0 ? max(0, keys - T::window) : 0;
  const int chunks = (keys - low + CHUNK_KEYS - 1) / CHUNK_KEYS;
  const int at = s.piece * T::splits + s.split;
  const auto edge = [&](int n) {
    // a whole token without a division by a variable
    n = s.pieces == 1 ? chunks * n / T::splits : chunks * n / (T::splits * s.pieces);
    return low + n * CHUNK_KEYS;
  };
  s.begin = edge(at);
  s.end = min(keys, edge(at + 1));
  s.fresh = mine.keys - mine.queries;
  s.table = a.block_table + (long long)min(mine.index, a.requests - 1) * a.table_stride;
  return true;
}

// In shared memory: sums of every warp, and of the CTA for the cluster.
template <class T> struct Sums {
  float (&part_o)[T::warps][GROUP][O_ROW];
  float (&part_m)[T::warps][GROUP], (&part_l)[T::warps][GROUP];
  float (&cta_o)[GROUP][HEAD];
  float (&cta_m)[GROUP], (&cta_l)[GROUP];
};

// Address of a key of the request in the cache. A chunk of keys may span two blocks.
struct InBlocks {
  const Args& a;
  const Element* kv;
  const int* table;
  __device__ __forceinline__ const Element* operator()(int i) const {
    return kv + (long long)table[i >> a.block_shift] * a.kv_block +
           (i & ((1 << a.block_shift) - 1)) * a.kv_token;
  }
};
// Where one block has its keys.
struct InBlock {
  const Element* kv;
  int stride, mask;  // elements from one key to the next; keys of a block, less one
  __device__ __forceinline__ const Element* operator()(int i) const {
    return kv + (long long)(i & mask) * stride;
  }
};
// One warp's chunks, in order.
template <class T> struct Chunks {
  const Args& a;
  const Share& s;
  int warp, lane;
  const Element* kv;  // the head's part of a block
  int blocks;         // lane i: the cache block of chunk i of the 32 now in reach

  __device__ __forceinline__ int base(int i) const {
    return s.begin + (i * T::warps + warp) * CHUNK_KEYS;
  }
  // Chunk i: loaded in order, by all lanes.
  __device__ __forceinline__ void load(Chunk& c, int i) {
    const int g = lane >> 2, j = lane & 3;
    if constexpr (T::window > 0) {
      load_chunk(c, base(i), s.end, g, j, InBlocks{a, kv, s.table});
    } else {
      if (i % 32 == 0)
        blocks = base(i + lane) < s.end ? s.table[base(i + lane) >> a.block_shift] : 0;
      const Element* block = kv + (long long)__shfl_sync(~0u, blocks, i % 32) * a.kv_block;
      load_chunk(
          c, base(i), s.end, g, j, InBlock{block, (int)a.kv_token, (1 << a.block_shift) - 1});
    }
  }
};

// One warp's chunks. The load of the first chunk starts before the preceding kernel has ended. It
// is repeated if the preceding kernel writes that chunk.
template <class T>
__device__ __forceinline__ void attend_share(
    Bf16, Running& r, const Args& a, const Scales& scales, const Share& s, int warp, int lane) {
  const int g = lane >> 2, j = lane & 3;
  Chunks<T> chunks = {a, s, warp, lane, a.kv + s.head * a.kv_head, 0};
  Chunk now;
  const int first = chunks.base(0);
  if (first < s.end) chunks.load(now, 0);
  pdl_wait();
  if (first < s.end && first + CHUNK_KEYS > s.fresh) chunks.load(now, 0);
  u32 q[8];
  load16(q, a.q + (long long)s.token * a.q_stride + (s.head * GROUP + g) * HEAD + j * 16);
  begin_running(r);
  for (int i = 0; chunks.base(i) < s.end; ++i) {
    attend_chunk(r, now, q, chunks.base(i), ALL_BELOW, s.end, j, scales.softmax(a.scale));
    if (chunks.base(i + 1) < s.end) chunks.load(now, i + 1);
  }
  end_running(r);
}
// The same with two chunks of codes, which are as many bytes on their way as one of bf16.
template <class T>
__device__ __forceinline__ void attend_share(
    E4m3, Running& r, const Args& a, const Scales& scales, const Share& s, int warp, int lane) {
  const int g = lane >> 2, j = lane & 3;
  Chunks<T> chunks = {a, s, warp, lane, a.kv + s.head * a.kv_head, 0};
  Chunk now[2];
#pragma unroll
  for (int d = 0; d < 2; ++d)
    if (chunks.base(d) < s.end) chunks.load(now[d], d);
  pdl_wait();
#pragma unroll
  for (int d = 0; d < 2; ++d)
    if (chunks.base(d) < s.end && chunks.base(d) + CHUNK_KEYS > s.fresh) chunks.load(now[d], d);
  u32 q[8];
  load16(q, a.q + (long long)s.token * a.q_stride + (s.head * GROUP + g) * HEAD + j * 16);
  begin_running(r);
  for (int i = 0; chunks.base(i) < s.end; i += 2)
#pragma unroll
    for (int d = 0; d < 2; ++d) {
      if (chunks.base(i + d) >= s.end) break;
      attend_chunk(r, now[d], q, chunks.base(i + d), ALL_BELOW, s.end, j, scales.softmax(a.scale));
      if (chunks.base(i + d + 2) < s.end) chunks.load(now[d], i + d + 2);
    }
  end_running(r);
}

// Output e of the token from its sum, and the maximum and denominator that it is of.
__device__ __forceinline__ void finish(const Args& a, const Scales& scales, const Share& s, int e,
    float sum, float top, float den, float sink) {
  const float all = fmaxf(top, sink), f = weight_of(top, all);
  a.out[(long long)s.token * a.out_stride + s.head * GROUP * HEAD + e] =
      to_bf16(scales.out(sum * f / (den * f + exp2f(sink - all))));
}
// Where piece i of the token leaves its sums.
__device__ __forceinline__ float* part_of(const Args& a, const Share& s, int i) {
  const int at = i ? s.first + i - 1 : a.shares + s.first;
  return a.parts + ((long long)at * a.kv_heads + s.head) * PART;
}

// The CTA's sums from its warps': the output, or what the cluster merges.
template <class T>
__device__ __forceinline__ void merge_warps(const Args& a, const Scales& scales, const Share& s,
    const Sums<T>& sums, const float (&sink)[T::outs_each], int tid) {
#pragma unroll
  for (int i = 0; i < (GROUP * HEAD + T::threads - 1) / T::threads; ++i) {
    const int e = i * T::threads + tid, h = e / HEAD, d = e % HEAD;
    float top = NEG;
#pragma unroll
    for (int w = 0; w < T::warps; ++w) top = fmaxf(top, sums.part_m[w][h]);
    float sum = 0.f, den = 0.f;
#pragma unroll
    for (int w = 0; w < T::warps; ++w) {
      const float f = weight_of(sums.part_m[w][h], top);
      sum += f * sums.part_o[w][h][d];
      den += f * sums.part_l[w][h];
    }
    if constexpr (T::splits > 1) {
      sums.cta_o[h][d] = sum;
      if (d == 0) {
        sums.cta_m[h] = top;
        sums.cta_l[h] = den;
      }
    } else {
      finish(a, scales, s, e, sum, top, den, sink[i]);
    }
  }
}

// This CTA's share of the outputs from the sums of all CTAs of the cluster.
template <class T>
__device__ __forceinline__ void merge_cluster(const Args& a, const Scales& scales, const Share& s,
    const Sums<T>& sums, const float (&sink)[T::outs_each], int tid) {
  cluster_sync();
  const u32 o_addr = smem_u32(&sums.cta_o[0][0]), m_addr = smem_u32(sums.cta_m),
            l_addr = smem_u32(sums.cta_l);
#pragma unroll
  for (int i = 0; i < T::outs_each; ++i) {
    const int e = s.split * T::outs + i * T::threads + tid, h = e / HEAD;
    if (e >= (s.split + 1) * T::outs) break;
    float ms[T::splits], ls[T::splits], os[T::splits];
#pragma unroll
    for (int c = 0; c < T::splits; ++c) {
      ms[c] = load_cluster(m_addr + h * 4, c);
      ls[c] = load_cluster(l_addr + h * 4, c);
      os[c] = load_cluster(o_addr + e * 4, c);
    }
    const bool is_whole = s.pieces == 1;
    float top = is_whole ? sink[i] : NEG;
#pragma unroll
    for (int c = 0; c < T::splits; ++c) top = fmaxf(top, ms[c]);
    float sum = 0.f, den = is_whole ? exp2f(sink[i] - top) : 0.f;
#pragma unroll
    for (int c = 0; c < T::splits; ++c) {
      const float f = weight_of(ms[c], top);
      sum += f * os[c];
      den += f * ls[c];
    }
    if (is_whole) {
      a.out[(long long)s.token * a.out_stride + s.head * GROUP * HEAD + e] =
          to_bf16(scales.out(sum / den));
    } else {
      float* to = part_of(a, s, s.piece);
      to[e] = sum;
      if (e % HEAD == 0) {
        to[GROUP * HEAD + h] = top;
        to[GROUP * HEAD + GROUP + h] = den;
      }
    }
  }
  cluster_leave();
}

// This CTA's share of the outputs from the sums of all pieces, in the CTA that is the last to have
// left its own. Threads share the pieces of an output.
template <class T>
__device__ __forceinline__ void merge_pieces(const Args& a, const Scales& scales, const Share& s,
    const Sums<T>& sums, const float (&sink)[T::outs_each], bool& is_last, int tid) {
  static_assert(T::threads % T::outs == 0 && T::outs % 32 == 0, "a warp's outputs are one head's");
  constexpr int SHARES = T::threads / T::outs, AHEAD = 8;
  __syncthreads();
  if (tid == 0) {
    int* count = a.arrived + (s.token * a.kv_heads + s.head) * T::splits + s.split;
    __threadfence();
    is_last = atomicAdd(count, 1) == s.pieces - 1;
    if (is_last) *count = 0;
    __threadfence();
  }
  __syncthreads();
  if (!is_last) return;
  const int mine = tid % T::outs, e = s.split * T::outs + mine, h = e / HEAD;
  const auto load = [&](int i, int what) {
    return __ldcg(part_of(a, s, min(i, s.pieces - 1)) + what);
  };
  float top = NEG;
  for (int i = tid & 31; i < s.pieces; i += 32) top = fmaxf(top, load(i, GROUP * HEAD + h));
#pragma unroll
  for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  float sum = 0.f, den = 0.f;
  for (int from = tid / T::outs; from < s.pieces; from += AHEAD * SHARES) {
    float m[AHEAD], l[AHEAD], o[AHEAD];
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
      m[n] = load(from + n * SHARES, GROUP * HEAD + h);
      l[n] = load(from + n * SHARES, GROUP * HEAD + GROUP + h);
      o[n] = load(from + n * SHARES, e);
    }
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
      const float f = from + n * SHARES < s.pieces ? weight_of(m[n], top) : 0.f;
      sum += f * o[n];
      den += f * l[n];
    }
  }
  float2* shares = (float2*)&sums.part_o[0][0][0];  // read by all before
  shares[tid] = make_float2(sum, den);
  __syncthreads();
  if (tid >= T::outs) return;
#pragma unroll
  for (int i = 1; i < SHARES; ++i) {
    sum += shares[tid + i * T::outs].x;
    den += shares[tid + i * T::outs].y;
  }
  finish(a, scales, s, e, sum, top, den, sink[0]);
}

extern "C" __global__ void CLUSTERED __launch_bounds__(Traits::threads)
    attention_few(const __grid_constant__ Args a) {
  using T = Traits;
  __shared__ float part_o[T::warps][GROUP][O_ROW];
  __shared__ float part_m[T::warps][GROUP], part_l[T::warps][GROUP];
  __shared__ float cta_o[GROUP][HEAD];
  __shared__ float cta_m[GROUP], cta_l[GROUP];
  const Sums<T> sums = {part_o, part_m, part_l, cta_o, cta_m, cta_l};
  __shared__ bool is_last;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  pdl_launch();
  Share s;
  if (!find_keys<T>(s, a, lane)) return;
  float sink[T::outs_each];
#pragma unroll
  for (int i = 0; i < T::outs_each; ++i) {
    const int e = min(s.split * T::outs + i * T::threads + tid, GROUP * HEAD - 1);
    sink[i] = to_float(a.sinks[s.head * GROUP + e / HEAD]) * LOG2_E;
  }
  const Scales scales(a);
  Running r;
  attend_share<T>(Cache{}, r, a, scales, s, warp, lane);
  put_running(r, part_o[warp], part_m[warp], part_l[warp], lane >> 2, lane & 3);
  __syncthreads();
  merge_warps<T>(a, scales, s, sums, sink, tid);
  if constexpr (T::splits > 1) merge_cluster<T>(a, scales, s, sums, sink, tid);
  if constexpr (T::window == 0)
    if (s.pieces > 1) merge_pieces<T>(a, scales, s, sums, sink, is_last, tid);
}
