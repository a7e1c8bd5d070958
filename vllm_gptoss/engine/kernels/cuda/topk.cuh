// The router's choice. Included as text: nvrtc.source.

// A float as an unsigned number of the same order.
__device__ __forceinline__ u32 ordered(float f) {
  const u32 u = __float_as_uint(f);
  return u ^ ((u >> 31) ? 0xffffffffu : 0x80000000u);
}
// One warp: the PICKS largest of 32 * EACH logits, lane * EACH + i in f[i] (lower index wins a
// tie), softmax over them.
template <int EACH, int PICKS>
__device__ __forceinline__ void choose(const float (&f)[EACH], float* weights, int* ids, int lane) {
  float top = 0.f, sum = 0.f, mine = 0.f;
  u32 v[EACH];
  int id = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) v[i] = ordered(f[i]);
#pragma unroll
  for (int k = 0; k < PICKS; ++k) {
    u32 best = v[0];
    float value = f[0];
    int at = 0;
#pragma unroll
    for (int i = 1; i < EACH; ++i)
      if (v[i] > best) {
        best = v[i];
        value = f[i];
        at = i;
      }
    const u32 most = __reduce_max_sync(~0u, best);
    const int owner = __ffs(__ballot_sync(~0u, best == most)) - 1;
    value = __shfl_sync(~0u, value, owner);
    at = __shfl_sync(~0u, at, owner);
    if (k == 0) top = value;
    const float e = __expf(value - top);
    sum += e;
    if (lane == k) {
      mine = e;
      id = owner * EACH + at;
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (lane == owner && i == at) v[i] = 0;
  }
  if (lane < PICKS) {
    weights[lane] = mine / sum;
    ids[lane] = id;
  }
}
