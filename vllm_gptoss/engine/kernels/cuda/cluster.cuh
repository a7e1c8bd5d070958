// Blocks of one cluster: barriers of all their threads, floats in one another's shared memory.
//
// Offers: cluster_arrive, cluster_wait, cluster_sync (release and acquire), cluster_leave (orders
// no memory); load_cluster, store_cluster, store_cluster2 (address: this block's shared address of
// the same place; rank: the block's in the cluster). Barriers: the cluster's one hardware barrier;
// between two arrivals of a thread there is a wait.
#include "common.cuh"

__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}
// At a kernel's end: no block exits while another one still reads its shared memory.
__device__ __forceinline__ void cluster_leave() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::
          : "memory");
}
__device__ __forceinline__ u32 cluster_address(u32 addr, u32 rank) {
  u32 remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
  return remote;
}
__device__ __forceinline__ float load_cluster(u32 addr, u32 rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(cluster_address(addr, rank)));
  return v;
}
__device__ __forceinline__ void store_cluster(u32 addr, u32 rank, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(cluster_address(addr, rank)), "f"(v)
      : "memory");
}
__device__ __forceinline__ void store_cluster2(u32 addr, u32 rank, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(cluster_address(addr, rank)),
      "f"(v.x), "f"(v.y)
      : "memory");
}
