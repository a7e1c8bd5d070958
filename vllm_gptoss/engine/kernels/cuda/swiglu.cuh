// gpt-oss's SwiGLU. Included as text: nvrtc.source.
#include "common.cuh"

struct Gate {
  float alpha, limit;
  __device__ __forceinline__ float operator()(float gate, float up) const {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
    return gate / (1.f + __expf(-alpha * gate)) * (up + 1.f);
  }
};
