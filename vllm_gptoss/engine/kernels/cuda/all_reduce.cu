// Sum over the ranks of one host, by push (sm_90): a thread sends 16 bytes of its rank's addend to
// every peer, polls its own memory for theirs and sums in the order of the ranks.
//
// No barrier and no counter: the value itself is the flag. A word EMPTY (a pair of NaNs that no
// sender writes) means "not yet written", and the reader writes EMPTY back. Two generations of
// buffers follow each other: a peer that sends into a generation again has ended the call between,
// for which this rank had ended its reading of the call before.
//
// Macros set by the host (engine/kernels/all_reduce.py): RANKS; PATIENCE, nanoseconds.
#include "barriers.cuh"
#include "combine.cuh"
#include "common.cuh"

constexpr int THREADS = 128;

struct Args {
  const uint4* x;     // this rank's addend, `pieces` of eight bf16
  uint4* out;         // the sum
  uint4* received;    // [RANKS senders, stride], this rank's memory
  uint4* targets[7];  // where the other ranks, from the next on, receive from this one
  int rank, pieces, stride, unused;
};

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ u32 sent(u32 w) { return w == EMPTY ? 0x7FFF7FFFu : w; }
__device__ __forceinline__ void push(uint4* p, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
      "r"(v.z), "r"(v.w)
      : "memory");
}
__device__ __forceinline__ uint4 look(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p)
      : "memory");
  return v;
}
// Polls. After PATIENCE it ends the process's context with a message on stderr.
__device__ __forceinline__ uint4 settle(uint4 v, const uint4* p) {
  u64 began = 0;
  for (u32 looks = 1; !arrived(v); ++looks) {
    v = look(p);
    if (looks % 1024) continue;
    if (began == 0) began = nanoseconds();
    if (nanoseconds() - began > PATIENCE)
      __assertfail("a rank's values came within PATIENCE", "all_reduce.cu", __LINE__, "settle", 1);
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS) all_reduce(const Args a) {
  pdl_launch();
  const int i = blockIdx.x * THREADS + threadIdx.x;
  if (i >= a.pieces) return;
  uint4* const own = a.received + i;
  pdl_wait();
  const uint4 x = __ldcg(a.x + i), mine = make_uint4(sent(x.x), sent(x.y), sent(x.z), sent(x.w));
#pragma unroll
  for (int peer = 0; peer < RANKS - 1; ++peer) push(a.targets[peer] + i, mine);
  uint4 seen[RANKS];
#pragma unroll
  for (int from = 0; from < RANKS; ++from)
    seen[from] = from == a.rank ? mine : look(own + (u64)from * a.stride);
  float sum[8] = {};
#pragma unroll
  for (int from = 0; from < RANKS; ++from) {
    uint4* const at = own + (u64)from * a.stride;
    seen[from] = settle(seen[from], at);
    if (from != a.rank) *at = make_uint4(EMPTY, EMPTY, EMPTY, EMPTY);
    add_weighted(sum, seen[from], 1.f);
  }
  a.out[i] = pack8(sum);
}
