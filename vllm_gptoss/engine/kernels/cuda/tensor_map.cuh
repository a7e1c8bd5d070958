// Boxes of a tensor from global to shared memory: one instruction a box, an mbarrier signals when
// it is there. What lies outside of the tensor arrives as zeros, and counts.
//
// Offers: TensorMap (engine/kernels/tensor_map.py makes it; a kernel takes it as a
// __grid_constant__), box_load of a box in two dimensions that nothing reads again, and of one in
// three that others read too. Coordinates are elements, the innermost first. Barriers: the caller's
// mbarriers.
#include "common.cuh"

struct alignas(64) TensorMap {
  u8 bytes[128];
};

__device__ __forceinline__ void box_load(
    u32 dst, const TensorMap* map, int at0, int at1, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(map), "r"(at0), "r"(at1), "r"(bar), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void box_load(
    u32 dst, const TensorMap* map, int at0, int at1, int at2, u32 bar) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3, %4}], [%5];" ::"r"(dst),
      "l"(map), "r"(at0), "r"(at1), "r"(at2), "r"(bar)
      : "memory");
}
