// Tensor core products of one warp: c += A B; A 16 x 16 and B 16 x 8 bf16, c 16 x 8 float32.
//
// Lane 4 g + j (g < 8, j < 4) holds, as pairs of neighbours in 32 bits,
//   a0, a1  A[g, 2j], A[g + 8, 2j]         a2, a3  A[g, 2j + 8], A[g + 8, 2j + 8]
//   b0, b1  B[2j, g], B[2j + 8, g]         c[0-3]  c[g, 2j], c[g, 2j + 1], and both of row g + 8
// The order of the 16 inner elements is free as long as A and B agree on it. Barriers: none; all 32
// lanes take part.
#include "common.cuh"

__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Rows 0 to 7 alone: those from 8 on are zero and have no registers.
__device__ __forceinline__ void mma(float (&c)[2], u32 a0, u32 a2, u32 b0, u32 b1) {
  [[maybe_unused]] float none0, none1;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, "
      "{%0,%1,%9,%9};"
      : "+f"(c[0]), "+f"(c[1]), "=f"(none0), "=f"(none1)
      : "r"(a0), "r"(0), "r"(a2), "r"(b0), "r"(b1), "f"(0.f));
}
// Four matrices of 8 x 8 bf16 in shared memory; lane 8 i + r gives the address of row r of matrix
// i, which becomes b[i].
__device__ __forceinline__ void ldmatrix4(u32 (&b)[4], u32 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
      : "r"(a));
}
