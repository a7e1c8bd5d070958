// Attention with sinks over a paged bf16 cache for a decode step (sm_90): one launch, no combine
// kernel.
//
// Grid tokens * key/value heads * SPLITS, clusters of SPLITS. A CTA takes one token, one key/value
// head with its 8 query heads, and one contiguous share of the keys; its warps take chunks of 16
// keys in turn (online_softmax.cuh). Warps merge in shared memory, CTAs of the cluster through
// distributed shared memory.
//
// Keys of earlier steps, block table and lengths do not depend on the kernel before, so the first
// chunk is loaded before griddepcontrol.wait; only chunks with keys that this very step writes are
// loaded again after it.
//
// Macros: SPLITS (cluster size), WARPS, WINDOW (keys a token sees, itself included; 0: all).
#include "barriers.cuh"
#include "cluster.cuh"
#include "common.cuh"
#include "online_softmax.cuh"

// What the macros say; nothing else reads them.
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

struct Args {
  const bf16* q;           // [T, q_stride], H heads of 64
  const bf16* kv;          // paged cache; K at 0, V at 64 of each (block, head, token)
  bf16* out;               // [T, out_stride]
  const bf16* sinks;       // [H]
  const int* block_table;  // [requests, table_stride]
  const int* seq_lens;     // [requests] keys of each request, this step's included
  const int* query_start;  // [requests + 1]
  long long kv_block, kv_head, kv_token;  // strides in elements
  int kv_heads, requests, table_stride, block_shift, q_stride, out_stride;
  float scale;  // softmax scale times log2(e)
};

// The keys of one CTA.
struct Share {
  int split, head, token;
  int begin, end;    // keys
  int fresh;         // the first key that this step writes
  const int* table;  // of the request's cache blocks
  const bf16* kv;    // the head's part of a block
};
template <class T> __device__ __forceinline__ void find_keys(Share& s, const Args& a, int lane) {
  int request = 0;
  for (int r = 0; r < a.requests; r += 32)
    request +=
        __popc(__ballot_sync(~0u, r + lane < a.requests && a.query_start[r + lane + 1] <= s.token));
  int keys = 0, fresh = 0;
  if (request < a.requests) {
    const int len = a.seq_lens[request];
    const int after = a.query_start[request + 1] - 1 - s.token;
    keys = len - after;
    fresh = len - (a.query_start[request + 1] - a.query_start[request]);
    if (keys < 0) keys = 0;
  }
  const int low = T::window > 0 ? max(0, keys - T::window) : 0;
  const int each =
      (((keys - low + T::splits - 1) / T::splits) + CHUNK_KEYS - 1) / CHUNK_KEYS * CHUNK_KEYS;
  s.begin = low + s.split * each;
  s.end = min(keys, s.begin + each);
  s.table = a.block_table + (long long)min(request, a.requests - 1) * a.table_stride;
  s.kv = a.kv + s.head * a.kv_head;
  s.fresh = fresh;
}

// In shared memory: sums of every warp, and of the CTA for the cluster.
template <class T> struct Sums {
  float (&part_o)[T::warps][GROUP][O_ROW];
  float (&part_m)[T::warps][GROUP], (&part_l)[T::warps][GROUP];
  float (&cta_o)[GROUP][HEAD];
  float (&cta_m)[GROUP], (&cta_l)[GROUP];
};

// Where the cache has a key of the request.
struct Key {
  const Args& a;
  const bf16* kv;
  const int* table;
  __device__ __forceinline__ const bf16* operator()(int i) const {
    return kv + (long long)table[i >> a.block_shift] * a.kv_block +
           (i & ((1 << a.block_shift) - 1)) * a.kv_token;
  }
};

// One warp's chunks. The first is asked for before the kernel before has ended, and again where
// that one writes it.
template <class T>
__device__ __forceinline__ void attend_share(
    Running& r, const Args& a, const Share& s, int warp, int g, int j) {
  const Key key = {a, s.kv, s.table};
  Chunk now;
  int base = s.begin + warp * CHUNK_KEYS;
  if (base < s.end) load_chunk(now, base, s.end, g, j, key);
  pdl_wait();
  if (base < s.end && base + CHUNK_KEYS > s.fresh) load_chunk(now, base, s.end, g, j, key);
  u32 q[8];
  load16(q, a.q + (long long)s.token * a.q_stride + (s.head * GROUP + g) * HEAD + j * 16);
  begin_running(r);
  for (; base < s.end; base += T::warps * CHUNK_KEYS) {
    const int following = base + T::warps * CHUNK_KEYS;
    attend_chunk(r, now, q, base, ALL_BELOW, s.end, j, a.scale);
    if (following < s.end) load_chunk(now, following, s.end, g, j, key);
  }
  end_running(r);
}

// The CTA's sums from its warps': the output, or what the cluster merges.
template <class T>
__device__ __forceinline__ void merge_warps(const Args& a, const Share& s, const Sums<T>& sums,
    const float (&sink)[T::outs_each], int tid) {
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
      const float all = fmaxf(top, sink[i]);
      const float f = weight_of(top, all);
      a.out[(long long)s.token * a.out_stride + (s.head * GROUP + h) * HEAD + d] =
          to_bf16(sum * f / (den * f + exp2f(sink[i] - all)));
    }
  }
}

// This CTA's share of the outputs from the sums of all CTAs of the cluster.
template <class T>
__device__ __forceinline__ void merge_cluster(const Args& a, const Share& s, const Sums<T>& sums,
    const float (&sink)[T::outs_each], int tid) {
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
    float top = sink[i];
#pragma unroll
    for (int c = 0; c < T::splits; ++c) top = fmaxf(top, ms[c]);
    float sum = 0.f, den = exp2f(sink[i] - top);
#pragma unroll
    for (int c = 0; c < T::splits; ++c) {
      const float f = weight_of(ms[c], top);
      sum += f * os[c];
      den += f * ls[c];
    }
    a.out[(long long)s.token * a.out_stride + s.head * GROUP * HEAD + e] = to_bf16(sum / den);
  }
  cluster_leave();
}

extern "C" __global__ void CLUSTERED __launch_bounds__(Traits::threads)
    attention_few(const __grid_constant__ Args a) {
  using T = Traits;
  __shared__ float part_o[T::warps][GROUP][O_ROW];
  __shared__ float part_m[T::warps][GROUP], part_l[T::warps][GROUP];
  __shared__ float cta_o[GROUP][HEAD];
  __shared__ float cta_m[GROUP], cta_l[GROUP];
  const Sums<T> sums = {part_o, part_m, part_l, cta_o, cta_m, cta_l};
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, j = lane & 3;
  Share s;
  s.split = blockIdx.x % T::splits;
  s.head = blockIdx.x / T::splits % a.kv_heads;
  s.token = blockIdx.x / T::splits / a.kv_heads;
  pdl_launch();
  find_keys<T>(s, a, lane);
  float sink[T::outs_each];
#pragma unroll
  for (int i = 0; i < T::outs_each; ++i) {
    const int e = min(s.split * T::outs + i * T::threads + tid, GROUP * HEAD - 1);
    sink[i] = to_float(a.sinks[s.head * GROUP + e / HEAD]) * LOG2_E;
  }
  Running r;
  attend_share<T>(r, a, s, warp, g, j);
  put_running(r, part_o[warp], part_m[warp], part_l[warp], g, j);
  __syncthreads();
  merge_warps<T>(a, s, sums, sink, tid);
  if constexpr (T::splits > 1) merge_cluster<T>(a, s, sums, sink, tid);
}
