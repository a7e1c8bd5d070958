// Attention with sinks over a paged bf16 cache for a decode step (sm_90): one launch, no combine kernel.
//
// Grid tokens * key/value heads * SPLITS, clusters of SPLITS. A CTA takes one token, one key/value head with its 8
// query heads, and one contiguous share of the keys; its warps take chunks of 16 keys in turn. Fragments of K, V and Q
// are loaded from global memory straight into mma registers: k = head dimension is permuted alike in Q and K (lane j
// of a quad holds elements 16j..16j+15), and V's columns are permuted so that a lane holds 8 neighbours of a row and
// pairs of keys are made by byte permutes. Warps merge in shared memory, CTAs of the cluster through distributed
// shared memory.
//
// Keys of earlier steps, block table and lengths do not depend on the kernel before, so the first chunk is loaded before
// griddepcontrol.wait; only chunks with keys that this very step writes are loaded again after it.
//
// Macros: SPLITS (cluster size), WARPS, WINDOW (keys a token sees, itself included; 0: all).
#include "common.cuh"

#define GROUP 8  // query heads per key/value head
#define D 64
#define CHUNK 16
#define NEG __int_as_float(0xff800000)

__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ int4 ldcg(const bf16* p) { return __ldcg((const int4*)p); }
#define PART(v, i) ((i) == 0 ? (u32)(v).x : (i) == 1 ? (u32)(v).y : (i) == 2 ? (u32)(v).z : (u32)(v).w)

struct Args {
  const bf16* q;   // [T, q_stride], H heads of 64
  const bf16* kv;  // paged cache; K at 0, V at 64 of each (block, head, token)
  bf16* out;       // [T, out_stride]
  const bf16* sinks;  // [H]
  const int* block_table;   // [requests, table_stride]
  const int* seq_lens;      // [requests] keys of each request, this step's included
  const int* query_start;   // [requests + 1]
  long long kv_block, kv_head, kv_token;  // strides in elements
  int kv_heads, requests, table_stride, block_shift, q_stride, out_stride;
  float scale;              // softmax scale times log2(e)
};

struct Chunk {
  int4 k[2][2];  // two groups of 8 keys
  int4 v[4];     // keys 2j, 2j + 1, 2j + 8, 2j + 9 of the 16; 8 columns each
};

__device__ __forceinline__ const bf16* key_at(const Args& a, const bf16* kv, const int* table, int key) {
  return kv + (long long)table[key >> a.block_shift] * a.kv_block + (key & ((1 << a.block_shift) - 1)) * a.kv_token;
}
// Keys past the end are clamped to the last one: their scores are masked, their values finite.
__device__ __forceinline__ void load_chunk(Chunk& c, const Args& a, const bf16* kv, const int* table, int base,
                                           int end, int g, int j) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const bf16* p = key_at(a, kv, table, min(base + n * 8 + g, end - 1)) + j * 16;
    c.k[n][0] = ldcg(p);
    c.k[n][1] = ldcg(p + 8);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    c.v[i] = ldcg(key_at(a, kv, table, min(base + 2 * j + (i & 1) + (i >> 1) * 8, end - 1)) + D + g * 8);
}

#if SPLITS > 1
#define CLUSTERED __cluster_dims__(SPLITS, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(WARPS * 32) attention_few(const __grid_constant__ Args a) {
  __shared__ float part_o[WARPS][GROUP][D + 4];
  __shared__ float part_m[WARPS][GROUP], part_l[WARPS][GROUP];
#if SPLITS > 1
  __shared__ float cta_o[GROUP][D];
  __shared__ float cta_m[GROUP], cta_l[GROUP];
#endif
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, j = lane & 3;
  const int split = blockIdx.x % SPLITS, head = blockIdx.x / SPLITS % a.kv_heads;
  const int token = blockIdx.x / SPLITS / a.kv_heads;
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  // which request the token belongs to, and how many keys it sees
  int request = 0;
  for (int r = 0; r < a.requests; r += 32)
    request += __popc(__ballot_sync(~0u, r + lane < a.requests && a.query_start[r + lane + 1] <= token));
  int keys = 0, fresh = 0;
  if (request < a.requests) {
    const int len = a.seq_lens[request];
    const int after = a.query_start[request + 1] - 1 - token;
    keys = len - after;
    fresh = len - (a.query_start[request + 1] - a.query_start[request]);  // first key that this step writes
    if (keys < 0) keys = 0;
  }
  const int low = WINDOW > 0 ? max(0, keys - WINDOW) : 0;
  const int share = (((keys - low + SPLITS - 1) / SPLITS) + CHUNK - 1) / CHUNK * CHUNK;
  const int begin = low + split * share, end = min(keys, begin + share);
  const int* table = a.block_table + (long long)min(request, a.requests - 1) * a.table_stride;
  const bf16* kv = a.kv + head * a.kv_head;

  constexpr int OUTS = GROUP * D / SPLITS;  // outputs that this CTA writes, consecutive from split * OUTS
  float sink[(OUTS + WARPS * 32 - 1) / (WARPS * 32)];
