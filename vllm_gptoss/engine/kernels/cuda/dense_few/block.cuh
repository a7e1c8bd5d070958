// A block's place in the work, and its ring: one warp streams weights, the others read them.
//
// Offers: Block and make_block, begin (barriers initialised, all threads), produce (the producing
// warp's whole work but what follows the last copy). A stage of the ring is 8 rows of T::row_bytes
// at T::pitch. Units are 8 weight rows. Barriers: mbarriers `full` and `empty`, one a stage, and
// `norm_bar`; __syncthreads.
#include "../barriers.cuh"
#include "../bulk.cuh"

template <class T> struct Block {
  unsigned char* ring;
  u32 full, empty, norm_bar;  // mbarriers
  int tid, warp, lane, g, j;  // lane 4 g + j
  int first, last;            // units of this block
};
template <class T>
__device__ __forceinline__ Block<T> make_block(
    const Args& a, unsigned char* ring, const u64* bars) {
  Block<T> b;
  b.ring = ring;
  b.tid = threadIdx.x;
  b.warp = b.tid >> 5;
  b.lane = b.tid & 31;
  b.g = b.lane >> 2;
  b.j = b.lane & 3;
  b.first = (int)((long long)blockIdx.x * a.units / gridDim.x);
  b.last = (int)((long long)(blockIdx.x + 1) * a.units / gridDim.x);
  b.full = smem_u32(bars);
  b.empty = b.full + 8 * T::stages;
  b.norm_bar = b.empty + 8 * T::stages;
  return b;
}

// Of the RMSNorm, in shared memory.
template <class T> struct Norm {
  bf16* weight;                           // [T::columns]
  float (&squares)[T::warps][T::tokens];  // each warp's sums of squares
  float (&scale)[T::tokens];              // 1 / rms
};

template <class T> __device__ __forceinline__ void begin(const Block<T>& b) {
  if (b.tid == 0) {
#pragma unroll
    for (int s = 0; s < T::stages; ++s) {
      bar_init(b.full + 8 * s, 1);
      bar_init(b.empty + 8 * s, T::warps * SPEAKERS);
    }
    bar_init(b.norm_bar, 1);
    bar_init_done();
  }
  __syncthreads();
}

template <class T, class Op>
__device__ __forceinline__ void produce(
    const Args& a, const Block<T>& b, const Norm<T>& norm, const Op&) {
  const u32 ring0 = smem_u32(b.ring);
  const u64 policy = evict_first();
  if constexpr (T::normed) {
    if (b.lane == 0) {
      bar_expect(b.norm_bar, T::columns * 2);
      bulk_load(smem_u32(norm.weight), a.norm, T::columns * 2, b.norm_bar, policy);
    }
  }
  const int total = (b.last - b.first) * T::parts;
  for (int i = 0; i < total; ++i) {
    const int s = i % T::stages;
    if (i >= T::stages) bar_wait(b.empty + 8 * s, ((i / T::stages) + 1) & 1);
    if (b.lane == 0) bar_expect(b.full + 8 * s, 8 * T::row_bytes);
    __syncwarp();
    if (b.lane < 8) {
      const long long row = Op::row(b.first + i / T::parts, b.lane);
      bulk_load(ring0 + s * T::stage_bytes + b.lane * T::pitch,
          a.w + row * T::columns + (i % T::parts) * (T::part * 64), T::row_bytes, b.full + 8 * s,
          policy);
    }
  }
}
