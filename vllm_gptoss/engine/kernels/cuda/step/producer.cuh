// The producing warp: this block's share of the weights of all phases of all layers, in order,
// through the ring.
//
// Offers: produce; first_unit (this block's expert units of a choice). Barriers: mbarriers `full`,
// `empty`, `chosen`.
#include "../bulk.cuh"
#include "../mxfp4.cuh"
#include "../rope.cuh"
#include "state.cuh"

struct Producer {
  Cursor cursor;
  u32 tail;
  u64 policy;
};
// Room for the next chunk: waits for old ones to be used up. Returns its offset.
__device__ __forceinline__ u32 make_room(const Block& b, Producer& p, u32 size) {
  const u32 i = p.cursor.i, at = take(p.cursor, size);
  if (i >= ahead(size))
    bar_wait(b.full + 8 * ((i - ahead(size)) % BARS), ((i - ahead(size)) / BARS) & 1);
  while (p.tail < i && (p.cursor.end > b.s->starts[p.tail % BARS] + RING || i - p.tail >= BARS)) {
    bar_wait(b.empty + 8 * (p.tail % BARS), (p.tail / BARS) & 1);
    p.tail++;
  }
  __syncwarp();
  if (b.lane == 0) b.s->starts[i % BARS] = p.cursor.end - size;
  __syncwarp();
  return at;
}
__device__ __forceinline__ void produce_rows(
    const Block& b, Producer& p, const bf16* w, int row, int rows, int columns, int pitch) {
  const u32 at = make_room(b, p, rows * pitch), bar = b.full + 8 * ((p.cursor.i - 1) % BARS);
  if (b.lane == 0) bar_expect(bar, rows * columns * 2);
  __syncwarp();
  if (b.lane < rows)
    bulk_load(smem_u32(b.ring) + at + b.lane * pitch, w + (long long)(row + b.lane) * columns,
        columns * 2, bar, p.policy);
}
// This block's units of a choice: a share of each, so that each is finished by all blocks early;
// shares differ by a unit, so they turn from choice to choice.
template <int UNITS> __device__ __forceinline__ int first_unit(int choice, int next) {
  return share(UNITS, (int)(blockIdx.x + choice) % GRID + next);
}
template <int ROWS, int K, int PAIRS>
__device__ __forceinline__ void produce_experts(
    const Block& b, Producer& p, const u8* values, const u8* scales) {
  constexpr int UNITS = ROWS / 16, BYTES = 4 * K * 128;
  for (int choice = 0; choice < ACTIVE; ++choice) {
    // Remains valid until this block has consumed everything produced here. Lane 0 reads it, since
    // that lane's arrivals signal consumption.
    const long long expert = __shfl_sync(~0u, b.lane == 0 ? b.s->ids[choice] : 0, 0);
    const int last = first_unit<UNITS>(choice, 1);
    for (int unit = first_unit<UNITS>(choice, 0); unit < last; ++unit) {
      const int tile = row_tile(unit, UNITS);
      const u32 at = make_room(b, p, BYTES + K * 64), bar = b.full + 8 * ((p.cursor.i - 1) % BARS);
      if (b.lane == 0) bar_expect(bar, BYTES + K * 64);
      __syncwarp();
      if (b.lane == 0)
        bulk_load(smem_u32(b.ring) + at, values + (expert * (ROWS / 4) + tile * 4) * (K * 128),
            BYTES, bar, p.policy);
      if (b.lane == 1)
        bulk_load(smem_u32(b.ring) + at + BYTES,
            scales +
                (expert * ((ROWS + 255) / 256 * 8) + (tile >> 4) * 8 + (tile & 7)) * (PAIRS * 64),
            K * 64, bar, p.policy);
    }
  }
}
__device__ __forceinline__ void produce(const Args& a, Block& b, const Layer* layers) {
  Producer p = {};
  p.policy = evict_first();
  const int q_last = share(Q_UNITS, blockIdx.x + 1), o_last = share(O_PAIRS, blockIdx.x + 1);
  for (int l = 0; l < a.layer_count; ++l) {
    const Layer& y = layers[l];
    for (int unit = share(Q_UNITS, blockIdx.x); unit < q_last; ++unit) {
      produce_rows(b, p, y.w_qkv, rope_row(unit, 0), 4, C, Q_PITCH);
      produce_rows(b, p, y.w_qkv, rope_row(unit, 4), 4, C, Q_PITCH);
    }
    for (int pair = share(O_PAIRS, blockIdx.x); pair < o_last; ++pair)
      produce_rows(b, p, y.w_out, pair * 2, 2, Q, O_PITCH);
    bar_wait(b.chosen, l & 1);
    produce_experts<2 * I, HB, SKU>(b, p, y.up_values, y.up_scales);
    produce_experts<C, IB, SKD>(b, p, y.down_values, y.down_scales);
  }
}
