// Values as flags in global memory: +0 means "not yet written". A reader polls until the value is
// not +0. Sums of all blocks count their contributors.
//
// Offers: flagged (what is written), look16, whole and settle (16 bytes of bf16 or floats),
// add_fixed and settle_fixed (fixed-point sums), push and over_ranks (other ranks' memory), poll
// and count_look (ends the process's work on the GPU after SPIN_LIMIT looks). Barriers: none.
#include "state.cuh"

// Values as flags. +0 means "not there yet", so a zero is written as -0.
__device__ __forceinline__ bf16 flagged(float v) {
  const bf16 h = to_bf16(v);
  return h ? h : 0x8000;
}
__device__ __forceinline__ float flagged32(float v) { return __float_as_uint(v) ? v : -0.f; }
__device__ __forceinline__ void flag(float& part, float v) { part = flagged32(v); }
__device__ __forceinline__ void flag(bf16& part, float v) { part = flagged(v); }
__device__ __forceinline__ int4 look16(const void* p) {
  int4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p)
      : "memory");
  return v;
}
__device__ __forceinline__ u32 empty_half(u32 w) { return (w - 0x00010001u) & ~w & 0x80008000u; }
__device__ __forceinline__ bool whole(int4 v) {  // eight bf16
  return (empty_half(v.x) | empty_half(v.y) | empty_half(v.z) | empty_half(v.w)) == 0;
}
__device__ __forceinline__ bool whole32(int4 v) { return v.x && v.y && v.z && v.w; }  // four floats
__device__ __forceinline__ void count_look(u32& looks) {
  if (++looks <= SPIN_LIMIT) return;
  if (RANKS > 1) __assertfail("a rank's values came in time", "step.cu", __LINE__, "step", 1);
  __trap();
}
// Calls `look` until it is true.
template <class Look> __device__ __forceinline__ void poll(const Look& look) {
  u32 looks = 0;
  do count_look(looks);
  while (!look());
}
__device__ __forceinline__ void store_sys(u8* p, float v) {
  asm volatile("st.relaxed.sys.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
__device__ __forceinline__ void store_sys(u8* p, bf16 v) {
  asm volatile("st.relaxed.sys.global.u16 [%0], %1;" ::"l"(p), "h"(v) : "memory");
}
// Stores into this place of every peer.
template <class T> __device__ __forceinline__ void push(const Args& a, const T* here, T v) {
#pragma unroll
  for (int i = 0; i < RANKS - 1; ++i) store_sys(a.peers[i] + ((const u8*)here - a.received), v);
}
// The sum over the ranks, in their order, of what each has for this column of `out`.
__device__ __forceinline__ float over_ranks(const Args& a, float mine, int layer, int column) {
  if (RANKS == 1) return mine;
  float (&from)[RANKS][C] = received(a).sums[layer & 1];
  push(a, from[a.rank] + column, flagged32(mine));
  float sum = 0.f;
#pragma unroll
  for (int r = 0; r < RANKS; ++r) {
    float v = mine;
    u32 looks = 0;
    while (r != a.rank) {
      asm volatile("ld.relaxed.sys.global.f32 %0, [%1];"
          : "=f"(v)
          : "l"(from[r] + column)
          : "memory");
      if (__float_as_uint(v)) break;
      count_look(looks);
    }
    sum += v;
  }
  return sum;
}
__device__ __forceinline__ int4 settle(int4 v, const void* p) {
  u32 looks = 0;
  while (!whole(v)) {
    count_look(looks);
    v = look16(p);
  }
  return v;
}

// A logit's sum: contributions in units of the layer's input, each plus 2^47 so that it is
// positive, below 2^48; the upper 8 bits count them.
constexpr int LOGIT_BITS = 34, SQUARE_BITS = 16;
static_assert((GRID + REPLICAS - 1) / REPLICAS < 256, "contributors are counted in 8 bits");
__device__ __forceinline__ float power_of_two(int e) {
  return __uint_as_float((u32)(max(-126, min(127, e)) + 127) << 23);
}
__device__ __forceinline__ void add_fixed(unsigned long long* to, float v, int bits) {
  const long long n = __float2ll_rn(fminf(fmaxf(v * power_of_two(bits), -1.4e14f), 1.4e14f));
  const unsigned long long sum = (1ull << 56) + (1ull << 47) + n;
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(to), "l"(sum) : "memory");
}
__device__ __forceinline__ unsigned long long look8(const unsigned long long* p) {
  unsigned long long v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// The sums of all blocks' contributions at N places of replica 0, once all are there.
template <int N>
__device__ __forceinline__ void settle_fixed(
    long long (&sum)[N], const unsigned long long* const (&at)[N]) {
  unsigned long long v[N][REPLICAS];
  poll([&] {
    bool there = true;
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int r = 0; r < REPLICAS; ++r) v[i][r] = look8(at[i] + r * LOGITS);
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
      for (int r = 0; r < REPLICAS; ++r)
        there &= (int)(v[i][r] >> 56) == (GRID - r + REPLICAS - 1) / REPLICAS;
    return there;
  });
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sum[i] = -((long long)GRID << 47);
#pragma unroll
    for (int r = 0; r < REPLICAS; ++r) sum[i] += (long long)(v[i][r] & ((1ull << 56) - 1));
  }
}
