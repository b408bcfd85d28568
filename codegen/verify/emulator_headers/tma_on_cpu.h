// The functions of codegen/gpu/matrix/bulk_functions.py for the CPU: barriers in shared memory, bulk copies, clusters.
#pragma once

typedef emulator::TensorMap TensorMap;
#define __grid_constant__
#define __cluster_dims__(...)

#define barrier_make(shared, offset, count) emulator::make_barrier(shared_address(shared, offset), count)
#define barrier_fence() emulator::fence_barriers()
#define barrier_expect(shared, offset, bytes) emulator::arrive_and_expect(shared_address(shared, offset), bytes)
#define barrier_arrive(shared, offset) emulator::arrive_at_barrier(shared_address(shared, offset))
#define barrier_arrive_in(shared, offset, rank) \
  emulator::arrive_at_barrier(emulator::address_in_cluster(shared_address(shared, offset), rank))
#define barrier_wait(shared, offset, parity) emulator::wait_for_phase(EMULATOR_SITE, shared_address(shared, offset), parity)
#define cluster_rank() emulator::rank_in_cluster()
#define cluster_sync() emulator::sync_cluster(EMULATOR_SITE)
#define registers_more_232()
#define registers_more_160()
#define registers_fewer_40()
#define registers_fewer_32()

namespace emulator {
template <typename... Indices>
EMULATOR_INLINE void copy_box(Site site, unsigned to, const TensorMap* map, unsigned barrier, unsigned blocks, Indices... at) {
  const int indices[] = {at...};
  copy_tile(site, to, map, barrier, blocks, indices);
}
}  // namespace emulator
#define copy_tile(shared, to, map, barrier, ...) \
  emulator::copy_box(EMULATOR_SITE, shared_address(shared, to), map, shared_address(shared, barrier), 0, __VA_ARGS__)
#define copy_tile_to_all(shared, to, map, barrier, blocks, ...) \
  emulator::copy_box(EMULATOR_SITE, shared_address(shared, to), map, shared_address(shared, barrier), blocks, __VA_ARGS__)
