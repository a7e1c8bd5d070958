// wgmma m64nNk16: A (64 weight rows) in registers, B (N tokens) in shared memory with a 128-byte
// swizzle, sums in float32. Included as text: nvrtc.source. A warp of the group holds 16 rows as
// mma.m16n8k16 has them, and of every 8 tokens the four sums that mma would have.
#include "common.cuh"

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// What the copy engine and wgmma read next was written by ordinary stores or cp.async.
__device__ __forceinline__ void fence_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// Rows of 128 bytes (64 columns) from `address`, a multiple of 1,024: 16-byte piece p of row n lies
// at p ^ (n & 7). The lower half of the descriptor; it counts 16 bytes.
__device__ __forceinline__ u32 b_descriptor(u32 address) {
  return (address & 0x3FFFF) >> 4 | 1u << 16;
}
// The whole of it. What is added to it is one instruction for both halves.
__device__ __forceinline__ u64 whole_descriptor(u32 lower) { return (u64)0x40000040 << 32 | lower; }

// A thread's registers from here on, more or fewer than before, by all of a warpgroup.
template <int COUNT, bool MORE> __device__ __forceinline__ void registers() {
  if (MORE)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
