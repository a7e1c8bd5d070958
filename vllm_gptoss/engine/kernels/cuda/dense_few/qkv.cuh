// Query, key and value projection: bias, RoPE on queries and keys, queries to memory, keys and
// values to the cache.
//
// Offers: QkvRope, the operation of MODE 0. outputs: [T::units * 4 * T::tokens] in shared memory.
// Barriers: none.
#include "../rope.cuh"
#include "product.cuh"

template <class C> struct OutputOf;
template <> struct OutputOf<Bf16> : Pair<bf16> {};
template <> struct OutputOf<E4m3> : Pair<bf16> {  // dst: of a query
  u8* cached;                                     // of a key or a value
  float scale;
};
using Output = OutputOf<Cache>;

template <class Paged>
__device__ __forceinline__ void aim(
    OutputOf<Bf16>& to, const Paged& cache, long long slot, int kv, int kv_heads, int d) {
  to.dst = cache_place(cache, slot, kv, kv_heads, d);
}
template <class Paged>
__device__ __forceinline__ void aim(
    OutputOf<E4m3>& to, const Paged& cache, long long slot, int kv, int kv_heads, int d) {
  Target<E4m3> target;
  cache_target(target, cache, slot, kv, kv_heads, d);
  to.cached = target.cached;
  to.scale = target.scale;
}
__device__ __forceinline__ void put(const OutputOf<Bf16>& to, float2 v) {
  if (to.dst != nullptr) put(Target<Bf16>{to.dst}, v);
}
__device__ __forceinline__ void put(const OutputOf<E4m3>& to, float2 v) {
  const Target<E4m3> target = {to.dst, to.cached, to.scale};
  if (target.exists()) put(target, v);
}

template <class T> struct QkvRope {
  Output* outputs;

  static __device__ __forceinline__ int row(int unit, int n) { return rope_row(unit, n); }
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void end_producer() const {}
  __device__ __forceinline__ void prepare(const Args& a, const Block<T>& b) const {
    for (int e = b.tid; e < (b.last - b.first) * 4 * a.tokens; e += T::threads) {
      const int row = rope_row(b.first + (e >> 2) / a.tokens, e & 3), t = (e >> 2) % a.tokens;
      const int q_heads = a.q_rows >> 6, kv_heads = a.kv_rows >> 6, head = row >> 6;
      Output output = {make_pair<bf16>(
          row, q_heads + kv_heads, a.bias, a.cos_sin, a.cos_sin_bf16, a.positions + t)};
      if (head < q_heads)
        output.dst = a.out + (long long)t * a.out_stride + row;
      else
        aim(output, a, a.slots[t], head - q_heads, kv_heads, row & 63);
      outputs[e] = output;
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
      const Output output = outputs[e];
      put(output, rotate(output, lo * norm.scale[t], hi * norm.scale[t]));
    }
  }
};
