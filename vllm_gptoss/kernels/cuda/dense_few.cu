// Dense projections of a decode step for at most 16 tokens, bf16 weights, fp32 accumulation (sm_90).
//
//   qkv_rope    [norm(x + r)] Wqkv^T + b, RoPE on q and k; q to memory, k and v into the paged cache
//   out_proj    attention output x Wo^T + b (+ residual)
//   router_topk [norm(x + r)] Wr^T + b, top-k, softmax over the chosen; also writes the normed activations
//
// One body serves the three. A *unit* is 8 weight rows over all of C. A CTA owns up to UNITS units and streams them
// row by row (each row of a part is one bulk copy) through a ring of shared-memory stages. The ring is filled before
// griddepcontrol.wait: weights do not depend on the kernel before, so they arrive while it still runs.
// Warps split C; tokens are the M = 16 side of mma.m16n8k16, weight rows the N = 8 side. The k order inside a block of
// 64 is permuted alike on both sides, so that every fragment is contiguous memory: lane j of a quad holds elements
// 16j..16j+15. The RMSNorm scale of a token is a factor of the whole row, so it is applied after the product.
//
// Macros set by the host (kernels/dense.py): MODE 0 qkv, 1 out, 2 router; NT 8-token groups (1, 2); BLOCKS blocks of 64
// in C; PART blocks per stage; WARPS consumer warps (divides PART); STAGES; UNITS per CTA at most;
// MIN_CTAS per multiprocessor the register budget leaves room for; EXPERTS, TOPK, CLUSTER (router).
#include "common.cuh"
#include "bulk.cuh"
#include "topk.cuh"

#define C (BLOCKS * 64)
#define PARTS (BLOCKS / PART)
#define BPW (PART / WARPS)
#define ROW_BYTES (PART * 128)
#define PITCH (ROW_BYTES + 16)  // 16 mod 128: the quads of two rows then cover all banks
#define STAGE_BYTES (8 * PITCH)
#define TOKENS (NT * 8)
// Up to 8 tokens leave half of the mma's rows idle: they take what rounding x times the norm's weight to bf16 leaves, so
// that q, k, v and the router's logits carry no rounding of their input.
#define SPLIT (MODE != 1 && NT == 1)
#define SUMS (SPLIT ? 4 : 2 * NT)

// Sums of rows g and g + 8; without a second half that one is zero and has no registers.
__device__ __forceinline__ void mma_bf16(float (&c)[SUMS], const u32 (&lo)[8], const u32 (&hi)[8], const int k, const u32 b0,
                                         const u32 b1) {
#if SUMS == 2
  [[maybe_unused]] float none0, none1;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%5}, {%7,%8}, {%0,%1,%9,%9};"
      : "+f"(c[0]), "+f"(c[1]), "=f"(none0), "=f"(none1)
      : "r"(lo[2 * k]), "r"(0), "r"(lo[2 * k + 1]), "r"(b0), "r"(b1), "f"(0.f));
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(lo[2 * k]), "r"(hi[2 * k]), "r"(lo[2 * k + 1]), "r"(hi[2 * k + 1]), "r"(b0), "r"(b1));
#endif
}

struct Args {
  const bf16* x;       // [T, C] activations
  const bf16* r;       // [T, C] residual to add before the norm (qkv, router) or after the product (out); or null
  bf16* r_out;         // [T, C] x + r as bf16 (qkv, router), written by the first CTA; or null
  const bf16* norm;    // [C] RMSNorm weight (qkv, router)
  const bf16* w;       // [N, C] row-major
  const bf16* bias;    // [N]; null: none
  bf16* out;           // qkv: q [T, H*64]; out: [T, N]; router: normed activations [T, C]
  const long long* positions;   // qkv: [T]
  const void* cos_sin;          // qkv: [positions, 64], 32 cosines then 32 sines
  const long long* slots;       // qkv: [>= T] slot of each token, negative: do not write
  bf16* kv;            // qkv: paged cache; K at 0, V at 64 of each (block, head, token)
  long long kv_block, kv_head, kv_token;  // strides in elements
  float* topk_weights;          // router: [T, TOPK]
  int* topk_ids;                // router: [T, TOPK]
  float* logits;                // router: [T, EXPERTS] or null
  int tokens, units, q_rows, kv_rows, block_shift, cos_sin_bf16;
  float eps;
  int out_stride;               // row stride of out, elements
};

