// Rotated query, key and value projections: which weight rows go together, where a pair of outputs
// goes.
//
// Offers: rope_row (weight rows in units of 8), Pair and make_pair (all that the outputs d and d +
// 32 of a head need besides their products, independent of the preceding kernel), Target and put
// (where they go), cache_target, turned_by, rotate; turns and turn (the same of neighbours that are
// rounded already). Heads of 64: query heads, then key heads, then value heads. Barriers: none.
#include "cache.cuh"
#include "common.cuh"

// Row n of a unit: rows i to i + 3 and i + 32 to i + 35 of a head, since RoPE turns (i, i + 32)
// together.
__device__ __forceinline__ int rope_row(int unit, int n) {
  return (unit >> 3) * 64 + (unit & 7) * 4 + (n & 3) + ((n >> 2) << 5);
}

template <class E> struct Pair {
  float bias_lo, bias_hi, cos, sin;
  E* dst;  // of the first; null: not written
};

// row: of the first output; heads: with a rotation, query and key heads; bias: [rows]; cos_sin:
// [positions, 64], 32 cosines then 32 sines, bf16 or float32; position: the token's. dst is null.
template <class E>
__device__ __forceinline__ Pair<E> make_pair(int row, int heads, const bf16* bias,
    const void* cos_sin, int cos_sin_bf16, const long long* position) {
  Pair<E> pair = {to_float(bias[row]), to_float(bias[row + 32]), 1.f, 0.f, nullptr};
  if (row >> 6 < heads) {
    const long long at = *position * 64 + (row & 63);
    if (cos_sin_bf16) {
      pair.cos = to_float(((const bf16*)cos_sin)[at]);
      pair.sin = to_float(((const bf16*)cos_sin)[at + 32]);
    } else {
      pair.cos = ((const float*)cos_sin)[at];
      pair.sin = ((const float*)cos_sin)[at + 32];
    }
  }
  return pair;
}

// Where the outputs d and d + 32 of a head go, if anywhere.
template <class C> struct Target;
template <> struct Target<Bf16> {
  bf16* at;  // of d; null: not written
  __device__ __forceinline__ bool exists() const { return at != nullptr; }
};
template <> struct Target<E4m3> {
  bf16* at;    // a query's
  u8* cached;  // a key's or a value's
  float scale;
  __device__ __forceinline__ bool exists() const { return at != nullptr || cached != nullptr; }
};

// Where the cache keeps element d of a token's key head `kv`, from kv_heads on its value heads;
// null for a negative slot. cache: `kv` and its strides `kv_block`, `kv_head`, `kv_token` in
// elements, blocks of 2^`block_shift` tokens; K at 0, V at 64 of each (block, head, token).
template <class Paged>
__device__ __forceinline__ Element* cache_place(
    const Paged& cache, long long slot, int kv, int kv_heads, int d) {
  if (slot < 0) return nullptr;
  const int is_v = kv >= kv_heads;
  return cache.kv + (slot >> cache.block_shift) * cache.kv_block +
         (long long)(kv - (is_v ? kv_heads : 0)) * cache.kv_head +
         (slot & ((1 << cache.block_shift) - 1)) * cache.kv_token + d + (is_v ? 64 : 0);
}
// The same as a target. cache: E4m3: also has the addresses `k_scale` and `v_scale`.
template <class Paged>
__device__ __forceinline__ void cache_target(
    Target<Bf16>& to, const Paged& cache, long long slot, int kv, int kv_heads, int d) {
  to = {cache_place(cache, slot, kv, kv_heads, d)};
}
template <class Paged>
__device__ __forceinline__ void cache_target(
    Target<E4m3>& to, const Paged& cache, long long slot, int kv, int kv_heads, int d) {
  to = {nullptr, cache_place(cache, slot, kv, kv_heads, d),
      __ldg(kv < kv_heads ? cache.k_scale : cache.v_scale)};
}

