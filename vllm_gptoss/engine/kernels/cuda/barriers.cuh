// What threads wait for: mbarriers in shared memory, named barriers of part of a block, the kernel
// before.
//
// Offers: bar_* (an mbarrier, by its 32-bit shared memory address; a phase ends when `count` have
// arrived and the expected bytes are there; parity 0 is the first phase); Place in a ring of them;
// named_sync<ID, THREADS>
// (`bar.sync`; ID 0 is __syncthreads, a kernel lists the others); pdl_* (programmatic
// dependent launch).
#include "common.cuh"

__device__ __forceinline__ void bar_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
// After the last bar_init, before __syncthreads: bulk copies see initialised barriers.
__device__ __forceinline__ void bar_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void bar_expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
      : "memory");
}
// Before sm_90 an arrival returns a state, and a wait cannot suspend the thread.
__device__ __forceinline__ void bar_arrive(u32 bar) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
#else
  asm volatile("{.reg .b64 s;\nmbarrier.arrive.shared.b64 s, [%0];}" ::"r"(bar) : "memory");
#endif
}
__device__ __forceinline__ void bar_wait(u32 bar, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred p;\nW_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra "
      "D_%=;\nbra W_%=;\nD_%=:\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
#else
  asm volatile(
      "{\n.reg .pred p;\nW_%=:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@!p bra "
      "W_%=;\n}" ::"r"(bar),
      "r"(parity)
      : "memory");
#endif
}

// A place in a ring of N and the parity of its turn.
template <int N> struct Place {
  int at;
  u32 parity;
  __device__ __forceinline__ void next() {
    at = at == N - 1 ? 0 : at + 1;
    parity ^= at == 0;
  }
};

// A warp has read what a bulk copy may now write over: one lane arrives, after __syncwarp.
// compute-sanitizer's racecheck does not follow that from the lane to the others, so for it
// (tests/gpu/sanitize.py) every lane speaks for itself.
#ifndef SPEAKERS
#define SPEAKERS 1
#endif
__device__ __forceinline__ void bar_arrive_warp(u32 bar, int lane) {
  if (lane < SPEAKERS) bar_arrive(bar);
}

// Of THREADS threads of the block, all of their warps.
template <int ID, int THREADS> __device__ __forceinline__ void named_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// The kernel before has ended and its writes are visible. Nothing before sm_90: kernels of a stream
// run in turn there.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The kernel after may start as soon as every block has signalled or ended.
__device__ __forceinline__ void pdl_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
