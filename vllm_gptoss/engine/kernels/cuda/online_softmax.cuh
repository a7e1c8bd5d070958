// One warp's attention of 8 query heads over chunks of 16 keys, heads of 64, with the softmax
// running along.
//
// Offers: Chunk and load_chunk (keys and values of one key/value head from global memory straight
// into mma operands), Running with begin_running, attend_chunk (scores, new maximum, sums),
// end_running (sums over a quad's lanes), put_running (to memory, for merging). Scores are base 2:
// `scale` is the softmax scale times log2(e), and so are maxima. With a cache of e4m3 the scale of
// its keys is in `scale`, and that of its values is not in the sums.
//
// Lane 4 g + j holds query head g. k = head dimension is permuted alike in Q and K: lane j of a
// quad holds elements 16j to 16j + 15. V's columns are permuted so that a lane holds 8 neighbours
// of a row, and pairs of keys are made by byte permutes. Barriers: none; all 32 lanes take part.
#include "cache.cuh"
#include "common.cuh"
#include "mma.cuh"

constexpr int GROUP = 8;            // query heads per key/value head
constexpr int HEAD = 64;            // head size, elements; a token's values follow its keys
constexpr int CHUNK_KEYS = 16;      // keys
constexpr int ALL_BELOW = 1 << 31;  // as `low`: no key is too old
constexpr float LOG2_E = 1.4426950408889634f;
#define NEG __int_as_float(0xff800000)  // the maximum of no key

template <class C> struct ChunkOf;
template <> struct ChunkOf<Bf16> {
  int4 k[2][2];  // two groups of 8 keys
  int4 v[4];     // keys 2j, 2j + 1, 2j + 8, 2j + 9 of the 16; 8 columns each
};
template <> struct ChunkOf<E4m3> {
  int4 k[2];
  uint2 v[4];
};
using Chunk = ChunkOf<Cache>;

// Keys from `base` on; key(i): where the cache has key i of the head, [128] elements. Keys past the
// end are clamped to the last one: their scores are masked, their values finite.
template <class Key>
__device__ __forceinline__ void load_chunk(
    ChunkOf<Bf16>& c, int base, int end, int g, int j, Key key) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const bf16* p = key(min(base + n * 8 + g, end - 1)) + j * 16;
    c.k[n][0] = __ldcg((const int4*)p);
    c.k[n][1] = __ldcg((const int4*)(p + 8));
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    c.v[i] = __ldcg(
        (const int4*)(key(min(base + 2 * j + (i & 1) + (i >> 1) * 8, end - 1)) + HEAD + g * 8));
}
template <class Key>
__device__ __forceinline__ void load_chunk(
    ChunkOf<E4m3>& c, int base, int end, int g, int j, Key key) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
    c.k[n] = __ldcg((const int4*)(key(min(base + n * 8 + g, end - 1)) + j * 16));
#pragma unroll
  for (int i = 0; i < 4; ++i)
    c.v[i] = __ldcg(
        (const uint2*)(key(min(base + 2 * j + (i & 1) + (i >> 1) * 8, end - 1)) + HEAD + g * 8));
}

// Half `i` of the four elements 4k to 4k + 3 that the lane has of key g of group n.
__device__ __forceinline__ u32 key_pair(const ChunkOf<Bf16>& c, int n, int k, int i) {
  return word(c.k[n][k >> 1], (k & 1) * 2 + i);
}
__device__ __forceinline__ u32 key_pair(const ChunkOf<E4m3>& c, int n, int k, int i) {
  return widen((u32)word(c.k[n], k) >> i * 16);
}
// Column t of the keys 2j + 8i and 2j + 1 + 8i.
__device__ __forceinline__ u32 value_pair(const ChunkOf<Bf16>& c, int i, int t) {
  const u32 pick = (t & 1) ? 0x7632u : 0x5410u;
  return __byte_perm(word(c.v[2 * i], t >> 1), word(c.v[2 * i + 1], t >> 1), pick);
}
__device__ __forceinline__ u32 value_pair(const ChunkOf<E4m3>& c, int i, int t) {
  const uint2 a = c.v[2 * i], b = c.v[2 * i + 1];
  const u32 both = __byte_perm(t < 4 ? a.x : a.y, t < 4 ? b.x : b.y, (t & 2) ? 0x7362u : 0x5140u);
  return widen(both >> (t & 1) * 16);
}

