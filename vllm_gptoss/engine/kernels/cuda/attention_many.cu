// Attention with sinks over a paged cache (cache.cuh) for a decode step of many tokens (sm_80 on):
// one launch, no schedule made before it, no combine kernel.
//
// A piece is one token, one key/value head with its 8 query heads, and a run of keys. A CTA takes
// one piece. Its warps take chunks of 16 keys in turn, each through its own ring in shared memory
// (cp.async), and merge in shared memory.
//
// Which tokens are split is decided on the GPU, from the lengths of the step, so a captured graph
// serves any. Lengths are measured in shares: all keys over the CTAs that are resident at once. A
// token of n shares becomes n pieces, one of less than two stays whole. The first `tokens * heads`
// CTAs take everybody's first piece, the `slots` after them the others, which are never more.
//
// Pieces of a split token leave their sums in global memory. The last to arrive adds them, in the
// order of the keys, so repeats are equal to the bit.
//
// Macros: WARPS, DEPTH (chunks of a warp's ring), BLOCKS (CTAs a multiprocessor), WINDOW (keys a
// token sees, itself included; 0: all. With a window nothing is split), CACHE.
#include "barriers.cuh"
#include "common.cuh"
#include "cp_async.cuh"
#include "mma.cuh"
#include "online_softmax.cuh"
#include "tiled.cuh"

// The values of the macros; nothing else reads them.
struct Traits {
  static constexpr int warps = WARPS, depth = DEPTH, blocks = BLOCKS, window = WINDOW;
  static constexpr int threads = warps * 32;
  // Outputs that a thread writes, neighbours.
  static constexpr int outs = GROUP * HEAD / threads;
};
static_assert(Traits::outs % 4 == 0, "outputs in fours");

constexpr int ROW_BYTES = 2 * HEAD * sizeof(Element);  // a token's keys and values of one head
constexpr int CHUNK_BYTES = CHUNK_KEYS * ROW_BYTES;
constexpr int PART = GROUP * HEAD + 2 * GROUP;  // floats of a piece: sums, maxima, denominators
constexpr int MOST_PIECES = 128;                // of a token: four for each lane of a warp

struct Args {
  const bf16* q;           // [T, q_stride], H heads of 64
  const Element* kv;       // paged cache; K at 0, V at 64 of each (block, head, token)
  bf16* out;               // [T, out_stride], or tiled, as product_many.cu wants it
  const bf16* sinks;       // [H]
  const int* block_table;  // [requests, table_stride]
  const int* seq_lens;     // [requests] keys of each request, this step's included
  const int* query_start;  // [requests + 1]
  float* parts;            // [2 * slots, PART]
  int* arrived;            // [T * kv_heads] pieces that have left their sums; zero between launches
  long long kv_block, kv_head, kv_token;  // strides in elements
  int tokens, kv_heads, requests, table_stride, block_shift, q_stride, out_stride;
  int slots;                       // resident CTAs, a multiple of kv_heads
  int least;                       // keys of a share at least
  int padded;                      // tokens of the tiled output, tiled.cuh; 0: it is not
  float scale;                     // softmax scale times log2(e)
  const float *k_scale, *v_scale;  // E4m3: of the cache
};
using Scales = Cache::Scales;

struct Piece {
  int token, request, head;
  int piece, pieces;
  int first;       // of the token's pieces but the first, where they begin in the list of all those
  int low, begin;  // the first key, and it rounded down to a chunk
  int end;         // of keys
  int fresh;       // the first key that this step writes
};

__device__ __forceinline__ int tokens_of(const Args& a, int request) {
  return a.query_start[request + 1] - a.query_start[request];
}
__device__ __forceinline__ int pieces_of(int keys, int share) {
  return min(max(1, keys / share), MOST_PIECES);
}

// The sum over all threads of the CTA, and of those before this one. All take part.
template <class T> struct Scan {
  u32 before, all;
};
template <class T> __device__ __forceinline__ Scan<T> scan(u32 v, u32 (&sums)[T::warps], int tid) {
  const int warp = tid >> 5, lane = tid & 31;
  u32 upto = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const u32 other = __shfl_up_sync(~0u, upto, d);
    if (lane >= d) upto += other;
  }
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  Scan<T> s = {upto - v, 0};
#pragma unroll
  for (int w = 0; w < T::warps; ++w) {
    if (w < warp) s.before += sums[w];
    s.all += sums[w];
  }
  return s;
}

