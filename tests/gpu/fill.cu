extern "C" __global__ void fill(int *out) { out[threadIdx.x] = VALUE; }
