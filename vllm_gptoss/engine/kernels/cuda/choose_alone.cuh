// Top-k and softmax of a token by one thread. Included as text: nvrtc.source. Reads ACTIVE, ROUTED,
// LOGITS and MAPPED as routing.cuh does.
#include "common.cuh"

// A logit's bits as a number of the same order, and back.
__device__ __forceinline__ u32 ordered(u32 bits) {
  return bits ^ ((u32)((int)bits >> 31) | 0x80000000u);
}
__device__ __forceinline__ float unordered(u32 key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
// A logit with its expert behind it, so that a tie is the lower expert's.
#if LOGITS == 2
typedef u64 Key;
__device__ __forceinline__ Key key_of(u32 bits, int e) {
  return (u64)ordered(bits) << 32 | (u32)~e;
}
__device__ __forceinline__ int expert_of(Key key) { return ~(u32)key; }
__device__ __forceinline__ float logit_of(Key key) { return unordered(key >> 32); }
#else
typedef u32 Key;
__device__ __forceinline__ Key key_of(u32 bits, int e) {
  return (ordered(bits) & 0xFFFF0000u) | (0xFFFF - e);
}
__device__ __forceinline__ int expert_of(Key key) { return 0xFFFF - (key & 0xFFFF); }
__device__ __forceinline__ float logit_of(Key key) {
  return unordered((key & 0xFFFF0000u) | (key & 0x80000000u ? 0 : 0xFFFF));
}
#endif
__device__ __forceinline__ void keep(Key (&best)[ACTIVE], Key key) {
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) {
    const Key less = best[a] < key ? best[a] : key;
    best[a] = best[a] < key ? key : best[a];
    key = less;
  }
}
// The largest of so many logits of a token, from expert `first` on.
__device__ __forceinline__ void look_through(
    Key (&best)[ACTIVE], const u8* logits, int first, int count) {
  constexpr int SIZE = LOGITS == 2 ? 4 : 2, EACH = 16 / SIZE;
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) best[a] = 0;
#pragma unroll 4
  for (int e = first; e < first + count; e += EACH) {
    const uint4 v = __ldcg(reinterpret_cast<const uint4*>(logits + e * SIZE));
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < EACH; i++) {
      const u32 word = words[i * SIZE / 4];
      keep(best, key_of(LOGITS == 2 || i & 1 ? word : word << 16, e + i));
    }
  }
}
// Experts and weights of a token to `t.ids` and `t.weights`, ACTIVE of each token.
template <class Chosen>
__device__ __forceinline__ void put(
    Chosen& t, const Key (&best)[ACTIVE], const int* map, int token) {
  float value[ACTIVE], sum = 0.f;
#pragma unroll
  for (int a = 0; a < ACTIVE; a++) {
    const int e = expert_of(best[a]);
    value[a] = logit_of(best[a]);
    sum += __expf(value[a] - value[0]);
    t.ids[token * ACTIVE + a] = MAPPED ? map[e] : e;
  }
#pragma unroll
  for (int a = 0; a < ACTIVE; a++)
    t.weights[token * ACTIVE + a] = __expf(value[a] - value[0]) / sum;
}
// The ACTIVE largest logits of a token and their softmax, by one thread: of so many tokens, a warp
// for each waits longer, for its maxima.
template <class Chosen>
__device__ __forceinline__ void choose_alone(
    Chosen& t, const u8* logits, const int* map, int token) {
  Key best[ACTIVE];
  look_through(best, logits + (u64)token * ROUTED * (LOGITS == 2 ? 4 : 2), 0, ROUTED);
  put(t, best, map, token);
}
// The same for all tokens by THREADS threads: of 128 experts four neighbours look through a quarter
// each. All lanes of a warp call together.
template <int THREADS, class Chosen>
__device__ __forceinline__ void choose_side_by_side(
    Chosen& t, const u8* logits, const int* map, int tokens, int thread) {
  constexpr int PARTS = ROUTED >= 128 && ROUTED % 32 == 0 ? 4 : 1, SHARE = ROUTED / PARTS;
  for (int first = thread / 32 * 32 / PARTS; first < tokens; first += THREADS / PARTS) {
    const int token = first + thread % 32 / PARTS, part = thread % PARTS;
    Key best[ACTIVE];
    look_through(best, logits + (u64)min(token, tokens - 1) * ROUTED * (LOGITS == 2 ? 4 : 2),
        part * SHARE, SHARE);
#pragma unroll
    for (int d = 1; d < PARTS; d *= 2) {
      Key theirs[ACTIVE];
#pragma unroll
      for (int a = 0; a < ACTIVE; a++) theirs[a] = __shfl_xor_sync(~0u, best[a], d);
#pragma unroll
      for (int a = 0; a < ACTIVE; a++) keep(best, theirs[a]);
    }
    if (part == 0 && token < tokens) put(t, best, map, token);
  }
}