// Keys of a share: of all CTAs that are resident at once, those of one head share the keys.
template <class T>
__device__ __forceinline__ int keys_of_share(const Args& a, u32 (&sums)[T::warps], int tid) {
  u32 keys = 0;
  for (int r = tid; r < a.requests; r += T::threads) keys += a.seq_lens[r] * tokens_of(a, r);
  const u32 sum = __reduce_add_sync(~0u, keys);
  if ((tid & 31) == 0) sums[tid >> 5] = sum;
  __syncthreads();
  u32 all = 0;
#pragma unroll
  for (int w = 0; w < T::warps; ++w) all += sums[w];
  const u32 ctas = a.slots / a.kv_heads;
  return max((int)((all + ctas - 1) / ctas), a.least);
}

// The request that has the token, by all threads; `requests` for padding.
template <class T> __device__ __forceinline__ int request_of(const Args& a, int token, int tid) {
  // one token a request, as decode has it
  if (token < a.requests && a.query_start[token] == token && a.query_start[token + 1] > token)
    return token;
  int request = 0;
  for (int r = 0; r < a.requests; r += T::threads)
    request += __syncthreads_count(r + tid < a.requests && a.query_start[r + tid + 1] <= token);
  return request;
}

struct Found {
  int request, first;
};
// The list has all pieces except the first of each token. `request` >= 0: the index at which the
// request's pieces begin. `request` < 0: the request of piece `wanted`, and that index. Returns
// false if the list is shorter. Called by all threads.
template <class T>
__device__ __forceinline__ bool find_extra(Found& to, const Args& a, int share, int request,
    int wanted, u32 (&sums)[T::warps], Found& told, int tid) {
  const int each = (a.requests + T::threads - 1) / T::threads, from = tid * each;
  u32 count = 0;
  for (int r = from; r < min(from + each, a.requests); ++r)
    count += tokens_of(a, r) * (pieces_of(a.seq_lens[r], share) - 1);
  const Scan<T> s = scan<T>(count, sums, tid);
  if (request < 0 && wanted >= s.all) return false;
  int at = s.before;
  for (int r = from; r < min(from + each, a.requests); ++r) {
    const int next = at + tokens_of(a, r) * (pieces_of(a.seq_lens[r], share) - 1);
    if (request < 0 ? at <= wanted && wanted < next : r == request) told = {r, at};
    at = next;
  }
  __syncthreads();
  to = told;
  return true;
}

// The keys of the piece, once its token, request and number are known. Pieces are whole chunks.
template <class T> __device__ __forceinline__ void find_keys(Piece& p, const Args& a) {
  int keys = 0;
  p.fresh = 0;
  if (p.request < a.requests) {
    const int len = a.seq_lens[p.request], after = a.query_start[p.request + 1] - 1 - p.token;
    keys = max(0, len - after);
    p.fresh = len - tokens_of(a, p.request);
  }
  const int chunks = (keys + CHUNK_KEYS - 1) / CHUNK_KEYS;
  p.begin = p.low = chunks * p.piece / p.pieces * CHUNK_KEYS;
  p.end = min(keys, chunks * (p.piece + 1) / p.pieces * CHUNK_KEYS);
  if constexpr (T::window > 0) {
    p.low = max(0, keys - T::window);
    p.begin = p.low / CHUNK_KEYS * CHUNK_KEYS;
  }
}

// The first piece of a token, as if it were whole. By all threads.
template <class T> __device__ __forceinline__ void find_first(Piece& p, const Args& a, int tid) {
  p.head = blockIdx.x % a.kv_heads;
  p.token = blockIdx.x / a.kv_heads;
  p.request = request_of<T>(a, p.token, tid);
  p.piece = p.first = 0;
  p.pieces = 1;
  find_keys<T>(p, a);
}

// Into how many pieces the lengths split the token of a first piece; which piece a CTA without one
// has. False: none. By all threads.
template <class T> struct Told {
  u32 (&sums)[2][T::warps];
  Found& found;
};
template <class T>
__device__ __forceinline__ bool split(
    Piece& p, const Args& a, bool is_first, const Told<T>& t, int tid) {
  const int share = keys_of_share<T>(a, t.sums[0], tid);
  Found f;
  if (is_first) {
    if (p.request >= a.requests) return true;
    p.pieces = pieces_of(a.seq_lens[p.request], share);
    if (p.pieces == 1) return true;
    find_extra<T>(f, a, share, p.request, 0, t.sums[1], t.found, tid);
    p.first = f.first + (p.token - a.query_start[p.request]) * (p.pieces - 1);
  } else {
    const int index = blockIdx.x - a.tokens * a.kv_heads, wanted = index / a.kv_heads;
    if (!find_extra<T>(f, a, share, -1, wanted, t.sums[1], t.found, tid)) return false;
    p.pieces = pieces_of(a.seq_lens[f.request], share);
    const int of_request = wanted - f.first, each = p.pieces - 1;
    p.head = index % a.kv_heads;
    p.request = f.request;
    p.token = a.query_start[f.request] + of_request / each;
    p.piece = 1 + of_request % each;
    p.first = wanted - of_request % each;
  }
  find_keys<T>(p, a);
  return true;
}

