// Dense projections of a decode step of at most 16 tokens, bf16 weights, fp32 sums (sm_90).
//
//   qkv_rope    [norm(x + r)] Wqkv^T + b, RoPE on q and k; q to memory, k and v to the paged cache
//   out_proj    attention output x Wo^T + b (+ residual)
//   router_topk [norm(x + r)] Wr^T + b, top-k, softmax over the chosen; writes the normed x too
//
// One body serves the three; what is an operation's own is in its header, dense_few/qkv.cuh,
// out.cuh, router.cuh. A *unit* is 8 weight rows over all of C. A CTA owns up to UNITS units and
// streams them row by row (each row of a part is one bulk copy) through a ring of shared-memory
// stages. The ring is filled before griddepcontrol.wait: weights do not depend on the kernel
// before, so they arrive while it still runs.
//
// Warps split C; tokens are the M = 16 side of
// mma.m16n8k16, weight rows the N = 8 side. The k order inside a block of 64 is permuted alike on
// both sides, so that every fragment is contiguous memory: lane j of a quad holds elements
// 16j..16j+15. The RMSNorm scale of a token is a factor of the whole row, so it is applied after
// the product.
//
// Macros set by the host (engine/kernels/dense.py): MODE 0 qkv, 1 out, 2 router; NT 8-token groups
// (1, 2); BLOCKS blocks of 64 in C; PART blocks per stage; WARPS consumer warps (divides PART);
// STAGES; UNITS per CTA at most; MIN_CTAS per multiprocessor the register budget leaves room for;
// EXPERTS, TOPK, CLUSTER (router); CACHE (qkv).
//
// Named barriers: 1, the consumer warps.
#ifdef CLUSTER
#define CLUSTERED __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTERED
#define EXPERTS 32
#define TOPK 1
#define CLUSTER 1
#endif

enum class Mode { QKV, OUT, ROUTER };

// The values of the macros; nothing else reads them.
struct Traits {
  static constexpr Mode mode = Mode(MODE);
  static constexpr int groups = NT, part = PART, warps = WARPS, stages = STAGES, units = UNITS,
                       min_ctas = MIN_CTAS;
  static constexpr int experts = EXPERTS, top_k = TOPK, cluster = CLUSTER;
  static constexpr int columns = BLOCKS * 64, parts = BLOCKS / PART;
  static constexpr int blocks = PART / WARPS;   // of 64 columns, a warp's share of a part
  static constexpr int row_bytes = PART * 128;  // of a part
  // 16 mod 128: the quads of two rows then cover all banks.
  static constexpr int pitch = row_bytes + 16;
  static constexpr int stage_bytes = 8 * pitch;
  static constexpr int tokens = NT * 8, threads = WARPS * 32;
  static constexpr bool normed = mode != Mode::OUT;
  // Up to 8 tokens leave half of the mma's rows idle: they take what rounding x times the norm's
  // weight to bf16 leaves, so that q, k, v and the router's logits carry no rounding of their
  // input.
  static constexpr bool split = normed && groups == 1;
  static constexpr int sums = split ? 4 : 2 * groups;  // of a lane and unit
};

#include "barriers.cuh"
#include "bulk.cuh"
#include "cache.cuh"
#include "common.cuh"

struct Args {
  const bf16* x;     // [T, C] activations
  const bf16* r;     // [T, C] residual, added before the norm or after the product (out); or null
  bf16* r_out;       // [T, C] x + r as bf16 (qkv, router), written by the first CTA; or null
  const bf16* norm;  // [C] RMSNorm weight (qkv, router)
  const bf16* w;     // [N, C] row-major
  const bf16* bias;  // [N]; null: none
  bf16* out;         // qkv: q [T, H*64]; out: [T, N]; router: normed activations [T, C]
  const long long* positions;  // qkv: [T]
  const void* cos_sin;         // qkv: [positions, 64], 32 cosines then 32 sines
  const long long* slots;      // qkv: [>= T] slot of each token, negative: do not write
  Element* kv;                 // qkv: paged cache; K at 0, V at 64 of each (block, head, token)
  long long kv_block, kv_head, kv_token;  // strides in elements
  float* topk_weights;                    // router: [T, TOPK]
  int* topk_ids;                          // router: [T, TOPK]
  float* logits;                          // router: [T, EXPERTS] or null
  int tokens, units, q_rows, kv_rows, block_shift, cos_sin_bf16;
  float eps;
  int out_stride;                  // row stride of out, elements
  const float *k_scale, *v_scale;  // qkv, E4m3: of the cache
};

#include "dense_few/block.cuh"
#include "dense_few/norm.cuh"
#include "dense_few/out.cuh"
#include "dense_few/product.cuh"
#include "dense_few/qkv.cuh"
#include "dense_few/router.cuh"

template <class T, class Op>
__device__ __forceinline__ void run(
    const Args& a, const Block<T>& b, const Norm<T>& norm, const Op& op) {
  begin(b);
  pdl_launch();
  op.begin();
  if (b.warp == T::warps) {
    produce(a, b, norm, op);
    pdl_wait();
    op.end_producer();
    return;
  }
  float acc[T::units][T::sums];
#pragma unroll
  for (int u = 0; u < T::units; ++u)
#pragma unroll
    for (int e = 0; e < T::sums; ++e) acc[u][e] = 0.f;
  u32 frag[T::parts][T::blocks][T::groups][8];
  u32 rest[T::parts][T::blocks][8];
  op.prepare(a, b);
  pdl_wait();
  load_x(frag, a, b);
  if constexpr (T::normed)
    norm_x(frag, rest, a, b, norm);
  else
    op.load_residual(a, b);
  multiply(acc, frag, rest, b, norm);
  const Partials<T> partials = put_partials(acc, b);
  if constexpr (T::normed) scale_tokens(a, b, norm);
  op.finish(a, b, norm, partials, frag);
}

template <class T> __device__ __forceinline__ void choose_operation(const Args& a) {
  extern __shared__ __align__(128) unsigned char ring[];
  __shared__ __align__(8) u64 bars[2 * T::stages + 1];
  __shared__ __align__(16) bf16 norm_w[T::columns];
  __shared__ float squares[T::warps][T::tokens];
  __shared__ float scale[T::tokens];
  const Block<T> b = make_block<T>(a, ring, bars);
  const Norm<T> norm = {norm_w, squares, scale};
  if constexpr (T::mode == Mode::QKV) {
    __shared__ Output outputs[T::units * 4 * T::tokens];
    run(a, b, norm, QkvRope<T>{outputs});
  } else if constexpr (T::mode == Mode::OUT) {
    __shared__ float bias[T::units * 8 * T::tokens], residual[T::units * 8 * T::tokens];
    run(a, b, norm, OutProj<T>{bias, residual});
  } else {
    __shared__ float logits[T::tokens][T::experts], bias[T::units * 8];
    run(a, b, norm, RouterTopk<T>{logits, bias});
  }
}

extern "C" __global__ void CLUSTERED __launch_bounds__(Traits::threads + 32, Traits::min_ctas)
    dense_few(const __grid_constant__ Args a) {
  choose_operation<Traits>(a);
}
