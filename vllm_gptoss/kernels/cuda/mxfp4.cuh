// MXFP4 weights as operands of mma.m16n8k16: rows are M, tokens are N. Included as text: nvrtc.source.
__device__ __forceinline__ uint4 lds16(u32 a) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
    return v;
}
__device__ __forceinline__ u32 lds4(u32 a) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a));
    return v;
}
__device__ __forceinline__ void ldmatrix4(u32 (&b)[4], u32 a) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(a));
}
__device__ __forceinline__ u32 mul_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// One 32-bit word of packed e2m1 is four bf16x2 A registers; each e2m1 pattern s|ee|m sits at bits 15 and 8..6, which
// as a bfloat16 is the value x 2^-126. The activations carry 2^64, so the products are values x 2^-62, far from both
// ends of float32, and the group's scale brings the missing 2^62: every factor is a power of two, nothing is rounded.
//
// Integer logic and shifts run at half rate and bound this kernel's arithmetic, so a scale's exponent is moved by a
// product, in the other pipe. Its factor 2^23 is a kernel argument: a constant would be turned back into a shift.
__device__ __forceinline__ void step(float (&c)[4], u32 w, u32 b0, u32 b1) {
    constexpr u32 M = 0x81C081C0u;
    const u32 last = ((w << 1) & 0x80008000u) | ((w >> 3) & 0x01800180u) | ((w >> 7) & 0x00400040u);
    mma(c, w & M, (w << 3) & M, (w << 6) & M, last, b0, b1);
}
constexpr u32 TWO_64 = 0x5F805F80u;  // bf16x2

// One group of 32 columns: two steps, then c += scale x sum. Scales are e8m0 (2^(s - 127)) of rows g and g + 8.
__device__ __forceinline__ void group(
    float (&c)[4], u32 w0, u32 w1, float lo, float hi, const u32* b) {
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    step(d, w0, b[0], b[1]);
    step(d, w1, b[2], b[3]);
    c[0] = fmaf(d[0], lo, c[0]);
    c[1] = fmaf(d[1], lo, c[1]);
    c[2] = fmaf(d[2], hi, c[2]);
    c[3] = fmaf(d[3], hi, c[3]);
}

// Byte I of the scale word as the float 2^(s - 127 + 62); s <= 192, checked at load.
template <int I> __device__ __forceinline__ float scale(u32 word, u32 two_23) {
    u32 d;
    asm("mad.lo.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(__byte_perm(word, 0, 0x4440 | I)), "r"(two_23), "n"(62u << 23));
    return __uint_as_float(d);
}

// The row tile of the n-th unit of an expert with `tiles`: neighbours share one 64-byte line of scales, tiles t and t + 8
// of a block of 256 rows.
__device__ __forceinline__ int row_tile(int n, int tiles) {
    return n < tiles / 16 * 16 ? (n & ~15) + ((n & 1) << 3) + ((n & 15) >> 1) : n;
}
