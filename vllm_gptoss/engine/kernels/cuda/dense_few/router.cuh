// The router: logits gathered in every block of the cluster, top-k, softmax over the chosen; the
// normed activations.
//
// Offers: RouterTopk, the operation of MODE 2; the grid is one cluster. logits:
// [T::tokens][T::experts], bias: [T::units * 8] in shared memory. Barriers: the cluster's; three
// phases, of which the producing warp takes part.
#include "../cluster.cuh"
#include "../topk.cuh"
#include "product.cuh"

template <class T> struct RouterTopk {
  float (&logits)[T::tokens][T::experts];
  float* bias;

  static __device__ __forceinline__ int row(int unit, int n) { return unit * 8 + n; }
  // This CTA runs: its shared memory may be written.
  __device__ __forceinline__ void begin() const { cluster_arrive(); }
  __device__ __forceinline__ void end_producer() const {
    cluster_wait();
    cluster_sync();
  }
  __device__ __forceinline__ void prepare(const Args& a, const Block<T>& b) const {
    if (b.tid < (b.last - b.first) * 8) bias[b.tid] = to_float(a.bias[b.first * 8 + b.tid]);
  }
  __device__ __forceinline__ void finish(const Args& a, const Block<T>& b, const Norm<T>& norm,
      const Partials<T>& partials, const u32 (&frag)[T::parts][T::blocks][T::groups][8]) const {
    cluster_wait();
    send_logits(a, b, norm, partials);
    cluster_arrive();
    store_normed(a, b, norm, frag);
    cluster_wait();
    for (int t = blockIdx.x + b.warp * T::cluster; t < a.tokens; t += T::warps * T::cluster) {
      constexpr int EACH = T::experts / 32;
      float f[EACH];
#pragma unroll
      for (int i = 0; i < EACH; ++i) f[i] = logits[t][b.lane * EACH + i];
      choose<EACH, T::top_k>(f, a.topk_weights + (long long)t * T::top_k,
          a.topk_ids + (long long)t * T::top_k, b.lane);
    }
  }

 private:
  // Token t's logits to the block that chooses for it.
  __device__ __forceinline__ void send_logits(
      const Args& a, const Block<T>& b, const Norm<T>& norm, const Partials<T>& partials) const {
    for (int e = b.tid; e < (b.last - b.first) * 8 * a.tokens; e += T::threads) {
      const int n = e & 7, t = (e >> 3) % a.tokens, u = (e >> 3) / a.tokens;
      float v = 0.f;
#pragma unroll
      for (int w = 0; w < T::warps; ++w) v += partials.at(w, u, t, n);
      const int expert = row(b.first + u, n);
      v = v * norm.scale[t] + bias[u * 8 + n];
      if (a.logits != nullptr) a.logits[(long long)t * T::experts + expert] = v;
      store_cluster(smem_u32(&logits[t][expert]), t % T::cluster, v);
    }
  }
  // Each CTA its share of the columns.
  __device__ __forceinline__ void store_normed(const Args& a, const Block<T>& b,
      const Norm<T>& norm, const u32 (&frag)[T::parts][T::blocks][T::groups][8]) const {
#pragma unroll
    for (int n = 0; n < T::groups; ++n) {
      const int t = n * 8 + b.g;
      if (t < a.tokens) {
        const float rs = norm.scale[t];
#pragma unroll
        for (int p = 0; p < T::parts; ++p)
#pragma unroll
          for (int i = 0; i < T::blocks; ++i) {
            const int at = p * T::part + b.warp * T::blocks + i;
            if (at % T::cluster != blockIdx.x) continue;
            const u32* nw = (const u32*)(norm.weight + at * 64 + b.j * 16);
            u32 o[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const float2 f = unpack(frag[p][i][n][e]), w = unpack(nw[e]);
              o[e] = pack(f.x * rs * w.x, f.y * rs * w.y);
            }
            store16(a.out + (long long)t * a.out_stride + at * 64 + b.j * 16, o);
          }
      }
    }
  }
};
