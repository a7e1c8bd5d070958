// Phases 4 and 5: top-k, RMSNorm, MXFP4 up projection, clamped SwiGLU of the chosen experts; MXFP4
// down projection, weighted.
//
// Offers: up, down. Leave Late.act, Late.parts; up also clears what all blocks have read. Barriers:
// named barrier 1, mbarriers `chosen`, `sums_full`, `sums_free`, the ring's.
#include "../mxfp4.cuh"
#include "../topk.cuh"
#include "attend.cuh"
#include "flags.cuh"
#include "producer.cuh"
#include "qkv.cuh"
#include "rows.cuh"

// One warp: the choices.
__device__ __forceinline__ void choose_experts(
    const Args& a, Block& b, const float (&bias)[EACH], int layer) {
  const unsigned long long* sums = zeros(a).logits[layer & 1][0];
  const int log = b.s->log_rms;
  const unsigned long long* at[EACH + 1];
  long long v[EACH + 1];
#pragma unroll
  for (int i = 0; i < EACH; ++i) at[i] = sums + b.lane * EACH + i;
  at[EACH] = sums + EXPERTS;
  settle_fixed<EACH + 1>(v, at);
  float f[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) f[i] = (float)v[i] * power_of_two(log - LOGIT_BITS);
  const float square = (float)v[EACH] * power_of_two(2 * log - SQUARE_BITS);
  const float norm = rsqrtf(square / C + a.eps);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < EACH; ++i) f[i] = f[i] * norm + bias[i];
  choose<EACH, ACTIVE>(f, b.s->weights, b.s->ids, b.lane);
  if (b.lane == 0) b.s->scale = norm;
  __syncwarp();
  bar_arrive_warp(b.chosen, b.lane);
}

__device__ __forceinline__ int4 times_two_64(int4 v) {
  return make_int4(mul_bf16x2(v.x, TWO_64), mul_bf16x2(v.y, TWO_64), mul_bf16x2(v.z, TWO_64),
      mul_bf16x2(v.w, TWO_64));
}

// This warp's share of one unit: 16 rows times the token, in c[0] and c[2] of lanes with j = 0.
template <int K, int EACH>
__device__ __forceinline__ void expert_product(float (&c)[4], const u8* unit, int half, int first,
    const u32 (&x)[EACH][8], int lane, u32 two_23) {
  const u32 values = smem_u32(unit) + (lane >> 3) * (K * 128) + ((lane >> 2) & 1) * 64 +
                     (lane & 3) * 16 + first * 128;
  const u32 scales = smem_u32(unit) + 4 * K * 128 + half * 32 + (lane >> 2) * 4 + first * 64;
  c[0] = c[1] = c[2] = c[3] = 0.f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (K < EACH * WARPS && first + i >= K) break;
    const uint4 v = lds16(values + i * 128);
    const u32 s = lds4(scales + i * 64);
    group(c, v.x, v.y, scale<0>(s, two_23), scale<1>(s, two_23), x[i]);
    group(c, v.z, v.w, scale<2>(s, two_23), scale<3>(s, two_23), x[i] + 4);
  }
}

// The fragments of this warp's columns of the staged row, which are all eight columns of the
// operand.
template <int EACH> __device__ __forceinline__ void load_x(u32 (&x)[EACH][8], const Block& b) {
  const u32 at = smem_u32(b.xs) + b.warp * HPW * 128 + (b.lane >> 3) * 16;
#pragma unroll
  for (int k = 0; k < EACH; ++k) {
    u32 lo[4], hi[4];
    ldmatrix4(lo, at + k * 128);
    ldmatrix4(hi, at + k * 128 + 64);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[k][e] = lo[e];
      x[k][4 + e] = hi[e];
    }
  }
}