#pragma unroll
  for (int i = 0; i < (OUTS + WARPS * 32 - 1) / (WARPS * 32); ++i) {
    const int e = min(split * OUTS + i * WARPS * 32 + tid, GROUP * D - 1);
    sink[i] = to_float(a.sinks[head * GROUP + e / D]) * 1.4426950408889634f;
  }

  Chunk now;
  int base = begin + warp * CHUNK;
  if (base < end) load_chunk(now, a, kv, table, base, end, g, j);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (base < end && base + CHUNK > fresh) load_chunk(now, a, kv, table, base, end, g, j);

  u32 q[8];
  {
    const bf16* p = a.q + (long long)token * a.q_stride + (head * GROUP + g) * D + j * 16;
    const int4 x = ldcg(p), y = ldcg(p + 8);
    q[0] = x.x; q[1] = x.y; q[2] = x.z; q[3] = x.w; q[4] = y.x; q[5] = y.y; q[6] = y.z; q[7] = y.w;
  }
  float m = NEG, l = 0.f;
  float o[8][2];  // o[t] = (column 16j + t, column 16j + 8 + t) of head g
#pragma unroll
  for (int t = 0; t < 8; ++t) o[t][0] = o[t][1] = 0.f;

  for (; base < end; base += WARPS * CHUNK) {
    const int following = base + WARPS * CHUNK;
    float s[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.f;
#pragma unroll
      for (int k = 0; k < 4; ++k)
        mma_bf16(s[n], q[2 * k], 0, q[2 * k + 1], 0, PART(now.k[n][k >> 1], (k & 1) * 2), PART(now.k[n][k >> 1], (k & 1) * 2 + 1));
    }
    float top = m;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[n][e] = base + n * 8 + 2 * j + e < end ? s[n][e] * a.scale : NEG;
        top = fmaxf(top, s[n][e]);
      }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float keep = exp2f(m - top);  // the chunk has at least one key, so top is finite
    m = top;
    float sum = 0.f;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) { s[n][e] = exp2f(s[n][e] - top); sum += s[n][e]; }
    l = l * keep + sum;
    const u32 p0 = pack(s[0][0], s[0][1]), p1 = pack(s[1][0], s[1][1]);
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      const u32 sel = (t & 1) ? 0x7632u : 0x5410u;
      const u32 b0 = __byte_perm(PART(now.v[0], t >> 1), PART(now.v[1], t >> 1), sel);
      const u32 b1 = __byte_perm(PART(now.v[2], t >> 1), PART(now.v[3], t >> 1), sel);
      float c[4] = {o[t][0] * keep, o[t][1] * keep, 0.f, 0.f};
      mma_bf16(c, p0, 0, p1, 0, b0, b1);
      o[t][0] = c[0]; o[t][1] = c[1];
    }
    if (following < end) load_chunk(now, a, kv, table, following, end, g, j);
  }
  l += __shfl_xor_sync(~0u, l, 1);
  l += __shfl_xor_sync(~0u, l, 2);

#pragma unroll
  for (int t = 0; t < 8; t += 4) {
    *(float4*)&part_o[warp][g][16 * j + t] = make_float4(o[t][0], o[t + 1][0], o[t + 2][0], o[t + 3][0]);
    *(float4*)&part_o[warp][g][16 * j + 8 + t] = make_float4(o[t][1], o[t + 1][1], o[t + 2][1], o[t + 3][1]);
  }
  if (j == 0) { part_m[warp][g] = m; part_l[warp][g] = l; }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < (GROUP * D + WARPS * 32 - 1) / (WARPS * 32); ++i) {
    const int e = i * WARPS * 32 + tid, h = e / D, d = e % D;
    float top = NEG;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) top = fmaxf(top, part_m[w][h]);
    float sum = 0.f, den = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float f = part_m[w][h] == NEG ? 0.f : exp2f(part_m[w][h] - top);
      sum += f * part_o[w][h][d];
      den += f * part_l[w][h];
    }
#if SPLITS > 1
    cta_o[h][d] = sum;
    if (d == 0) { cta_m[h] = top; cta_l[h] = den; }
#else
    const float all = fmaxf(top, sink[i]);
    const float f = top == NEG ? 0.f : exp2f(top - all);
    a.out[(long long)token * a.out_stride + (head * GROUP + h) * D + d] =
        to_bf16(sum * f / (den * f + exp2f(sink[i] - all)));
#endif
  }
#if SPLITS > 1
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const u32 o_addr = smem_u32(&cta_o[0][0]), m_addr = smem_u32(cta_m), l_addr = smem_u32(cta_l);
#pragma unroll
  for (int i = 0; i < (OUTS + WARPS * 32 - 1) / (WARPS * 32); ++i) {
    const int e = split * OUTS + i * WARPS * 32 + tid, h = e / D;
    if (e >= (split + 1) * OUTS) break;
    float ms[SPLITS], ls[SPLITS], os[SPLITS];
#pragma unroll
    for (int c = 0; c < SPLITS; ++c) {
      u32 r;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(m_addr + h * 4), "r"(c));
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(ms[c]) : "r"(r));
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(l_addr + h * 4), "r"(c));
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(ls[c]) : "r"(r));
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(o_addr + e * 4), "r"(c));
      asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(os[c]) : "r"(r));
    }
    float top = sink[i];
#pragma unroll
    for (int c = 0; c < SPLITS; ++c) top = fmaxf(top, ms[c]);
    float sum = 0.f, den = exp2f(sink[i] - top);
#pragma unroll
    for (int c = 0; c < SPLITS; ++c) {
      const float f = ms[c] == NEG ? 0.f : exp2f(ms[c] - top);
      sum += f * os[c];
      den += f * ls[c];
    }
    a.out[(long long)token * a.out_stride + head * GROUP * D + e] = to_bf16(sum / den);
  }
  // nobody leaves while a neighbour still reads its shared memory
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
