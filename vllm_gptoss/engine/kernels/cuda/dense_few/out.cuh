// Attention's output projection: bias, residual.
//
// Offers: OutProj, the operation of MODE 1. bias, residual: [T::units * 8 * T::tokens] in shared
// memory. Barriers: none.
#include "product.cuh"

template <class T> struct OutProj {
  float *bias, *residual;

  static __device__ __forceinline__ int row(int unit, int n) { return unit * 8 + n; }
  __device__ __forceinline__ void begin() const {}
  __device__ __forceinline__ void end_producer() const {}
  __device__ __forceinline__ void prepare(const Args& a, const Block<T>& b) const {
    for (int e = b.tid; e < (b.last - b.first) * 8 * a.tokens; e += T::threads)
      bias[e] =
          a.bias == nullptr ? 0.f : to_float(a.bias[row(b.first + (e >> 3) / a.tokens, e & 7)]);
  }
  __device__ __forceinline__ void load_residual(const Args& a, const Block<T>& b) const {
    if (a.r != nullptr)
      for (int e = b.tid; e < (b.last - b.first) * 8 * a.tokens; e += T::threads)
        residual[e] = to_float(a.r[(long long)((e >> 3) % a.tokens) * a.out_stride +
                                   row(b.first + (e >> 3) / a.tokens, e & 7)]);
  }
  __device__ __forceinline__ void finish(const Args& a, const Block<T>& b, const Norm<T>&,
      const Partials<T>& partials, const u32 (&)[T::parts][T::blocks][T::groups][8]) const {
    for (int e = b.tid; e < (b.last - b.first) * 8 * a.tokens; e += T::threads) {
      const int n = e & 7, t = (e >> 3) % a.tokens, u = (e >> 3) / a.tokens;
      float v = bias[e];
#pragma unroll
      for (int w = 0; w < T::warps; ++w) v += partials.at(w, u, t, n);
      // rounded to bf16 before the addition, as in a separate projection
      if (a.r != nullptr) v = to_float(to_bf16(v)) + residual[e];
      a.out[(long long)t * a.out_stride + row(b.first + u, n)] = to_bf16(v);
    }
  }
};