__device__ __forceinline__ int unit_row(const Args& a, int unit, int n) {
#if MODE == 0
  // rows i..i+3 and i+32..i+35 of a head: RoPE turns (i, i + 32) together
  return (unit >> 3) * 64 + (unit & 7) * 4 + (n & 3) + ((n >> 2) << 5);
#else
  return unit * 8 + n;
#endif
}

#if MODE == 0
// All that an output pair (d, d + 32) of one token needs besides its products; none of it depends on the kernel before.
struct Item {
  float bias_lo, bias_hi, cos, sin;
  bf16* dst;  // null: not written
};
__device__ __forceinline__ Item make_item(const Args& a, int unit, int i, int t) {
  const int row = unit_row(a, unit, i), head = row >> 6, d = row & 63;
  const int q_heads = a.q_rows >> 6, kv_heads = a.kv_rows >> 6;
  Item item = {to_float(a.bias[row]), to_float(a.bias[row + 32]), 1.f, 0.f, nullptr};
  if (head < q_heads + kv_heads) {
    const long long at = a.positions[t] * 64 + d;
    if (a.cos_sin_bf16) {
      item.cos = to_float(((const bf16*)a.cos_sin)[at]); item.sin = to_float(((const bf16*)a.cos_sin)[at + 32]);
    } else {
      item.cos = ((const float*)a.cos_sin)[at]; item.sin = ((const float*)a.cos_sin)[at + 32];
    }
  }
  if (head < q_heads) {
    item.dst = a.out + (long long)t * a.out_stride + row;
  } else {
    const long long slot = a.slots[t];
    const int kv = head - q_heads, is_v = kv >= kv_heads;
    if (slot >= 0)
      item.dst = a.kv + (slot >> a.block_shift) * a.kv_block + (long long)(kv - (is_v ? kv_heads : 0)) * a.kv_head +
                 (slot & ((1 << a.block_shift) - 1)) * a.kv_token + d + (is_v ? 64 : 0);
  }
  return item;
}
#endif

#if MODE != 1
// Two elements of x times the norm's weight, each as a sum of two bf16.
__device__ __forceinline__ void weigh(u32& part, u32& rest, u32 h, u32 norm) {
  const float2 f = unpack(h), w = unpack(norm);
  part = pack(f.x * w.x, f.y * w.y);
  const float2 p = unpack(part);
  rest = pack(f.x * w.x - p.x, f.y * w.y - p.y);
}
#endif

#if MODE == 2
__device__ __forceinline__ void store_cluster(u32 addr, u32 rank, float v) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"(v) : "memory");
}
#endif

#if MODE == 2
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#endif

extern "C" __global__ void CLUSTERED __launch_bounds__(WARPS * 32 + 32, MIN_CTAS) dense_few(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) u64 bars[2 * STAGES + 1];
#if MODE != 1
  __shared__ __align__(16) bf16 norm_w[C];
#endif
#if MODE != 1
  __shared__ float squares[WARPS][TOKENS];
  __shared__ float scale[TOKENS];
#endif
#if MODE == 0
  __shared__ Item items[UNITS * 4 * TOKENS];
#elif MODE == 1
  __shared__ float bias[UNITS * 8 * TOKENS], residual[UNITS * 8 * TOKENS];
#else
  __shared__ float logits[TOKENS][EXPERTS], bias[UNITS * 8];