__device__ __forceinline__ void cp_row(u32 dst, const Element* src, u32 bytes) {
  asm volatile(
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes)
      : "memory");
}

// A row's columns of 16 bytes, and how many rows a warp copies at once.
constexpr int COLUMNS = ROW_BYTES / 16, COLUMN_BITS = COLUMNS == 16 ? 4 : 3, ROWS = 32 / COLUMNS;
constexpr int COLUMN_ELEMENTS = 16 / sizeof(Element);
static_assert(COLUMNS == 1 << COLUMN_BITS, "a row's columns");

// One warp's chunks of the piece on their way to its ring. A chunk is 16 rows; 16-byte column c of
// row r lies at c ^ (r & 7) of its 128 bytes, so that eight rows of a column cover all banks.
template <class T> struct Stream {
  const Args& a;
  const Piece& p;
  u32 ring;  // shared address
  int warp, lane;
  const Element* kv;  // the head's part of a block
  const int* table;   // of the request's cache blocks
  int base, count;    // this warp's first chunk (a key) and how many it has
  int block;          // cache block of chunk `lane` of the 32 now in reach
  int asked;          // chunks

  __device__ __forceinline__ int key_of(int i) const { return base + i * T::warps * CHUNK_KEYS; }
  __device__ __forceinline__ void measure() {
    base = p.begin + warp * CHUNK_KEYS;
    count = base < p.end ? (p.end - base - 1) / (T::warps * CHUNK_KEYS) + 1 : 0;
  }
  // One lane each for the next 32 chunks.
  __device__ __forceinline__ void look_up(int i) {
    block = i + lane < count ? table[key_of(i + lane) >> a.block_shift] : 0;
  }
  // The first chunks, as many as the ring holds and no kernel before writes.
  __device__ __forceinline__ void begin() {
    kv = a.kv + p.head * a.kv_head;
    table = a.block_table + (long long)min(p.request, a.requests - 1) * a.table_stride;
    measure();
    look_up(0);
    asked = 0;
#pragma unroll
    for (int i = 0; i < T::depth; ++i)
      if (asked == i && key_of(i) + CHUNK_KEYS <= p.fresh) fetch(asked++);
  }
  // The rest of the first chunks, once the kernel before has ended.
  __device__ __forceinline__ void fill() {
#pragma unroll
    for (int i = 0; i < T::depth; ++i)
      if (i >= asked) fetch(i);
  }
  // Chunk i, if there is one; a group of copies in any case.
  __device__ __forceinline__ void fetch(int i) {
    if (i < count) {
      if (i && i % 32 == 0) look_up(i);
      const int key = key_of(i), row = lane >> COLUMN_BITS, column = lane & (COLUMNS - 1);
      const Element* src = kv + (long long)__shfl_sync(~0u, block, i % 32) * a.kv_block +
                           ((key & ((1 << a.block_shift) - 1)) + row) * a.kv_token +
                           column * COLUMN_ELEMENTS;
      const u32 dst = ring + i % T::depth * CHUNK_BYTES + row * ROW_BYTES;
      const u32 at = (column ^ row) * 16;
#pragma unroll
      for (int n = 0; n < CHUNK_KEYS; n += ROWS) {
        const int mine = key + n + row;
        cp_row(dst + n * ROW_BYTES + (at ^ (n & 7) * 16), src + n * a.kv_token,
            mine >= p.low && mine < p.end ? 16 : 0);
      }
    }
    cp_commit();
  }
};

// As ldmatrix4 (mma.cuh), each matrix turned: rows become columns.
__device__ __forceinline__ void ldmatrix4_turned(u32 (&b)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
      : "r"(a)
      : "memory");
}

