// The functions of codegen/gpu/matrix/mma_functions.py for the CPU: instructions of a warp, and asynchronous copies.
#pragma once

#define load_matrix_x4(fragment, at, shared, offset) \
  emulator::load_matrix(EMULATOR_SITE, (fragment) + (at), (const char*)(shared) + (offset), false)
#define load_matrix_x4_trans(fragment, at, shared, offset) \
  emulator::load_matrix(EMULATOR_SITE, (fragment) + (at), (const char*)(shared) + (offset), true)

EMULATOR_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
// To the nearest of ten bits of mantissa, ties away from zero; infinities and NaN stay.
EMULATOR_INLINE void round_to_tf32(unsigned* fragment, int at) {
  for (unsigned* word = fragment + at; word < fragment + at + 4; ++word)
    *word = (*word >> 23 & 255) == 255 ? *word & ~0x1fffu | (*word & 0x1fff ? 0x2000u : 0u) : (*word + 0x1000u) & ~0x1fffu;
}

#define EMULATE_PRODUCT(sums, at, a, a_at, b, b_at, element, apart) \
  emulator::multiply(EMULATOR_SITE, (sums) + (at), (a) + (a_at), (b) + (b_at), emulator::element, apart)
#define mma_16x8x16_f16(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, float16, 1)
#define mma_16x8x16_bf16(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, bfloat16, 1)
#define mma_16x8x8_tf32(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, tfloat32, 1)
#define mma_16x8x32_s8(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, int8, 1)
#define mma_16x8x32_e4m3(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, float8_e4m3, 1)
#define mma_16x8x32_e5m2(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, float8_e5m2, 1)
#define mma_16x8x32_s8_interleaved(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, int8, 2)
#define mma_16x8x32_e4m3_interleaved(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, float8_e4m3, 2)
#define mma_16x8x32_e5m2_interleaved(d, at, a, a_at, b, b_at) EMULATE_PRODUCT(d, at, a, a_at, b, b_at, float8_e5m2, 2)

#define EMULATE_COPY(bytes) \
  EMULATOR_INLINE void copy_async_##bytes(void* shared, int offset, const void* from) { \
    emulator::copy_later((char*)shared + offset, from, bytes, true); \
  } \
  EMULATOR_INLINE void copy_async_##bytes##_guarded(void* shared, int offset, const void* from, bool inside) { \
    emulator::copy_later((char*)shared + offset, from, bytes, inside); \
  } \
  EMULATOR_INLINE void copy_async_##bytes##_apart(void* shared, int offset, int shared_more, const void* from, int more) { \
    emulator::copy_later((char*)shared + offset + shared_more, (const char*)from + more, bytes, true); \
  }
EMULATE_COPY(16) EMULATE_COPY(8) EMULATE_COPY(4)
#define copy_async_commit() emulator::commit_copies(EMULATOR_SITE)
#define copy_async_wait_0() emulator::wait_for_copies(EMULATOR_SITE, 0)
#define copy_async_wait_1() emulator::wait_for_copies(EMULATOR_SITE, 1)
#define copy_async_wait_2() emulator::wait_for_copies(EMULATOR_SITE, 2)
#define copy_async_wait_3() emulator::wait_for_copies(EMULATOR_SITE, 3)
#define copy_async_wait_4() emulator::wait_for_copies(EMULATOR_SITE, 4)
#define copy_async_wait_5() emulator::wait_for_copies(EMULATOR_SITE, 5)
#define copy_async_wait_6() emulator::wait_for_copies(EMULATOR_SITE, 6)
