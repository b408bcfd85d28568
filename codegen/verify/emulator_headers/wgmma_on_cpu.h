// The functions of codegen/gpu/matrix/wgmma_functions.py for the CPU. Products themselves, whose names tell their
// operands, are functions of the kernel's text.
#pragma once

EMULATOR_INLINE unsigned shared_address(const void* shared, int offset) {
  return (unsigned)((const unsigned char*)shared - emulator_dynamic_shared) + offset;
}
#define async_proxy_fence() emulator::fence_proxies(EMULATOR_SITE)
#define warp_group_arrive() emulator::arrive_at_warp_group(EMULATOR_SITE)
#define warp_group_commit() emulator::commit_products(EMULATOR_SITE)
#define warp_group_wait_1() emulator::wait_for_products(EMULATOR_SITE, 1)
#define warp_group_wait_2() emulator::wait_for_products(EMULATOR_SITE, 2)
#define warp_group_wait_all() emulator::wait_for_products(EMULATOR_SITE, 0)