#endif
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, j = lane & 3;
  const int first = (int)((long long)blockIdx.x * a.units / gridDim.x);
  const int last = (int)((long long)(blockIdx.x + 1) * a.units / gridDim.x);
  const u32 full = smem_u32(bars), empty = full + 8 * STAGES, ring0 = smem_u32(ring);
  const u32 norm_bar = empty + 8 * STAGES;

  if (tid == 0) {
#pragma unroll
    for (int s = 0; s < STAGES; ++s) { bar_init(full + 8 * s, 1); bar_init(empty + 8 * s, WARPS * SPEAKERS); }
    bar_init(norm_bar, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  pdl_launch();
#if MODE == 2
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");  // this CTA runs: its shared memory may be written
#endif

  if (warp == WARPS) {  // producer
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#if MODE != 1
    if (lane == 0) {
      bar_expect(norm_bar, C * 2);
      bulk_load(smem_u32(norm_w), a.norm, C * 2, norm_bar, policy);
    }
#endif
    const int total = (last - first) * PARTS;
    for (int i = 0; i < total; ++i) {
      const int s = i % STAGES;
      if (i >= STAGES) bar_wait(empty + 8 * s, ((i / STAGES) + 1) & 1);
      if (lane == 0) bar_expect(full + 8 * s, 8 * ROW_BYTES);
      __syncwarp();
      if (lane < 8) {
        const long long row = unit_row(a, first + i / PARTS, lane);
        bulk_load(ring0 + s * STAGE_BYTES + lane * PITCH, a.w + row * C + (i % PARTS) * (PART * 64), ROW_BYTES,
                  full + 8 * s, policy);
      }
    }
    pdl_wait();
#if MODE == 2
    asm volatile("barrier.cluster.wait.acquire.aligned;\nbarrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  } else {
    float acc[UNITS][SUMS];
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int e = 0; e < SUMS; ++e) acc[u][e] = 0.f;
    u32 frag[PARTS][BPW][NT][8];
#if MODE == 0 && SPLIT
    u32 rest[PARTS][BPW][8];
#endif
#if MODE == 0
    for (int e = tid; e < (last - first) * 4 * a.tokens; e += WARPS * 32)
      items[e] = make_item(a, first + (e >> 2) / a.tokens, e & 3, (e >> 2) % a.tokens);
#elif MODE == 1
    for (int e = tid; e < (last - first) * 8 * a.tokens; e += WARPS * 32)
      bias[e] = a.bias == nullptr ? 0.f : to_float(a.bias[unit_row(a, first + (e >> 3) / a.tokens, e & 7)]);
#else
    if (tid < (last - first) * 8) bias[tid] = to_float(a.bias[first * 8 + tid]);
#endif
    pdl_wait();
#pragma unroll
    for (int p = 0; p < PARTS; ++p)
#pragma unroll
      for (int b = 0; b < BPW; ++b)
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          const int t = n * 8 + g;
          if (t < a.tokens) {
            load16(frag[p][b][n], a.x + (long long)t * C + (p * PART + warp * BPW + b) * 64 + j * 16);
          } else {
#pragma unroll
            for (int e = 0; e < 8; ++e) frag[p][b][n][e] = 0;
          }
        }
#if MODE == 1
    if (a.r != nullptr)
      for (int e = tid; e < (last - first) * 8 * a.tokens; e += WARPS * 32)
        residual[e] = to_float(a.r[(long long)((e >> 3) % a.tokens) * a.out_stride +
                                   unit_row(a, first + (e >> 3) / a.tokens, e & 7)]);
#else
    bar_wait(norm_bar, 0);
    float ss[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      ss[n] = 0.f;
      const int t = n * 8 + g;
      u32 r[PARTS][BPW][8];
      if (a.r != nullptr) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
          for (int b = 0; b < BPW; ++b)
            if (t < a.tokens) load16(r[p][b], a.r + (long long)t * C + (p * PART + warp * BPW + b) * 64 + j * 16);
      }
#pragma unroll
      for (int p = 0; p < PARTS; ++p)
#pragma unroll
        for (int b = 0; b < BPW; ++b) {
          const long long at = (long long)t * C + (p * PART + warp * BPW + b) * 64 + j * 16;
          if (a.r != nullptr && t < a.tokens) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const float2 f = unpack(frag[p][b][n][e]), h = unpack(r[p][b][e]);
              frag[p][b][n][e] = pack(f.x + h.x, f.y + h.y);
            }
          }
          if (a.r_out != nullptr && blockIdx.x == 0 && t < a.tokens) {
            int4* q = (int4*)(a.r_out + at);
            const u32* f = frag[p][b][n];
            q[0] = make_int4(f[0], f[1], f[2], f[3]);
            q[1] = make_int4(f[4], f[5], f[6], f[7]);
          }
          const int4* q = (const int4*)(norm_w + (p * PART + warp * BPW + b) * 64 + j * 16);
          const int4 v0 = q[0], v1 = q[1];
          const u32 nw[8] = {(u32)v0.x, (u32)v0.y, (u32)v0.z, (u32)v0.w, (u32)v1.x, (u32)v1.y, (u32)v1.z, (u32)v1.w};
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            const float2 f = unpack(frag[p][b][n][e]);
            ss[n] += f.x * f.x + f.y * f.y;
#if MODE == 2
            asm("" : "+r"(frag[p][b][n][e]));  // weighed later; without this it stays unpacked until then, and spills
#elif SPLIT
            weigh(frag[p][b][n][e], rest[p][b][e], frag[p][b][n][e], nw[e]);
#else
            const float2 w = unpack(nw[e]);
            frag[p][b][n][e] = pack(f.x * w.x, f.y * w.y);
#endif
          }
        }
      ss[n] += __shfl_xor_sync(~0u, ss[n], 1);
      ss[n] += __shfl_xor_sync(~0u, ss[n], 2);
      if (j == 0) squares[warp][n * 8 + g] = ss[n];
    }