// One output and the one at d + 32.
__device__ __forceinline__ void put(const Target<Bf16>& to, float2 v) {
  to.at[0] = to_bf16(v.x);
  to.at[32] = to_bf16(v.y);
}
__device__ __forceinline__ void put(const Target<E4m3>& to, float2 v) {
  if (to.at != nullptr) {
    put(Target<Bf16>{to.at}, v);
  } else {
    const u32 codes = encode(rounded(v.x), rounded(v.y), to.scale);
    to.cached[0] = codes;
    to.cached[32] = codes >> 8;
  }
}
// Four neighbours in bf16 and those at d + 32; eight of both.
__device__ __forceinline__ void put(const Target<Bf16>& to, uint2 low, uint2 high) {
  *(uint2*)to.at = low;
  *(uint2*)(to.at + 32) = high;
}
__device__ __forceinline__ void put(const Target<E4m3>& to, uint2 low, uint2 high) {
  if (to.at != nullptr) {
    put(Target<Bf16>{to.at}, low, high);
  } else {
    *(u32*)to.cached = encode4(low, to.scale);
    *(u32*)(to.cached + 32) = encode4(high, to.scale);
  }
}
__device__ __forceinline__ void put(const Target<Bf16>& to, int4 low, int4 high) {
  *(int4*)to.at = low;
  *(int4*)(to.at + 32) = high;
}
__device__ __forceinline__ uint2 encode8(int4 v, float scale) {
  return make_uint2(encode4(make_uint2(v.x, v.y), scale), encode4(make_uint2(v.z, v.w), scale));
}
__device__ __forceinline__ void put(const Target<E4m3>& to, int4 low, int4 high) {
  if (to.at != nullptr) {
    put(Target<Bf16>{to.at}, low, high);
  } else {
    *(uint2*)to.cached = encode8(low, to.scale);
    *(uint2*)(to.cached + 32) = encode8(high, to.scale);
  }
}

// The elements d and d + 32 of a head, rotated. The explicit fmaf fixes which of the two products
// is rounded before the addition. The compiler's choice would differ between kernels.
__device__ __forceinline__ float2 turned_by(float lo, float hi, float cos, float sin) {
  return make_float2(fmaf(lo, cos, -(hi * sin)), fmaf(hi, cos, lo * sin));
}

// The two outputs from their products times the norm's scale; rounded to bf16 before the rotation,
// as in a separate projection.
template <class E>
__device__ __forceinline__ float2 rotate(const Pair<E>& pair, float lo, float hi) {
  lo = rounded(lo + pair.bias_lo);
  hi = rounded(hi + pair.bias_hi);
  return turned_by(lo, hi, pair.cos, pair.sin);
}

// N bf16, read at once.
template <int N> struct __align__(2 * N) Words {
  u32 at[N / 2];
};

// N (4 or 8) of a position's 64 numbers, from `at` on, a multiple of N.
template <int N>
__device__ __forceinline__ void turns(
    float (&to)[N], const void* cos_sin, int cos_sin_bf16, long long at) {
  if (cos_sin_bf16) {
    const Words<N> v = *(const Words<N>*)((const bf16*)cos_sin + at);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float2 f = unpack(v.at[i]);
      to[2 * i] = f.x;
      to[2 * i + 1] = f.y;
    }
  } else {
    const float4* p = (const float4*)((const float*)cos_sin + at);
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const float4 v = p[i];
      to[4 * i] = v.x;
      to[4 * i + 1] = v.y;
      to[4 * i + 2] = v.z;
      to[4 * i + 3] = v.w;
    }
  }
}

// The elements d and d + 1 of a head in `low`, those at d + 32 in `high`.
__device__ __forceinline__ void turn(u32& low, u32& high, float2 cos, float2 sin) {
  const float2 l = unpack(low), h = unpack(high);
  const float2 x = turned_by(l.x, h.x, cos.x, sin.x), y = turned_by(l.y, h.y, cos.y, sin.y);
  low = pack(x.x, y.x);
  high = pack(x.y, y.y);
}
