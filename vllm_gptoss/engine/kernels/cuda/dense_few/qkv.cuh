// Query, key and value projection: bias, RoPE on queries and keys, queries to memory, keys and
// values to the cache.
//
// Offers: QkvRope, the operation of MODE 0. pairs: [T::units * 4 * T::tokens] in shared memory.
// Barriers: none.
#include "../rope.cuh"
#include "product.cuh"

template <class T> struct QkvRope {
  Pair* pairs;

  static __device__ __forceinline__ int row(int unit, int n) { return rope_row(unit, n); }
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void end_producer() const {}
  __device__ __forceinline__ void prepare(const Args& a, const Block<T>& b) const {
    for (int e = b.tid; e < (b.last - b.first) * 4 * a.tokens; e += T::threads) {
      const int row = rope_row(b.first + (e >> 2) / a.tokens, e & 3), t = (e >> 2) % a.tokens;
      const int q_heads = a.q_rows >> 6, kv_heads = a.kv_rows >> 6, head = row >> 6;
      Pair pair =
          make_pair(row, q_heads + kv_heads, a.bias, a.cos_sin, a.cos_sin_bf16, a.positions + t);
      if (head < q_heads)
        pair.dst = a.out + (long long)t * a.out_stride + row;
      else
        pair.dst = cache_place(a, a.slots[t], head - q_heads, kv_heads, row & 63);
      pairs[e] = pair;
    }
  }
  __device__ __forceinline__ void finish(const Args& a, const Block<T>& b, const Norm<T>& norm,
      const Partials<T>& partials, const u32 (&)[T::parts][T::blocks][T::groups][8]) const {
    for (int e = b.tid; e < (b.last - b.first) * 4 * a.tokens; e += T::threads) {
      const int i = e & 3, t = (e >> 2) % a.tokens, u = (e >> 2) / a.tokens;
      float lo = 0.f, hi = 0.f;
#pragma unroll
      for (int w = 0; w < T::warps; ++w) {
        lo += partials.at(w, u, t, i);
        hi += partials.at(w, u, t, i + 4);
      }
      const Pair pair = pairs[e];
      const float2 out = rotate(pair, lo * norm.scale[t], hi * norm.scale[t]);
      if (pair.dst != nullptr) {
        pair.dst[0] = to_bf16(out.x);
        pair.dst[32] = to_bf16(out.y);
      }
    }
  }
};