// A chunk in shared memory against 8 query heads. q: mma operands of four times 16 elements
// (load_queries). o[t] of r: columns 8t + 2j and 8t + 2j + 1 of head g.
__device__ __forceinline__ void attend_rows(Bf16, Running& r, u32 chunk, const u32 (&q)[8],
    int base, int low, int end, int lane, float scale) {
  const int j = lane & 3, line = lane & 7, matrix = lane >> 3;
  float s[2][2] = {};
  const u32 k_at = chunk + ((matrix >> 1) * 8 + line) * ROW_BYTES;
  const u32 v_at = chunk + ((matrix & 1) * 8 + line) * ROW_BYTES + HEAD * 2;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    u32 b[4];
    ldmatrix4(b, k_at + ((2 * k + (matrix & 1)) ^ line) * 16);
    mma(s[0], q[2 * k], q[2 * k + 1], b[0], b[1]);
    mma(s[1], q[2 * k], q[2 * k + 1], b[2], b[3]);
  }
  const float keep = weigh_scores(r, s, base, low, end, j, scale);
  const u32 p0 = pack(s[0][0], s[0][1]), p1 = pack(s[1][0], s[1][1]);
#pragma unroll
  for (int t = 0; t < 8; t += 2) {
    u32 b[4];
    ldmatrix4_turned(b, v_at + ((t + (matrix >> 1)) ^ line) * 16);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      r.o[t + u][0] *= keep;
      r.o[t + u][1] *= keep;
      mma(r.o[t + u], p0, p1, b[2 * u], b[2 * u + 1]);
    }
  }
}
// The same of codes. As 16-bit units they are pairs of columns: ldmatrix gives a lane four
// neighbours of a key, and turned, two neighbours of two keys. o[2m + e] of r: columns
// 16m + 4j + e and 16m + 4j + 2 + e.
__device__ __forceinline__ void attend_rows(E4m3, Running& r, u32 chunk, const u32 (&q)[8],
    int base, int low, int end, int lane, float scale) {
  const int j = lane & 3, line = lane & 7, matrix = lane >> 3;
  float s[2][2] = {};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    u32 b[4];
    ldmatrix4(b, chunk + (8 * n + line) * ROW_BYTES + (matrix ^ line) * 16);
#pragma unroll
    for (int k = 0; k < 4; ++k) mma(s[n], q[2 * k], q[2 * k + 1], widen(b[k]), widen(b[k] >> 16));
  }
  const float keep = weigh_scores(r, s, base, low, end, j, scale);
  const u32 p0 = pack(s[0][0], s[0][1]), p1 = pack(s[1][0], s[1][1]);
  const u32 v_at = chunk + ((matrix & 1) * 8 + line) * ROW_BYTES;
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    u32 b[4];
    ldmatrix4_turned(b, v_at + ((4 + m + (matrix >> 1)) ^ line) * 16);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const u32 first = __byte_perm(b[2 * u], 0, 0x3120),
                second = __byte_perm(b[2 * u + 1], 0, 0x3120);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float (&o)[2] = r.o[2 * (m + u) + e];
        o[0] *= keep;
        o[1] *= keep;
        mma(o, p0, p1, widen(first >> 16 * e), widen(second >> 16 * e));
      }
    }
  }
}

// Of a head's 64 elements, those that the lane multiplies with its elements of a key. from: the
// lane's first.
constexpr int LANE_QUERIES = sizeof(Element) == 1 ? 4 : 2;
__device__ __forceinline__ void load_queries(Bf16, u32 (&q)[8], const bf16* from) {
#pragma unroll
  for (int k = 0; k < 8; ++k) q[k] = __ldcg((const u32*)(from + k * 8));
}
__device__ __forceinline__ void load_queries(E4m3, u32 (&q)[8], const bf16* from) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint2 v = __ldcg((const uint2*)(from + k * 16));
    q[2 * k] = v.x;
    q[2 * k + 1] = v.y;
  }
}

// One warp's chunks.
template <class T>
__device__ __forceinline__ void attend_piece(
    Running& r, const Args& a, const Scales& scales, const Piece& p, Stream<T>& s) {
  const int lane = s.lane;
  u32 q[8];
  const bf16* from = a.q + (long long)p.token * a.q_stride + (p.head * GROUP + (lane >> 2)) * HEAD +
                     (lane & 3) * LANE_QUERIES;
  load_queries(Cache{}, q, from);
  begin_running(r);
  for (int i = 0; i < s.count; ++i) {
    cp_wait<T::depth - 1>();
    __syncwarp();
    const u32 chunk = s.ring + i % T::depth * CHUNK_BYTES;
    attend_rows(Cache{}, r, chunk, q, s.key_of(i), p.low, p.end, lane, scales.softmax(a.scale));
    __syncwarp();
    s.fetch(i + T::depth);
  }
  end_running(r);
  // Of a token that has fewer keys than its request, more chunks may be on their way than it has.
  cp_wait<0>();
  __syncwarp();
}

