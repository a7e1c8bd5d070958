// From top-k ids or router logits to the pairs (token, choice) of each expert, by every block for
// itself. Included as text: nvrtc.source. Reads EXPERTS, ACTIVE, ROUTED, LOGITS (1: bf16, 2: f32),
// ID64, MAPPED.

#include "common.cuh"

__device__ __forceinline__ float ld_cg(const float* p) {
  float v;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 ld_cg_u32(const u8* p) {
  u32 v;
  asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ long long ld_cg_s64(const u8* p) {
  long long v;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(v) : "l"(p));
  return v;
}
__device__ __forceinline__ u16 ld_cg_u16(const u8* p) {
  u16 v;
  asm volatile("ld.global.cg.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// The local expert of one id; -1 of none here.
__device__ __forceinline__ int local_id(const u8* routing, const int* map, int i) {
  int e = ID64 ? (int)ld_cg_s64(routing + 8 * i) : (int)ld_cg_u32(routing + 4 * i);
  if (MAPPED) e = e < 0 ? -1 : map[e];
  return e < EXPERTS ? e : -1;
}

// One logit of a token as an unsigned number of the same order; TAGGED, of bfloat16, with its
// expert below it, so that one maximum finds both and a tie is the lower expert's.
template <bool TAGGED>
__device__ __forceinline__ u32 logit_key(const u8* logits, u64 token, int e) {
  u32 bits = 0xFF800000u;  // -inf
  if (e < ROUTED) {
    const u64 at = token * ROUTED + e;
    bits = LOGITS == 2 ? ld_cg_u32(logits + at * 4) : (u32)ld_cg_u16(logits + at * 2) << 16;
  }
  const u32 key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return TAGGED ? (key & 0xFFFF0000u) | (0xFFFFu - e) : key;
}

// The ACTIVE largest logits of each token (ties: the lower expert) and their softmax. A warp takes
// SOME tokens at once, because a maximum over its lanes is long in coming.
template <int SOME, bool TAGGED = LOGITS == 1, class Id>
__device__ __forceinline__ void choose_experts(Id* ids, float* weights, const u8* logits,
    const int* map, int tokens, int warp, int warps, int lane) {
  constexpr int PER = (ROUTED + 31) / 32;
  for (int first = warp * SOME; first < tokens; first += warps * SOME) {
    u32 key[SOME][PER];
    float value[SOME][ACTIVE];
#pragma unroll
    for (int s = 0; s < SOME; s++)
#pragma unroll
      for (int i = 0; i < PER; i++)
        key[s][i] = logit_key<TAGGED>(logits, min(first + s, tokens - 1), lane + 32 * i);
#pragma unroll
    for (int a = 0; a < ACTIVE; a++) {
      u32 best[SOME], where[SOME];
#pragma unroll
      for (int s = 0; s < SOME; s++) {
        best[s] = 0;
#pragma unroll
        for (int i = 0; i < PER; i++) best[s] = max(best[s], key[s][i]);
        best[s] = __reduce_max_sync(~0u, best[s]);
      }
#pragma unroll
      for (int s = 0; s < SOME; s++) {
        if (TAGGED) {
          where[s] = 0xFFFFu - (best[s] & 0xFFFFu);
        } else {
          where[s] = 1 << 20;
#pragma unroll
          for (int i = PER - 1; i >= 0; i--)
            where[s] = key[s][i] == best[s] ? lane + 32 * i : where[s];
          where[s] = __reduce_min_sync(~0u, where[s]);
        }
#pragma unroll
        for (int i = 0; i < PER; i++) key[s][i] = where[s] == lane + 32 * i ? 0 : key[s][i];
        const u32 bits =
            TAGGED ? (best[s] & 0xFFFF0000u) | (best[s] & 0x80000000u ? 0 : 0xFFFF) : best[s];
        value[s][a] = __uint_as_float(bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits);
        if (lane == 0 && first + s < tokens) {
          const int e = where[s] < ROUTED ? (int)where[s] : 0;
          ids[(first + s) * ACTIVE + a] = MAPPED ? map[e] : e;
        }
      }
    }
    if (weights)
#pragma unroll
      for (int s = 0; s < SOME; s++) {
        float sum = 0.f, mine = value[s][0];
#pragma unroll
        for (int a = 0; a < ACTIVE; a++) {
          sum += __expf(value[s][a] - value[s][0]);
          mine = lane == a ? value[s][a] : mine;
        }
        if (lane < ACTIVE && first + s < tokens)
          weights[(first + s) * ACTIVE + lane] = __expf(mine - value[s][0]) / sum;
      }
  }
}

// Ranks of a warp's PASSES x 32 pairs from `first` on among the warp's pairs of the same expert,
// and `seen`: how many of each expert the warp has. Other warps' counts are added later: ranks[i] +
// those of the warps before.
template <int PASSES, class Id>
__device__ __forceinline__ void rank_pairs(
    u16 (&ranks)[PASSES], u16* seen, const Id* ids, int first, int pairs, int lane) {
  for (int e = lane; e < EXPERTS; e += 32) seen[e] = 0;
  __syncwarp();
#pragma unroll
  for (int p = 0; p < PASSES; p++) {
    const int i = first + p * 32 + lane, e = i < pairs ? (int)ids[i] : -1;
    const u32 same = __match_any_sync(~0u, e), below = same & ((1u << lane) - 1);
    const u16 before = e >= 0 ? seen[e] : 0;
    __syncwarp();
    if (e >= 0 && below == 0) seen[e] = before + __popc(same);
    ranks[p] = before + __popc(below);
    __syncwarp();
  }
}

// Replaces each warp's count of one expert, in seen [warps][EXPERTS], by those of the warps before
// it; returns the sum of all.
template <int WARPS_COUNTED>
__device__ __forceinline__ int count_before_warps(u16* seen, int expert) {
  u16 here[WARPS_COUNTED];
#pragma unroll
  for (int w = 0; w < WARPS_COUNTED; w++) here[w] = seen[w * EXPERTS + expert];
  int count = 0;
#pragma unroll
  for (int w = 0; w < WARPS_COUNTED; w++) {
    seen[w * EXPERTS + expert] = count;
    count += here[w];
  }
  return count;
}

// The sum of a warp's values up to this lane's own.
__device__ __forceinline__ int sum_up_to(int value, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    int v = __shfl_up_sync(~0u, value, d);
    value += lane >= d ? v : 0;
  }
  return value;
}
