// Copies of 16 bytes from global to shared memory by the calling thread, past L1.
//
// Offers: cp16 (data that others read too), cp16_once (what passes through L2 once, and leaves it
// first), cp_commit and cp_wait<N> (a thread's groups of copies; all but the last N are there).
// Barriers: cp_arrive (on an mbarrier, once this thread's copies have completed). Reading another
// thread's copies requires cp_arrive or a barrier of the caller.
#include "common.cuh"

constexpr u64 EVICT_FIRST = 0x12F0000000000000ull;  // as createpolicy.fractional makes it
__device__ __forceinline__ void cp16_once(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(dst),
      "l"(src), "l"(EVICT_FIRST)
      : "memory");
}
__device__ __forceinline__ void cp16(u32 dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void cp_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
__device__ __forceinline__ void cp_arrive(u32 bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