// A warp's sums where its ring was: [8, O_ROW] numerators, maxima, denominators.
struct WarpSums {
  float o[GROUP][O_ROW];
  float m[GROUP], l[GROUP];
};
static_assert(
    sizeof(WarpSums) <= Traits::depth * CHUNK_BYTES, "a ring has room for its warp's sums");
__device__ __forceinline__ void put_columns(Bf16, const Running& r, float* row, int j) {
#pragma unroll
  for (int t = 0; t < 8; ++t) *(float2*)&row[8 * t + 2 * j] = make_float2(r.o[t][0], r.o[t][1]);
}
__device__ __forceinline__ void put_columns(E4m3, const Running& r, float* row, int j) {
#pragma unroll
  for (int m = 0; m < 4; ++m)
    *(float4*)&row[16 * m + 4 * j] =
        make_float4(r.o[2 * m][0], r.o[2 * m + 1][0], r.o[2 * m][1], r.o[2 * m + 1][1]);
}
__device__ __forceinline__ void put_sums(const Running& r, WarpSums& to, int lane) {
  const int g = lane >> 2, j = lane & 3;
  put_columns(Cache{}, r, to.o[g], j);
  if (j == 0) {
    to.m[g] = r.m;
    to.l[g] = r.l;
  }
}

// Neighbours of one head: numerators, with the maximum and the denominator that they are of.
template <class T> struct Sums {
  float o[T::outs], m, l;
};
template <class T> __device__ __forceinline__ Sums<T> merge_warps(const char* rings, int h, int d) {
  Sums<T> s;
  s.m = NEG;
  const auto of = [&](int w) -> const WarpSums& {
    return *(const WarpSums*)(rings + w * T::depth * CHUNK_BYTES);
  };
#pragma unroll
  for (int w = 0; w < T::warps; ++w) s.m = fmaxf(s.m, of(w).m[h]);
  s.l = 0.f;
#pragma unroll
  for (int i = 0; i < T::outs; ++i) s.o[i] = 0.f;
#pragma unroll
  for (int w = 0; w < T::warps; ++w) {
    const float f = weight_of(of(w).m[h], s.m);
    s.l += f * of(w).l[h];
#pragma unroll
    for (int i = 0; i < T::outs; ++i) s.o[i] += f * of(w).o[h][d + i];
  }
  return s;
}

// Where piece `i` of this one's token leaves its sums.
__device__ __forceinline__ float* part_of(const Args& a, const Piece& p, int i) {
  const int at = i ? p.first + i - 1 : a.slots / a.kv_heads + p.first;
  return a.parts + ((long long)at * a.kv_heads + p.head) * PART;
}
// Leaves the sums of this piece. True in the last CTA of the token, which has all of them then.
template <class T>
__device__ __forceinline__ bool leave_sums(
    const Args& a, const Piece& p, const Sums<T>& s, int h, int d, bool& is_last, int tid) {
  float* to = part_of(a, p, p.piece);
#pragma unroll
  for (int i = 0; i < T::outs; i += 4)
    *(float4*)&to[h * HEAD + d + i] = make_float4(s.o[i], s.o[i + 1], s.o[i + 2], s.o[i + 3]);
  if (d == 0) {
    to[GROUP * HEAD + h] = s.m;
    to[GROUP * HEAD + GROUP + h] = s.l;
  }
  __syncthreads();
  if (tid == 0) {
    int* count = a.arrived + p.token * a.kv_heads + p.head;
    __threadfence();
    is_last = atomicAdd(count, 1) == p.pieces - 1;
    if (is_last) *count = 0;
    __threadfence();
  }
  __syncthreads();
  return is_last;
}

