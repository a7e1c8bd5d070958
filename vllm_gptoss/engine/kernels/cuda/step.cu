// All layers of a decode step of one token in one launch (sm_90): one block per multiprocessor,
// resident for the whole step, five phases a layer. With one token every weight is used once, so a
// step is at best as fast as memory is read; launch by launch memory rests at every boundary, here
// it is read through them.
//
//   qkv       x = h + experts' sums, RMSNorm, q/k/v projection, bias, RoPE, cache write
//   attend    sinks, window or all keys
//   out       projection, bias, residual h; each block's part of the router logits, as integers
//   up        top-k, RMSNorm, MXFP4 up projection, clamped SwiGLU of the chosen experts
//   down      MXFP4 down projection, weighted
//
// One warp produces: it walks the weights of all phases of all layers in order and copies this
// block's share through one ring in shared memory, as far ahead as the ring is long. Weights depend
// on nothing but the chosen experts, so memory is read while the 15 consuming warps wait for other
// blocks. Warps split K, so each stages only its own columns of the activations; sums over the
// warps go through shared memory.
//
// The values that a phase passes to the next are also its flags: buffers start as +0, a zero is
// written as -0, and readers poll until no value is +0. The router's logits count their
// contributors in their upper bits. No fence and no barrier is needed. Buffers alternate between
// layers; a block that sees all logits of a layer knows that all blocks have read what came before,
// and zeroes its share of it.
//
// Nothing depends on an order of arrival: the logits are 64-bit fixed point (integer sums do not
// depend on the order), everything else has one writer. Repeats are equal to the bit.
//
// All blocks must be on the GPU at once: grid = multiprocessors, one block each. A wait for another
// block traps after SPIN_LIMIT polls: an error, not a hang.
//
// With tensor parallelism every rank launches it for its share of the weights, and RANKS > 1.
// Blocks of one index own the same rows of `out` on all ranks: each stores its partial sums into
// its peers' memory and adds the peers' sums, so all ranks compute the same h and logits. The parts
// of `down` are stored into the peers' memory as well. Values are flags there too. What peers wrote
// is zeroed by this rank, a layer later, before the peers can know that it goes on:
// `clear_received`.
//
// Macros set by the host (engine/kernels/step.py): LAYERS; GRID; RING bytes; HB, QB, IB blocks of
// 64 of hidden, query heads, intermediate; EXPERTS, ACTIVE; SKU, SKD column pairs in the scale
// storage of up and down; SPLITS of a head's keys at most; RANKS; TRACE: clock marks; CACHE.
//
// Named barriers: 1, the consuming warps. One phase a header, in step/.
#include "step/attend.cuh"
#include "step/experts.cuh"
#include "step/flags.cuh"
#include "step/out.cuh"
#include "step/producer.cuh"
#include "step/qkv.cuh"
#include "step/rows.cuh"
#include "step/state.cuh"

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    decode_step(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Shared s;
  __shared__ Layer layers[LAYERS];
  Block b;
  b.s = &s;
  b.ring = memory;
  b.xs = memory + RING;
  b.sums = (float*)(b.xs + X_BYTES);
  b.dense = b.sums + BUFFERS * SUM;
  b.full = smem_u32(s.bars);
  b.empty = b.full + 8 * BARS;
  b.sums_full = b.empty + 8 * BARS;
  b.sums_free = b.sums_full + 8 * BUFFERS;
  b.chosen = b.sums_free + 8 * BUFFERS;
  b.tid = threadIdx.x;
  b.warp = b.tid >> 5;
  b.lane = b.tid & 31;
  b.g = b.lane >> 2;
  b.j = b.lane & 3;
  b.cursor = {};
  b.flush = 0;
  for (int i = b.tid; i < a.layer_count * (int)(sizeof(Layer) / 8); i += THREADS + 32)
    ((u64*)layers)[i] = ((const u64*)a.layers)[i];
  if (b.tid == 0) {
    for (int i = 0; i < BARS; ++i) {
      bar_init(b.full + 8 * i, 1);
      bar_init(b.empty + 8 * i, WARPS * SPEAKERS);
    }
    for (int i = 0; i < BUFFERS; ++i) {
      bar_init(b.sums_full + 8 * i, WARPS * SPEAKERS);
      bar_init(b.sums_free + 8 * i, SPEAKERS);
    }
    bar_init(b.chosen, SPEAKERS);
    bar_init_done();
  }
  __syncthreads();
  if (b.warp == WARPS) {
    produce(a, b, layers);
    return;
  }
  pdl_wait();
  find_request(a, b);
  make_items(a, b, layers[0], 0);
  sync_consumers();
  b.blocks = next_blocks(b, layers[0]);
  for (int l = 0; l < a.layer_count; ++l) {
    const Layer& y = layers[l];
    qkv(a, b, y, l);
    attend(a, b, y, l);
    out(a, b, y, l);
    up(a, b, y, l + 1 < a.layer_count ? layers + l + 1 : nullptr, l);
    down(a, b, y, l);
  }
  const Late& late = zeros(a).late[(a.layer_count - 1) & 1];
  const int column = (b.warp * HPW * 8 + b.lane) * 8;
  if (b.lane < HPW * 8)
    if (column / 8 % GRID == blockIdx.x) {
      float x[8];
      mix8(x, a, a.layer_count - 1, column);
      *(int4*)(a.out + column) = join8(x);
      *(int4*)(a.hidden + column) = __ldcg((const int4*)(late.hidden + column));
    }
}