// This block's units of one choice. UP: act[choice] = swiglu(w13 x + b13); else parts[choice] =
// weight x (w2 act + b2). Warps take turns in summing up and finishing; the others go on.
template <bool UP>
__device__ __forceinline__ void expert_units(
    const Args& a, Block& b, const Layer& y, int choice, int layer) {
  constexpr int K = UP ? HB : IB, PW = UP ? HPW : IPW, ROWS = UP ? 2 * I : C, UNITS = ROWS / 16;
  constexpr int OUTS = UP ? 8 : 16,
                TURNS = (FLUSH * OUTS + 31) / 32;  // outputs of a unit; of a flush, a lane
  Late& late = zeros(a).late[layer & 1];
  const int last = first_unit<UNITS>(choice, 1);
  const float* biases = (UP ? y.up_bias : y.down_bias) + (long long)b.s->ids[choice] * ROWS;
  u32 x[PW][8];
  load_x(x, b);
  for (int start = first_unit<UNITS>(choice, 0); start < last; start += FLUSH, ++b.flush) {
    const int count = min(FLUSH, last - start), buffer = b.flush % BUFFERS,
              round = b.flush / BUFFERS;
    const bool finish = b.flush % WARPS == (u32)b.warp;
    float* sums = b.sums + buffer * SUM;  // [FLUSH][WARPS][16]
    // bias of this lane's outputs, r of unit u: loaded early
    float2 bias[TURNS];
    if (finish) {
#pragma unroll
      for (int i = 0; i < TURNS; ++i) {
        const int o = i * 32 + b.lane, u = min(o / OUTS, count - 1), r = o % OUTS;
        const float* from = biases + row_tile(start + u, UNITS) * 16 + (UP ? 2 * r : r);
        bias[i] = UP ? __ldg((const float2*)from) : make_float2(__ldg(from), 0.f);
      }
    }
    if (round > 0) bar_wait(b.sums_free + 8 * buffer, (round - 1) & 1);
    for (int i = 0; i < count; ++i) {
      const u32 at = next_chunk(b, UP ? UP_CHUNK : DOWN_CHUNK);
      float c[4];
      expert_product<K>(
          c, b.ring + at, (row_tile(start + i, UNITS) >> 3) & 1, b.warp * PW, x, b.lane, a.two_23);
      float* to = sums + (i * WARPS + b.warp) * 16 + b.g;
      if (b.j == 0) {
        to[0] = c[0];
        to[8] = c[2];
      }
      release_chunks(b, 1);
    }
    bar_arrive_warp(b.sums_full + 8 * buffer, b.lane);
    if (!finish) continue;
    bar_wait(b.sums_full + 8 * buffer, round & 1);
#pragma unroll
    for (int i = 0; i < TURNS; ++i) {
      const int o = i * 32 + b.lane, u = o / OUTS, r = o % OUTS;
      if (u >= count) continue;
      const int tile = row_tile(start + u, UNITS);
      const float* from = sums + u * WARPS * 16;
      float first = bias[i].x, second = bias[i].y;
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        first += from[w * 16 + (UP ? 2 * r : r)];
        if (UP) second += from[w * 16 + 2 * r + 1];
      }
      if (UP) {
        const float gate = fminf(first, a.limit), lin = fminf(fmaxf(second, -a.limit), a.limit);
        __stcg(late.act[choice] + tile * 8 + r,
            flagged(gate / (1.f + __expf(-a.alpha * gate)) * (lin + 1.f)));
      } else {
        Part part;
        flag(part, first * b.s->weights[choice]);
        __stcg(late.parts[choice] + tile * 16 + r, part);
        push(a, received(a).parts[layer & 1][a.rank][choice] + tile * 16 + r, part);
      }
    }
    __syncwarp();
    bar_arrive_warp(b.sums_free + 8 * buffer, b.lane);
  }
}

__device__ __forceinline__ int clear(void* what, int bytes, const Block& b) {
  int done = 0;
  for (int i = blockIdx.x * THREADS + b.tid; i < bytes / 16; i += GRID * THREADS, ++done)
    __stcg((int4*)what + i, make_int4(0, 0, 0, 0));
  return done;
}
// Zeroes the buffers that all blocks have read by now, for the layer after the next. The zeros
// become visible before the later writes of this block.
__device__ __forceinline__ void clear_read(const Args& a, const Block& b, int layer) {
  Zeros& z = zeros(a);
  int done = clear(z.early + (layer & 1), sizeof(Early), b);
  if (layer > 0) done += clear(z.late + ((layer - 1) & 1), sizeof(Late), b);
  done += clear(z.logits[(layer + 1) & 1], sizeof(z.logits[0]), b);
  if (done) __threadfence();
}

__device__ __forceinline__ void up(
    const Args& a, Block& b, const Layer& y, const Layer* after, int layer) {
  Late& late = zeros(a).late[layer & 1];
  const int column = (b.warp * HPW * 8 + b.lane) * 8;
  const bool mine = b.lane < HPW * 8;
  int4 norm = make_int4(0, 0, 0, 0);
  float bias[EACH];
  if (mine) norm = __ldg((const int4*)(y.post_norm + column));
#pragma unroll
  for (int i = 0; i < EACH; ++i)
    bias[i] = b.warp == 0 ? to_float(y.b_router[b.lane * EACH + i]) : 0.f;
  if (after != nullptr) {
    make_items(a, b, *after, layer + 1);
    b.blocks = next_blocks(b, *after);
  }
  mark(a, b, layer, 7);
  int4 h = make_int4(0, 0, 0, 0);
  if (mine) h = look16(late.hidden + column);
  if (b.warp == 0) choose_experts(a, b, bias, layer);
  if (mine) h = settle(h, late.hidden + column);
  sync_consumers();  // the choices are known
  mark(a, b, layer, 8);
  if (mine) {
    float nw[8], x[8];
    split8(nw, norm);
    split8(x, h);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = x[e] * b.s->scale * nw[e];
    *(int4*)(b.xs + column * 2) = times_two_64(join8(x));
  }
  __syncwarp();
  clear_read(a, b, layer);
  if (RANKS > 1) clear_received(a, b, layer);
  for (int choice = 0; choice < ACTIVE; ++choice) expert_units<true>(a, b, y, choice, layer);
  mark(a, b, layer, 9);
}

__device__ __forceinline__ void down(const Args& a, Block& b, const Layer& y, int layer) {
  Late& late = zeros(a).late[layer & 1];
  const int blocks = IB == IPW * WARPS ? IPW : min(IPW, IB - b.warp * IPW),
            column = (b.warp * IPW * 8 + b.lane) * 8;
  u8* const staged = b.xs + (b.warp * HPW * 8 + b.lane) * 16;
  const bool mine = b.lane < blocks * 8;
  int4 act = make_int4(0, 0, 0, 0);
  if (mine) act = look16(late.act[0] + column);
  for (int choice = 0; choice < ACTIVE; ++choice) {
    __syncwarp();  // all lanes have read what was staged before
    if (mine) *(int4*)staged = times_two_64(settle(act, late.act[choice] + column));
    __syncwarp();
    if (choice == 0) mark(a, b, layer, 10);
    if (mine && choice + 1 < ACTIVE) act = look16(late.act[choice + 1] + column);
    expert_units<false>(a, b, y, choice, layer);
  }
  mark(a, b, layer, 11);
}
