// The activations as operands: loaded, added to the residual, times the RMSNorm's weight. The
// norm's scale comes later.
//
// Offers: load_x; norm_x (needs the norm's weight: waits for `norm_bar`); scale_tokens (1 /
// rms of each token, for all consumers). A lane's fragment: elements 16j to 16j + 15 of a block of
// 64 columns of token 8n + g. Barriers: mbarrier `norm_bar`, named barrier 1.
#include "../weigh.cuh"
#include "block.cuh"

// Which 64 columns are block i of part p of a warp.
template <class T> __device__ __forceinline__ int block_at(const Block<T>& b, int p, int i) {
  return p * T::part + b.warp * T::blocks + i;
}

template <class T>
__device__ __forceinline__ void load_x(
    u32 (&frag)[T::parts][T::blocks][T::groups][8], const Args& a, const Block<T>& b) {
#pragma unroll
  for (int p = 0; p < T::parts; ++p)
#pragma unroll
    for (int i = 0; i < T::blocks; ++i)
#pragma unroll
      for (int n = 0; n < T::groups; ++n) {
        const int t = n * 8 + b.g;
        if (t < a.tokens) {
          load16(
              frag[p][i][n], a.x + (long long)t * T::columns + block_at(b, p, i) * 64 + b.j * 16);
        } else {
#pragma unroll
          for (int e = 0; e < 8; ++e) frag[p][i][n][e] = 0;
        }
      }
}

template <class T>
__device__ __forceinline__ void norm_x(u32 (&frag)[T::parts][T::blocks][T::groups][8],
    u32 (&rest)[T::parts][T::blocks][8], const Args& a, const Block<T>& b, const Norm<T>& norm) {
  bar_wait(b.norm_bar, 0);
  float ss[T::groups];
#pragma unroll
  for (int n = 0; n < T::groups; ++n) {
    ss[n] = 0.f;
    const int t = n * 8 + b.g;
    u32 r[T::parts][T::blocks][8];
    if (a.r != nullptr) {
#pragma unroll
      for (int p = 0; p < T::parts; ++p)
#pragma unroll
        for (int i = 0; i < T::blocks; ++i)
          if (t < a.tokens)
            load16(r[p][i], a.r + (long long)t * T::columns + block_at(b, p, i) * 64 + b.j * 16);
    }
#pragma unroll
    for (int p = 0; p < T::parts; ++p)
#pragma unroll
      for (int i = 0; i < T::blocks; ++i) {
        const long long at = (long long)t * T::columns + block_at(b, p, i) * 64 + b.j * 16;
        if (a.r != nullptr && t < a.tokens) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const float2 f = unpack(frag[p][i][n][e]), h = unpack(r[p][i][e]);
            frag[p][i][n][e] = pack(f.x + h.x, f.y + h.y);
          }
        }
        if (a.r_out != nullptr && blockIdx.x == 0 && t < a.tokens)
          store16(a.r_out + at, frag[p][i][n]);
        u32 nw[8];
        read16(nw, norm.weight + block_at(b, p, i) * 64 + b.j * 16);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float2 f = unpack(frag[p][i][n][e]);
          ss[n] += f.x * f.x + f.y * f.y;
          if constexpr (T::mode == Mode::ROUTER) {
            // weighed later; without this it stays unpacked until then, and spills
            asm("" : "+r"(frag[p][i][n][e]));
          } else if constexpr (T::split) {
            weigh(frag[p][i][n][e], rest[p][i][e], frag[p][i][n][e], nw[e]);
          } else {
            const float2 w = unpack(nw[e]);
            frag[p][i][n][e] = pack(f.x * w.x, f.y * w.y);
          }
        }
      }
    ss[n] += __shfl_xor_sync(~0u, ss[n], 1);
    ss[n] += __shfl_xor_sync(~0u, ss[n], 2);
    if (b.j == 0) norm.squares[b.warp][n * 8 + b.g] = ss[n];
  }
}

template <class T>
__device__ __forceinline__ void scale_tokens(
    const Args& a, const Block<T>& b, const Norm<T>& norm) {
  if (b.tid < T::tokens) {
    float s = 0.f;
#pragma unroll
    for (int w = 0; w < T::warps; ++w) s += norm.squares[w][b.tid];
    norm.scale[b.tid] = rsqrtf(s / T::columns + a.eps);
  }
  named_sync<1, T::threads>();
}