// How much each piece counts, by warps: pieces of one head at a time.
struct Weights {
  float of[MOST_PIECES][GROUP];
  float m[GROUP], l[GROUP];
};
template <class T>
__device__ __forceinline__ void weigh(
    Weights& w, const Args& a, const Piece& p, int warp, int lane) {
  for (int h = warp; h < GROUP; h += T::warps) {
    float m[MOST_PIECES / 32], l[MOST_PIECES / 32], top = NEG, sum = 0.f;
#pragma unroll
    for (int i = 0; i < MOST_PIECES / 32; ++i) {
      const bool there = i * 32 + lane < p.pieces;
      const float* from = part_of(a, p, there ? i * 32 + lane : 0) + GROUP * HEAD + h;
      m[i] = there ? __ldcg(from) : NEG;
      l[i] = there ? __ldcg(from + GROUP) : 0.f;
    }
#pragma unroll
    for (int i = 0; i < MOST_PIECES / 32; ++i) top = fmaxf(top, m[i]);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
#pragma unroll
    for (int i = 0; i < MOST_PIECES / 32; ++i) {
      const float f = weight_of(m[i], top);
      w.of[i * 32 + lane][h] = f;
      sum += f * l[i];
    }
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (lane == 0) {
      w.m[h] = top;
      w.l[h] = sum;
    }
  }
}
// The token's sums from its pieces': eight on their way at once.
template <class T>
__device__ __forceinline__ void merge_pieces(
    Sums<T>& s, const Weights& w, const Args& a, const Piece& p, int h, int d) {
  constexpr int AHEAD = 8;
  s.m = w.m[h];
  s.l = w.l[h];
#pragma unroll
  for (int i = 0; i < T::outs; ++i) s.o[i] = 0.f;
  for (int from = 0; from < p.pieces; from += AHEAD) {
    float4 v[AHEAD][T::outs / 4];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
#pragma unroll
      for (int k = 0; k < T::outs / 4; ++k)
        v[i][k] = __ldcg(
            (const float4*)(part_of(a, p, min(from + i, p.pieces - 1)) + h * HEAD + d + k * 4));
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const float f = from + i < p.pieces ? w.of[from + i][h] : 0.f;
#pragma unroll
      for (int k = 0; k < T::outs / 4; ++k) {
        s.o[4 * k] += f * v[i][k].x;
        s.o[4 * k + 1] += f * v[i][k].y;
        s.o[4 * k + 2] += f * v[i][k].z;
        s.o[4 * k + 3] += f * v[i][k].w;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(Traits::threads, Traits::blocks)
    attention_many(const __grid_constant__ Args a) {
  using T = Traits;
  extern __shared__ __align__(128) char rings[];
  __shared__ u32 sums[2][T::warps];
  __shared__ Found found;
  __shared__ bool is_last;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  pdl_launch();
  char* ring = rings + warp * T::depth * CHUNK_BYTES;
  Piece p;
  Stream<T> stream = {a, p, smem_u32(ring), warp, lane};
  const bool is_first = blockIdx.x < a.tokens * a.kv_heads;
  if (T::window > 0 || is_first) {
    find_first<T>(p, a, tid);
    stream.begin();
  }
  if constexpr (T::window == 0) {
    if (!split<T>(p, a, is_first, {sums, found}, tid)) return;
    if (is_first)
      stream.measure();
    else
      stream.begin();
  }
  const Scales scales(a);
  pdl_wait();
  stream.fill();
  Running r;
  attend_piece<T>(r, a, scales, p, stream);
  put_sums(r, *(WarpSums*)ring, lane);
  const int h = tid * T::outs / HEAD, d = tid * T::outs % HEAD;
  const float sink = to_float(a.sinks[p.head * GROUP + h]) * LOG2_E;
  __syncthreads();
  Sums<T> s = merge_warps<T>(rings, h, d);
  if (T::window == 0 && p.pieces > 1) {
    if (!leave_sums<T>(a, p, s, h, d, is_last, tid)) return;
    Weights& weights = *(Weights*)rings;
    static_assert(sizeof(Weights) <= T::warps * T::depth * CHUNK_BYTES, "weights lie in the rings");
    weigh<T>(weights, a, p, warp, lane);
    __syncthreads();
    merge_pieces<T>(s, weights, a, p, h, d);
  }
  const float top = fmaxf(s.m, sink), f = weight_of(s.m, top);
  const float by = scales.out(f / (s.l * f + exp2f(sink - top)));
  const int column = (p.head * GROUP + h) * HEAD + d;
  bf16* to = a.out + (a.padded ? tiled_piece(column / 8, p.token, a.padded) * 8 + column % 8
                               : (long long)p.token * a.out_stride + column);
#pragma unroll
  for (int i = 0; i < T::outs; i += 2) *(u32*)(to + i) = pack(s.o[i] * by, s.o[i + 1] * by);
}