// The maximum of the scores so far, this lane's share of the denominator, the numerators: o[t] =
// (column 16j + t, column 16j + 8 + t) of query head g.
struct Running {
  float m, l, o[8][2];
};
__device__ __forceinline__ void begin_running(Running& r) {
  r.m = NEG;
  r.l = 0.f;
#pragma unroll
  for (int t = 0; t < 8; ++t) r.o[t][0] = r.o[t][1] = 0.f;
}
// A chunk's scores s[n][e], of query head g and key base + 8n + 2j + e, become their weights under
// the new maximum. The factor by which what was summed before counts now. Keys low <= key < end
// count; at least one of the chunk does.
template <int WIDTH>
__device__ __forceinline__ float weigh_scores(
    Running& r, float (&s)[2][WIDTH], int base, int low, int end, int j, float scale) {
  float top = r.m;
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int key = base + n * 8 + 2 * j + e;
      s[n][e] = key >= low && key < end ? s[n][e] * scale : NEG;
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
    for (int e = 0; e < 2; ++e) {
      s[n][e] = exp2f(s[n][e] - top);
      sum += s[n][e];
    }
  r.l = r.l * keep + sum;
  return keep;
}
// q: elements 16j to 16j + 15 of head g. Keys low <= key < end count; at least one of the chunk
// does.
__device__ __forceinline__ void attend_chunk(Running& r, const Chunk& now, const u32 (&q)[8],
    int base, int low, int end, int j, float scale) {
  float s[2][4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      mma(s[n], q[2 * k], 0, q[2 * k + 1], 0, key_pair(now, n, k, 0), key_pair(now, n, k, 1));
  }
  const float keep = weigh_scores(r, s, base, low, end, j, scale);
  const u32 p0 = pack(s[0][0], s[0][1]), p1 = pack(s[1][0], s[1][1]);
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    const u32 b0 = value_pair(now, 0, t), b1 = value_pair(now, 1, t);
    float c[4] = {r.o[t][0] * keep, r.o[t][1] * keep, 0.f, 0.f};
    mma(c, p0, 0, p1, 0, b0, b1);
    r.o[t][0] = c[0];
    r.o[t][1] = c[1];
  }
}
__device__ __forceinline__ void end_running(Running& r) {
  r.l += __shfl_xor_sync(~0u, r.l, 1);
  r.l += __shfl_xor_sync(~0u, r.l, 2);
}

constexpr int O_ROW =
    HEAD + 4;  // floats from one head's sums to the next: rows then start at different banks
// To [8, O_ROW] numerators, [8] maxima, [8] denominators.
__device__ __forceinline__ void put_running(
    const Running& r, float (*to)[O_ROW], float* m, float* l, int g, int j) {
#pragma unroll
  for (int t = 0; t < 8; t += 4) {
    *(float4*)&to[g][16 * j + t] =
        make_float4(r.o[t][0], r.o[t + 1][0], r.o[t + 2][0], r.o[t + 3][0]);
    *(float4*)&to[g][16 * j + 8 + t] =
        make_float4(r.o[t][1], r.o[t + 1][1], r.o[t + 2][1], r.o[t + 3][1]);
  }
  if (j == 0) {
    m[g] = r.m;
    l[g] = r.l;
  }
}
// What a warp that saw no key adds to a sum is nothing.
__device__ __forceinline__ float weight_of(float m, float top) {
  return m == NEG ? 0.f : exp2f(m - top);
}