#endif
    int i = 0;
#pragma unroll
    for (int u = 0; u < UNITS; ++u) {
      if (first + u < last) {
#pragma unroll
        for (int p = 0; p < PARTS; ++p, ++i) {
          const int s = i % STAGES;
          bar_wait(full + 8 * s, (i / STAGES) & 1);
          float odd[SUMS] = {};  // a second chain: one mma waits for the one before on the same sum
#pragma unroll
          for (int b = 0; b < BPW; ++b) {
            const int4* q = (const int4*)(ring + s * STAGE_BYTES + g * PITCH + (warp * BPW + b) * 128 + j * 32);
            const int4 w0 = q[0], w1 = q[1];
            const u32 w[8] = {(u32)w0.x, (u32)w0.y, (u32)w0.z, (u32)w0.w, (u32)w1.x, (u32)w1.y, (u32)w1.z, (u32)w1.w};
#if MODE == 2
            const u32* nw = (const u32*)(norm_w + (p * PART + warp * BPW + b) * 64 + j * 16);
#endif
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#if MODE == 2
              u32 part[NT][8], rest[NT][8];
#pragma unroll
              for (int e = 2 * k; e < 2 * k + 2; ++e)
#pragma unroll
                for (int n = 0; n < NT; ++n) weigh(part[n][e], rest[n][e], frag[p][b][n][e], nw[e]);
              if (SPLIT) {
                mma_bf16(k & 1 ? odd : acc[u], part[0], rest[0], k, w[2 * k], w[2 * k + 1]);
              } else {
                mma_bf16(acc[u], part[0], part[NT - 1], k, w[2 * k], w[2 * k + 1]);
                mma_bf16(odd, rest[0], rest[NT - 1], k, w[2 * k], w[2 * k + 1]);
              }
#elif SPLIT
              mma_bf16(k & 1 ? odd : acc[u], frag[p][b][0], rest[p][b], k, w[2 * k], w[2 * k + 1]);
#else
              mma_bf16(k & 1 ? odd : acc[u], frag[p][b][0], frag[p][b][NT - 1], k, w[2 * k], w[2 * k + 1]);
#endif
            }
          }
#pragma unroll
          for (int e = 0; e < SUMS; ++e) acc[u][e] += odd[e];
          __syncwarp();
          bar_arrive_warp(empty + 8 * s, lane);
        }
      }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");  // the ring is free: it holds the partial sums now
#if SPLIT
#pragma unroll
    for (int u = 0; u < UNITS; ++u) { acc[u][0] += acc[u][2]; acc[u][1] += acc[u][3]; }
#endif
    float* red = (float*)ring;  // [WARPS][UNITS][TOKENS][8]
#pragma unroll
    for (int u = 0; u < UNITS; ++u)
