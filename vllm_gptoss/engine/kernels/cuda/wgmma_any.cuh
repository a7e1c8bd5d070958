// wgmma m64nNk16 as in wgmma.cuh, for any N. Included as text: nvrtc.source.
//
// ptxas allocates separate registers for every loop with wgmma: with a loop for each N, it spills
// or serialises all products. Here, one loop branches to a piece of assembly for each N, and the
// sums use the same registers for all N. A piece holds both products and their commit, so that only
// branches lie between the fence and the group's end.
//
// Offers: products (two steps of 16 columns of K, and their commit), with N chosen at run time or
// when compiled. Operands of A and the descriptors are declared as changed, for then they are
// numbered before the sums, alike for each N. A waits for the group.
#include "common.cuh"

#define SUMS_8 "%10,%11,%12,%13"
#define SUMS_16 SUMS_8 ",%14,%15,%16,%17"
#define SUMS_24 SUMS_16 ",%18,%19,%20,%21"
#define SUMS_32 SUMS_24 ",%22,%23,%24,%25"
#define SUMS_40 SUMS_32 ",%26,%27,%28,%29"
#define SUMS_48 SUMS_40 ",%30,%31,%32,%33"
#define SUMS_56 SUMS_48 ",%34,%35,%36,%37"
#define SUMS_64 SUMS_56 ",%38,%39,%40,%41"
#define SUMS_72 SUMS_64 ",%42,%43,%44,%45"
#define SUMS_80 SUMS_72 ",%46,%47,%48,%49"
#define SUMS_88 SUMS_80 ",%50,%51,%52,%53"
#define SUMS_96 SUMS_88 ",%54,%55,%56,%57"
#define SUMS_104 SUMS_96 ",%58,%59,%60,%61"
#define SUMS_112 SUMS_104 ",%62,%63,%64,%65"
#define SUMS_120 SUMS_112 ",%66,%67,%68,%69"
#define SUMS_128 SUMS_120 ",%70,%71,%72,%73"
#define SUMS_136 SUMS_128 ",%74,%75,%76,%77"
#define SUMS_144 SUMS_136 ",%78,%79,%80,%81"
#define SUMS_152 SUMS_144 ",%82,%83,%84,%85"
#define SUMS_160 SUMS_152 ",%86,%87,%88,%89"
#define SUMS_168 SUMS_160 ",%90,%91,%92,%93"
#define SUMS_176 SUMS_168 ",%94,%95,%96,%97"
#define SUMS_184 SUMS_176 ",%98,%99,%100,%101"
#define SUMS_192 SUMS_184 ",%102,%103,%104,%105"
#define INTO_8 "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#define INTO_16 INTO_8, "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
#define INTO_24 INTO_16, "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11])
#define INTO_32 INTO_24, "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
#define INTO_40 INTO_32, "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19])
#define INTO_48 INTO_40, "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23])
#define INTO_56 INTO_48, "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27])
#define INTO_64 INTO_56, "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
#define INTO_72 INTO_64, "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35])
#define INTO_80 INTO_72, "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39])
#define INTO_88 INTO_80, "+f"(c[40]), "+f"(c[41]), "+f"(c[42]), "+f"(c[43])
#define INTO_96 INTO_88, "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47])
#define INTO_104 INTO_96, "+f"(c[48]), "+f"(c[49]), "+f"(c[50]), "+f"(c[51])
#define INTO_112 INTO_104, "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55])
#define INTO_120 INTO_112, "+f"(c[56]), "+f"(c[57]), "+f"(c[58]), "+f"(c[59])
#define INTO_128 INTO_120, "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
#define INTO_136 INTO_128, "+f"(c[64]), "+f"(c[65]), "+f"(c[66]), "+f"(c[67])
#define INTO_144 INTO_136, "+f"(c[68]), "+f"(c[69]), "+f"(c[70]), "+f"(c[71])
#define INTO_152 INTO_144, "+f"(c[72]), "+f"(c[73]), "+f"(c[74]), "+f"(c[75])
#define INTO_160 INTO_152, "+f"(c[76]), "+f"(c[77]), "+f"(c[78]), "+f"(c[79])
#define INTO_168 INTO_160, "+f"(c[80]), "+f"(c[81]), "+f"(c[82]), "+f"(c[83])
#define INTO_176 INTO_168, "+f"(c[84]), "+f"(c[85]), "+f"(c[86]), "+f"(c[87])
#define INTO_184 INTO_176, "+f"(c[88]), "+f"(c[89]), "+f"(c[90]), "+f"(c[91])
#define INTO_192 INTO_184, "+f"(c[92]), "+f"(c[93]), "+f"(c[94]), "+f"(c[95])

#define PRODUCT(N, A, B)                                                                 \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" SUMS_##N "}, {" A "}, " B \
                                                                        ", 1, 1, 1, 0;\n"
#define OF(N)                                                                               \
  asm volatile(PRODUCT(N, "%0,%1,%2,%3", "%8")                                              \
          PRODUCT(N, "%4,%5,%6,%7", "%9") "wgmma.commit_group.sync.aligned;"                \
      : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3]), "+r"(a[4]), "+r"(a[5]), "+r"(a[6]), \
      "+r"(a[7]), "+l"(first), "+l"(second), INTO_##N)
#define OF_2(A, B) \
  if (n < B)       \
    OF(A);         \
  else             \
    OF(B)
#define OF_4(A, B, C, D) \
  if (n < C) {           \
    OF_2(A, B);          \
  } else                 \
    OF_2(C, D)
#define OF_8(A, B, C, D, E, F, G, H) \
  if (n < E) {                       \
    OF_4(A, B, C, D);                \
  } else                             \
    OF_4(E, F, G, H)

// c[0, n / 2) += A x B: `a` holds both steps' operands, `first` and `second` are their descriptors.
// n is a multiple of 8 up to 192, the same in all threads of the group.
__device__ __forceinline__ void products(
    float (&c)[96], u32 (&a)[8], u64 first, u64 second, int n) {
  if (n < 72) {
    OF_8(8, 16, 24, 32, 40, 48, 56, 64);
  } else if (n < 136) {
    OF_8(72, 80, 88, 96, 104, 112, 120, 128);
  } else {
    OF_8(136, 144, 152, 160, 168, 176, 184, 192);
  }
}

// The same with n known: c is as long as it must be.
template <int N>
__device__ __forceinline__ void products(float (&c)[N / 2], u32 (&a)[8], u64 first, u64 second);
#define FIXED(N)                                              \
  template <>                                                 \
  __device__ __forceinline__ void products<N>(                \
      float (&c)[N / 2], u32(&a)[8], u64 first, u64 second) { \
    OF(N);                                                    \
  }
FIXED(8)
FIXED(16)
FIXED(24)
FIXED(32)
FIXED(40)
FIXED(48)
FIXED(64)
FIXED(72)
FIXED(80)
FIXED(88)
FIXED(96)
FIXED(112)
