// Activation rows of a block's slots in shared memory.
//
// Offers: ask_all and put_all (all rows of x), load_rows (those of some slots), slots_that_fit,
// row_address (what a lane hands to ldmatrix4). Rows are KT tiles of 64 columns, XROW bytes apart
// in global memory and XSTRIDE in shared memory. Barriers: none, the caller separates the writing
// from the reading.
#include "../common.cuh"
#include "../mxfp4.cuh"
#include "slots.cuh"

__device__ __forceinline__ uint4 ld_cg16(const u8* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(p)
      : "memory");
  return v;
}

// Stages activation rows, times 2^64. The row of a pair is pair / divisor.
struct Rows {
  static constexpr int BATCH = 6;
  uint4 v[BATCH];
};

__device__ __forceinline__ void put_piece(u8* to, int p, uint4 v) {
  v.x = mul_bf16x2(v.x, TWO_64);
  v.y = mul_bf16x2(v.y, TWO_64);
  v.z = mul_bf16x2(v.z, TWO_64);
  v.w = mul_bf16x2(v.w, TWO_64);
  *reinterpret_cast<uint4*>(to + p / (KT * 8) * XSTRIDE + p % (KT * 8) * 16) = v;
}

// Where piece p of 16 bytes lies, of the KT * 8 of each row.
#define PIECE(p) \
  (XROW == KT * 128 ? (u64)(p) * 16 : (u64)((p) / (KT * 8)) * XROW + (p) % (KT * 8) * 16)

// Loads all rows of x in pieces of 16 bytes. These loads are issued first, so that they do not
// queue behind the weights.
__device__ __forceinline__ void ask_all(
    Rows& rows, const u8* __restrict__ x, int tokens, int thread) {
#pragma unroll
  for (int j = 0; j < Rows::BATCH; j++)
    if (thread + j * THREADS < tokens * (KT * 8))
      rows.v[j] = ld_cg16(x + PIECE(thread + j * THREADS));
}

__device__ __forceinline__ void put_all(
    const Rows& rows, u8* xs, const u8* __restrict__ x, int tokens, int thread) {
#pragma unroll
  for (int j = 0; j < Rows::BATCH; j++)
    if (thread + j * THREADS < tokens * (KT * 8)) put_piece(xs, thread + j * THREADS, rows.v[j]);
  for (int p = thread + Rows::BATCH * THREADS; p < tokens * (KT * 8); p += THREADS)
    put_piece(xs, p, ld_cg16(x + PIECE(p)));
}

// Rows staged before those of `slot`, if `first` is the first slot staged.
__device__ __forceinline__ int rows_before(const Meta& m, int first, int slot, int rows) {
  if (!WIDE) return (slot - first) * rows;
  int before = 0;
  for (int s = first; s < slot; s++) before += m.slot_count[s];
  return before;
}

// The end of the slots of this block, from `first` on, that `rows` rows hold.
__device__ __forceinline__ int slots_that_fit(const Work& w, const Meta& m, int first, int rows) {
  const int end = (w.last - 1) / NU + 1;
  int slot = first + 1, used = m.slot_count[first];
  while (slot < end && (used += m.slot_count[slot]) <= rows) slot++;
  return slot;
}

// The rows that slots `first` to `last` read, one slot after another.
__device__ __forceinline__ void load_rows(const Meta& m, u8* xs, const u8* __restrict__ x,
    int first, int last, int divisor, int rows, int thread) {
  constexpr int BATCH = 4;
  for (int slot = first; slot <= last; slot++) {
    const int pieces = m.slot_count[slot] * (KT * 8);
    u8* to = xs + rows_before(m, first, slot, rows) * XSTRIDE;
    for (int i = thread; i < pieces; i += BATCH * THREADS) {
      uint4 v[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++) {
        const int p = i + j * THREADS, r = p / (KT * 8);
        if (p < pieces)
          v[j] =
              ld_cg16(x + (u64)(m.slot_pair[slot][r] / divisor) * XROW + (p - r * (KT * 8)) * 16);
      }
#pragma unroll
      for (int j = 0; j < BATCH; j++)
        if (i + j * THREADS < pieces) put_piece(to, i + j * THREADS, v[j]);
    }
  }
}

// This lane's ldmatrix row in the activations of half `half` of `slot`, `first` being the first
// slot staged; rows past the slot's tokens repeat row 0, unread later.
__device__ __forceinline__ u32 row_address(const Work& w, const Meta& m, const u8* xs, int first,
    int slot, int half, int divisor, int rows) {
  const int n = half * 8 + (w.lane & 7) < m.slot_count[slot] ? half * 8 + (w.lane & 7) : 0;
  const int r =
      WIDE || rows ? rows_before(m, first, slot, rows) + n : m.slot_pair[slot][n] / divisor;
  return smem_u32(xs) + r * XSTRIDE + w.part * KS * STEP_BYTES + (w.lane >> 3) * 16;
}