#pragma unroll
      for (int n = 0; n < NT; ++n)
        *(float2*)&red[((warp * UNITS + u) * TOKENS + n * 8 + g) * 8 + j * 2] =
            make_float2(acc[u][2 * n], acc[u][2 * n + 1]);
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
#define PARTIAL(w, u, t, n) red[(((w) * UNITS + (u)) * TOKENS + (t)) * 8 + (n)]
#if MODE != 1
    if (tid < TOKENS) {
      float s = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) s += squares[w][tid];
      scale[tid] = rsqrtf(s / C + a.eps);
    }
    asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
#endif
#if MODE == 0
    for (int e = tid; e < (last - first) * 4 * a.tokens; e += WARPS * 32) {
      const int i = e & 3, t = (e >> 2) % a.tokens, u = (e >> 2) / a.tokens;
      float lo = 0.f, hi = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) { lo += PARTIAL(w, u, t, i); hi += PARTIAL(w, u, t, i + 4); }
      const Item item = items[e];
      // rounded to bf16 before the rotation, as a projection that stands alone is
      lo = to_float(to_bf16(lo * scale[t] + item.bias_lo));
      hi = to_float(to_bf16(hi * scale[t] + item.bias_hi));
      if (item.dst != nullptr) {
        item.dst[0] = to_bf16(lo * item.cos - hi * item.sin);
        item.dst[32] = to_bf16(hi * item.cos + lo * item.sin);
      }
    }
#elif MODE == 1
    for (int e = tid; e < (last - first) * 8 * a.tokens; e += WARPS * 32) {
      const int n = e & 7, t = (e >> 3) % a.tokens, u = (e >> 3) / a.tokens;
      float v = bias[e];
#pragma unroll
      for (int w = 0; w < WARPS; ++w) v += PARTIAL(w, u, t, n);
      // rounded to bf16 before the addition, as a projection that stands alone is
      if (a.r != nullptr) v = to_float(to_bf16(v)) + residual[e];
      a.out[(long long)t * a.out_stride + unit_row(a, first + u, n)] = to_bf16(v);
    }
#endif
#if MODE == 2
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int e = tid; e < (last - first) * 8 * a.tokens; e += WARPS * 32) {
      const int n = e & 7, t = (e >> 3) % a.tokens, u = (e >> 3) / a.tokens;
      float v = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) v += PARTIAL(w, u, t, n);
      const int row = unit_row(a, first + u, n);
      v = v * scale[t] + bias[u * 8 + n];
      if (a.logits != nullptr) a.logits[(long long)t * EXPERTS + row] = v;
      store_cluster(smem_u32(&logits[t][row]), t % CLUSTER, v);
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    // the normed activations, each CTA its share of the columns
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int t = n * 8 + g;
      if (t < a.tokens) {
        const float rs = scale[t];
#pragma unroll
        for (int p = 0; p < PARTS; ++p)
#pragma unroll
          for (int b = 0; b < BPW; ++b) {
            const int blk = p * PART + warp * BPW + b;
            if (blk % CLUSTER != blockIdx.x) continue;
            const u32* nw = (const u32*)(norm_w + blk * 64 + j * 16);
            u32 o[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              const float2 f = unpack(frag[p][b][n][e]), w = unpack(nw[e]);
              o[e] = pack(f.x * rs * w.x, f.y * rs * w.y);
            }
            int4* q = (int4*)(a.out + (long long)t * a.out_stride + blk * 64 + j * 16);
            q[0] = make_int4(o[0], o[1], o[2], o[3]);
            q[1] = make_int4(o[4], o[5], o[6], o[7]);
          }
      }
    }
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    for (int t = blockIdx.x + warp * CLUSTER; t < a.tokens; t += WARPS * CLUSTER) {
      float f[EXPERTS / 32];
#pragma unroll
      for (int i = 0; i < EXPERTS / 32; ++i) f[i] = logits[t][lane * (EXPERTS / 32) + i];
      choose<EXPERTS / 32, TOPK>(f, a.topk_weights + (long long)t * TOPK, a.topk_ids + (long long)t * TOPK, lane);
    }
#endif
  }
}
