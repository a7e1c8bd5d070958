// The loop over a block's units.
//
// Offers: PROLOGUE (shared memory of a block), Progress, work, work_wide. The including kernel has
// Source, source (where a unit's weights are), prefetch and multiply. Barriers: those of the block
// in work_wide, all threads call together.
#include "rows.cuh"

#define PROLOGUE                                              \
  extern __shared__ __align__(128) u8 smem[];                 \
  Meta& m = *reinterpret_cast<Meta*>(smem);                   \
  float4* red = reinterpret_cast<float4*>(smem + META_BYTES); \
  const u32 ring = smem_u32(smem + META_BYTES + RED_BYTES);   \
  u8* xs = smem + META_BYTES + RED_BYTES + RING_BYTES;        \
  const int thread = threadIdx.x;

// Where a group of warps is in its block's units.
struct Progress {
  int unit, done, turn;
  Source now;  // of `unit`; its first turn of the ring is on its way
};

// Processes the group's units before `until`. The slots from `first` on are staged. Calls
// finish(slot, first tile, done, c) for each unit.
template <class Finish>
__device__ __forceinline__ void work(Progress& p, const Work& w, const Meta& m, const u8* xs,
    const u8* __restrict__ values, const u8* __restrict__ scales, int first, int until, int divisor,
    int rows, u32 two_23, Finish finish) {
  for (; p.unit < until; p.unit += NGROUPS, p.done++) {
    const int slot = p.unit / NU, next = p.unit + NGROUPS;
    Source then = p.now;
    if (next < w.last) then = source(w, values, scales, next);
    float c[HALVES][R][4];
    u32 xrow[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; h++) xrow[h] = row_address(w, m, xs, first, slot, h, divisor, rows);
    if (WIDE && m.slot_count[slot] > 8)
      multiply<HALVES>(c, w, p.now, then, next < w.last, xrow, p.turn, two_23);
    else
      multiply<1>(c, w, p.now, then, next < w.last, xrow, p.turn, two_23);
    p.now = then;
    finish(slot, (p.unit - slot * NU) * R, p.done, c);
  }
}

// All of the group's units: slots are staged, as many as fit, and worked on.
template <class Finish>
__device__ __forceinline__ void work_wide(Progress& p, const Work& w, const Meta& m, u8* xs,
    const u8* __restrict__ x, const u8* __restrict__ values, const u8* __restrict__ scales,
    int divisor, int rows, u32 two_23, int thread, Finish finish) {
  for (int slot = w.first / NU; slot * NU < w.last;) {
    const int after = slots_that_fit(w, m, slot, rows);
    __syncthreads();  // all warps have read what was staged before
    load_rows(m, xs, x, slot, after - 1, divisor, rows, thread);
    __syncthreads();
    work(p, w, m, xs, values, scales, slot, min(w.last, after * NU), divisor, rows, two_23, finish);
    slot = after;
  }
}
