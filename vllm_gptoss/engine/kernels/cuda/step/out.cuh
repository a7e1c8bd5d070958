// Phase 3: output projection, bias, residual; each block's part of the router logits, added up as
// integers.
//
// Offers: out. Leaves Late.hidden, Zeros.logits. Barriers: named barrier 1, the ring's.
#include "flags.cuh"
#include "rows.cuh"

__device__ __forceinline__ void out(const Args& a, Block& b, const Layer& y, int layer) {
  const int first = share(O_PAIRS, blockIdx.x), pairs = share(O_PAIRS, blockIdx.x + 1) - first,
            rows = pairs * 2;
  // one output a thread
  const int row = b.tid, column = first * 2 + row;
  const bool mine = row < rows;
  float bias = 0.f, norm = 0.f;
  if (mine) {
    if (RANKS == 1 || y.b_out != nullptr) bias = to_float(y.b_out[column]);
    norm = to_float(y.post_norm[column]);
  }
  const int expert = b.tid / R_PARTS, part = b.tid % R_PARTS;
  float wr[R_EACH];
#pragma unroll
  for (int i = 0; i < R_EACH; ++i) {
    const int r = part + i * R_PARTS;
    wr[i] =
        b.tid < 256 && r < rows ? to_float(y.w_router[(long long)expert * C + first * 2 + r]) : 0.f;
  }
  u32 frag[QPW][8];
  const int blocks = b.warp + (QPW - 1) * WARPS < QB ? QPW : QPW - 1;
  const bf16* attended = zeros(a).early[layer & 1].attended + b.warp * 64 + b.j * 16;
  u32 looks = 0;
  bool there;
  do {
    count_look(looks);
    there = true;
#pragma unroll
    for (int k = 0; k < QPW; ++k) {
      int4 v = make_int4(0, 0, 0, 0), w = v;
      if (b.g == 0 && (k < QPW - 1 || blocks == QPW)) {
        v = look16(attended + k * WARPS * 64);
        w = look16(attended + k * WARPS * 64 + 8);
        there &= whole(v) && whole(w);
      }
      words(frag[k], v, w);
    }
  } while (!there);
  __syncwarp();
  mark(a, b, layer, 5);
#pragma unroll 1
  for (int u = 0; u < pairs; u += 8) {
    const int chunks = min(8, pairs - u);
    // rows past the share are the first ones again: their rows of the product are not read
    u32 low = next_chunk(b, O_CHUNK), high = low;
    for (int i = 1; i < chunks; ++i) {
      const u32 here = next_chunk(b, O_CHUNK);
      low = b.g >> 1 == i ? here : low;
      high = (b.g >> 1) + 4 == i ? here : high;
    }
    const u8* from = b.ring + (b.g & 1) * O_PITCH + b.warp * 128 + b.j * 32;
    float c[4] = {}, odd[4] = {};
#pragma unroll
    for (int k = 0; k < QPW; ++k) {
      if (k == QPW - 1 && blocks < QPW) continue;
      Rows here;
      load_rows(here, from + low + k * WARPS * 128, from + high + k * WARPS * 128, chunks > 4);
      multiply_add(c, odd, here, frag[k]);
    }
    release_chunks(b, chunks);
    put_dense(b, c, odd, u * 2);
  }
  mark(a, b, layer, 6);
  sync_consumers();
  float* normed = b.dense + DENSE_ROWS * WARPS;  // [O_ROWS]: h times the norm's weight
  float* squares = normed + O_ROWS;
  if (row < O_ROWS) {
    float h = 0.f;
    if (mine) {
      // rounded to bf16 before the addition, as in a separate projection
      const float sum = over_ranks(a, sum_dense(b, row) + bias, layer, column);
      h = rounded(rounded(sum) + b.s->kept[row]);
      __stcg(zeros(a).late[layer & 1].hidden + column, flagged(h));
    }
    normed[row] = h * norm;
    squares[row] = h * h;
  }
  sync_consumers();
  unsigned long long* sums = zeros(a).logits[layer & 1][blockIdx.x % REPLICAS];
  if (b.tid < 256) {
    float v = 0.f;
#pragma unroll
    for (int i = 0; i < R_EACH; ++i)
      if (part + i * R_PARTS < O_ROWS) v += wr[i] * normed[part + i * R_PARTS];
#pragma unroll
    for (int d = R_PARTS / 2; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
    if (part == 0) add_fixed(sums + expert, v, LOGIT_BITS - b.s->log_rms);
  }
  if (b.warp == WARPS - 1 && b.lane == 0) {
    float v = 0.f;
#pragma unroll
    for (int r = 0; r < O_ROWS; ++r) v += squares[r];
    add_fixed(sums + EXPERTS, v, SQUARE_BITS - 2 * b.s->log_rms);
  }
}
