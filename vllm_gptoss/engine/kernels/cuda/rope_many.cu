// RoPE on a step's queries and keys, and keys and values into the paged cache (sm_80 on): a CTA a
// token. Queries are turned where they lie.
//
// A thread takes 8 elements d of a head and the 8 at d + 32, which RoPE turns together.
//
// Macros: CACHE.
#include "barriers.cuh"
#include "common.cuh"
#include "rope.cuh"

struct Args {
  bf16* qkv;                   // [T, stride]: heads of 64, queries, keys, values
  const long long* positions;  // [T]
  const void* cos_sin;         // [positions, 64], 32 cosines then 32 sines
  const long long* slots;      // [T], negative: not written
  Element* kv;                 // paged cache; K at 0, V at 64 of each (block, head, token)
  long long kv_block, kv_head, kv_token;  // strides in elements
  int q_heads, kv_heads, block_shift, cos_sin_bf16, stride;
  const float *k_scale, *v_scale;  // E4m3: of the cache
};

__device__ __forceinline__ void rotate8(
    int4& low, int4& high, const float (&cos)[8], const float (&sin)[8]) {
  u32 lo[4], hi[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    lo[i] = word(low, i);
    hi[i] = word(high, i);
    turn(lo[i], hi[i], make_float2(cos[2 * i], cos[2 * i + 1]),
        make_float2(sin[2 * i], sin[2 * i + 1]));
  }
  low = make_int4(lo[0], lo[1], lo[2], lo[3]);
  high = make_int4(hi[0], hi[1], hi[2], hi[3]);
}

extern "C" __global__ void __launch_bounds__(1024) rope_many(const Args a) {
  pdl_launch();
  const int token = blockIdx.x, turned = a.q_heads + a.kv_heads, heads = turned + a.kv_heads;
  const int d = (threadIdx.x & 3) * 8;
  float cos[8], sin[8];
  // Positions and slots are made before the step's first kernel.
  const long long position = a.positions[token] * 64, slot = a.slots[token];
  turns(cos, a.cos_sin, a.cos_sin_bf16, position + d);
  turns(sin, a.cos_sin, a.cos_sin_bf16, position + d + 32);
  pdl_wait();
  for (int head = threadIdx.x >> 2; head < heads; head += blockDim.x >> 2) {
    bf16* from = a.qkv + (long long)token * a.stride + head * 64 + d;
    int4 low = __ldcg((const int4*)from), high = __ldcg((const int4*)(from + 32));
    if (head < turned) rotate8(low, high, cos, sin);
    Target<Cache> to = {from};
    if (head >= a.q_heads) cache_target(to, a, slot, head - a.q_heads, a.kv_heads, d);
    if (to.exists()) put(to, low, high);
  }
}
