// The product of a block's units with the tokens, and its sum over the warps.
//
// Offers: multiply (from the ring, stage by stage, as they arrive); Partials and put_partials
// (every warp's sums in shared memory, where the ring was: at(warp, unit, token, row)). Barriers:
// mbarriers `full` and `empty`, named barrier 1.
#include "../mma.cuh"
#include "norm.cuh"

// Columns 16j + 4k to 16j + 4k + 3 of lo as rows g, of hi as rows g + 8; without a second half that
// one is zero.
template <int SUMS>
__device__ __forceinline__ void mma_step(float (&c)[SUMS], const u32 (&lo)[8], const u32 (&hi)[8],
    const int k, const u32 b0, const u32 b1) {
  if constexpr (SUMS == 2)
    mma(c, lo[2 * k], lo[2 * k + 1], b0, b1);
  else
    mma(c, lo[2 * k], hi[2 * k], lo[2 * k + 1], hi[2 * k + 1], b0, b1);
}

// One block of 64 columns: w, this lane's elements of weight row g.
template <class T>
__device__ __forceinline__ void multiply_block(float (&c)[T::sums], float (&odd)[T::sums],
    const u32 (&frag)[T::groups][8], const u32 (&rest)[8], const u32 (&w)[8], const bf16* norm_w) {
  const u32* nw = (const u32*)norm_w;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (T::mode == Mode::ROUTER) {
      u32 part[T::groups][8], left[T::groups][8];
#pragma unroll
      for (int e = 2 * k; e < 2 * k + 2; ++e)
#pragma unroll
        for (int n = 0; n < T::groups; ++n) weigh(part[n][e], left[n][e], frag[n][e], nw[e]);
      if constexpr (T::split) {
        mma_step(k & 1 ? odd : c, part[0], left[0], k, w[2 * k], w[2 * k + 1]);
      } else {
        mma_step(c, part[0], part[T::groups - 1], k, w[2 * k], w[2 * k + 1]);
        mma_step(odd, left[0], left[T::groups - 1], k, w[2 * k], w[2 * k + 1]);
      }
    } else if constexpr (T::split) {
      mma_step(k & 1 ? odd : c, frag[0], rest, k, w[2 * k], w[2 * k + 1]);
    } else {
      mma_step(k & 1 ? odd : c, frag[0], frag[T::groups - 1], k, w[2 * k], w[2 * k + 1]);
    }
  }
}

template <class T>
__device__ __forceinline__ void multiply(float (&acc)[T::units][T::sums],
    const u32 (&frag)[T::parts][T::blocks][T::groups][8], const u32 (&rest)[T::parts][T::blocks][8],
    const Block<T>& b, const Norm<T>& norm) {
  int turn = 0;
#pragma unroll
  for (int u = 0; u < T::units; ++u) {
    if (b.first + u < b.last) {
#pragma unroll
      for (int p = 0; p < T::parts; ++p, ++turn) {
        const int s = turn % T::stages;
        bar_wait(b.full + 8 * s, (turn / T::stages) & 1);
        // a second chain: one mma waits for the one before on the same sum
        float odd[T::sums] = {};
#pragma unroll
        for (int i = 0; i < T::blocks; ++i) {
          u32 w[8];
          read16(w, b.ring + s * T::stage_bytes + b.g * T::pitch + (b.warp * T::blocks + i) * 128 +
                        b.j * 32);
          multiply_block<T>(acc[u], odd, frag[p][i], rest[p][i], w,
              norm.weight + block_at(b, p, i) * 64 + b.j * 16);
        }
#pragma unroll
        for (int e = 0; e < T::sums; ++e) acc[u][e] += odd[e];
        __syncwarp();
        bar_arrive_warp(b.empty + 8 * s, b.lane);
      }
    }
  }
}

template <class T> struct Partials {
  float* sums;  // [T::warps][T::units][T::tokens][8]
  __device__ __forceinline__ float& at(int w, int u, int t, int n) const {
    return sums[((w * T::units + u) * T::tokens + t) * 8 + n];
  }
};
template <class T>
__device__ __forceinline__ Partials<T> put_partials(
    float (&acc)[T::units][T::sums], const Block<T>& b) {
  named_sync<1, T::threads>();  // the ring is free: it holds the partial sums now
  if constexpr (T::split) {
#pragma unroll
    for (int u = 0; u < T::units; ++u) {
      acc[u][0] += acc[u][2];
      acc[u][1] += acc[u][3];
    }
  }
  const Partials<T> partials = {(float*)b.ring};
#pragma unroll
  for (int u = 0; u < T::units; ++u)
#pragma unroll
    for (int n = 0; n < T::groups; ++n)
      *(float2*)&partials.at(b.warp, u, n * 8 + b.g, b.j * 2) =
          make_float2(acc[u][2 * n], acc[u][2 * n + 1]);
  named_sync<1, T::threads>();
  return partials;
}
