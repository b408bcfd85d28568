// The functions of codegen/mma_device.py for the CPU: what each PTX instruction does, lane by lane, by the layouts of
// the PTX manual ("Matrix Fragments for mma.m16n8k16", "ldmatrix", "Asynchronous copy").
//
// Asynchronous copies happen as late as they may: when their thread waits for them. A kernel that reads before it
// waited finds old data. In every other block they happen at once: one that has not read yet what they overwrite finds
// new data.
#pragma once

namespace emulator {
struct Copy { unsigned char* to; const void* from; unsigned bytes, taken; };
typedef std::vector<Copy> Group;
constexpr unsigned most_groups = 8;
// groups[committed % most_groups] is open. What was copied is hidden from warp groups until their fence.
struct Copies { Group groups[most_groups]; unsigned first, committed; bool hidden; };
Copies& copies_of_thread();
bool copies_are_hidden();
inline bool copies_are_early() { return (blockIdx.x + blockIdx.y + blockIdx.z) % 2; }

inline void perform(Group& group) {
  for (Copy& copy : group) {
    std::memset(copy.to, 0, copy.bytes);
    std::memcpy(copy.to, copy.from, copy.taken);
  }
  group.clear();
}
inline void copy_later(void* shared, int offset, const void* from, unsigned bytes, bool inside) {
  unsigned char* to = (unsigned char*)shared + offset;
  if ((uintptr_t)to % bytes || (inside && (uintptr_t)from % bytes)) fail("an asynchronous copy is not aligned");
  Copies& copies = copies_of_thread();
  Group& open = copies.groups[copies.committed % most_groups];
  open.push_back({to, from, bytes, inside ? bytes : 0});
  if (copies_are_early()) perform(open);
}
inline void wait_for_copies(unsigned pending) {
  Copies& copies = copies_of_thread();
  for (; copies.committed - copies.first > pending; ++copies.first) {
    copies.hidden |= !copies.groups[copies.first % most_groups].empty();
    perform(copies.groups[copies.first % most_groups]);
  }
}
// Eight rows of 16 bytes, by their addresses in lanes 8i to 8i + 7, make matrix i; a lane gets two elements of it.
inline void load_matrix(unsigned* fragment, const void* shared, int offset, bool transposed) {
  const unsigned char* row = (const unsigned char*)shared + offset;
  if ((uintptr_t)row % 16) fail("a row of a matrix is not aligned to 16 bytes");
  std::memcpy(exchange(lane()), &row, sizeof row);
  sync_warp();
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    uint16_t pair[2];
    for (unsigned k = 0; k < 2; ++k) {
      unsigned i = lane() / 4, j = lane() % 4 * 2 + k;
      if (transposed) std::swap(i, j);
      std::memcpy(&row, exchange(matrix * 8 + i), sizeof row);
      std::memcpy(&pair[k], row + 2 * j, 2);
    }
    std::memcpy(&fragment[matrix], pair, 4);
  }
  sync_warp();
}
// Elements as a register holds them, by their bits, and as a number.
struct Half { typedef uint16_t Bits; static float number(Bits bits) { return (float)std::bit_cast<half>(bits); } };
struct Bfloat16 { typedef uint16_t Bits; static float number(Bits bits) { return (float)std::bit_cast<nv_bfloat16>(bits); } };
struct Int8 { typedef int8_t Bits; static int number(Bits bits) { return bits; } };
struct Tfloat32 {
  typedef uint32_t Bits;
  static float number(Bits bits) {
    // Hardware reads the upper bits alone; who did not round to them gets a truncated value there.
    if (bits & 0x1fff) fail("a number that is multiplied was not rounded to TensorFloat-32");
    return std::bit_cast<float>(bits);
  }
};
// Eight-bit floats: `fraction` bits of mantissa; a bias of 7 without infinities, or IEEE's 15 with them.
template <int fraction, int bias> struct Float8 {
  typedef uint8_t Bits;
  static float number(Bits bits) {
    int exponent = (bits & 127) >> fraction, mantissa = bits & ((1 << fraction) - 1), one = 1 << fraction;
    float size = std::ldexp((float)(exponent ? one + mantissa : mantissa), (exponent ? exponent : 1) - bias - fraction);
    if (bias == 7 && (bits & 127) == 127) size = NAN;
    if (bias == 15 && exponent == 31) size = mantissa ? NAN : INFINITY;
    return bits >> 7 ? -size : size;
  }
};
template <typename Bits> struct Fragments { Bits a[4][4 / sizeof(Bits)], b[2][4 / sizeof(Bits)]; };  // by register; k
// Rows lane / 4 and 8 more of A and D; column lane / 4 of B; columns lane % 4 * 2 and one more of D, `apart` sums apart.
template <typename T, typename Sum> void multiply(Sum* sums, const unsigned* a, const unsigned* b, int apart = 1) {
  typedef emulator::Fragments<typename T::Bits> Fragments;
  static_assert(sizeof(Fragments) <= exchanged_bytes);
  constexpr unsigned per_word = 4 / sizeof(typename T::Bits);
  unsigned row = lane() / 4, column = lane() % 4 * 2;
  std::memcpy(exchange(lane()), a, 16);
  std::memcpy(exchange(lane()) + 16, b, 8);
  sync_warp();
  for (unsigned part = 0; part < 4; ++part) {  // the lanes that share a row of A, or a column of B
    Fragments rows, columns[2];
    std::memcpy(&rows, exchange(row * 4 + part), sizeof rows);
    for (unsigned j = 0; j < 2; ++j) std::memcpy(&columns[j], exchange((column + j) * 4 + part), sizeof rows);
    for (unsigned i = 0; i < 2; ++i)
      for (unsigned j = 0; j < 2; ++j)
        for (unsigned k = 0; k < 2 * per_word; ++k)
          sums[(2 * i + j) * apart] += T::number(rows.a[i + 2 * (k / per_word)][k % per_word]) *
                                       T::number(columns[j].b[k / per_word][k % per_word]);
  }
  sync_warp();
}
}  // namespace emulator

inline void load_matrix_x4(unsigned* fragment, int at, const void* shared, int offset) {
  emulator::load_matrix(fragment + at, shared, offset, false);
}
inline void load_matrix_x4_trans(unsigned* fragment, int at, const void* shared, int offset) {
  emulator::load_matrix(fragment + at, shared, offset, true);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return result;
}
// To the nearest of ten bits of mantissa, ties away from zero; infinities and NaN stay.
inline void round_to_tf32(unsigned* fragment, int at) {
  for (unsigned* word = fragment + at; word < fragment + at + 4; ++word)
    *word = (*word >> 23 & 255) == 255 ? *word & ~0x1fffu | (*word & 0x1fff ? 0x2000u : 0u) : (*word + 0x1000u) & ~0x1fffu;
}
#define EMULATE_PRODUCT(name, Element, Sum) \
  inline void name(Sum* sums, int at, const unsigned* a, int a_at, const unsigned* b, int b_at) { \
    emulator::multiply<emulator::Element>(sums + at, a + a_at, b + b_at); \
  } \
  inline void name##_interleaved(Sum* sums, int at, const unsigned* a, int a_at, const unsigned* b, int b_at) { \
    emulator::multiply<emulator::Element>(sums + at, a + a_at, b + b_at, 2); \
  }
namespace emulator { typedef Float8<3, 7> Float8E4m3; typedef Float8<2, 15> Float8E5m2; }
EMULATE_PRODUCT(mma_16x8x16_f16, Half, float) EMULATE_PRODUCT(mma_16x8x16_bf16, Bfloat16, float)
EMULATE_PRODUCT(mma_16x8x8_tf32, Tfloat32, float) EMULATE_PRODUCT(mma_16x8x32_s8, Int8, int)
EMULATE_PRODUCT(mma_16x8x32_e4m3, Float8E4m3, float) EMULATE_PRODUCT(mma_16x8x32_e5m2, Float8E5m2, float)
#define EMULATE_COPY(bytes) \
  inline void copy_async_##bytes(void* shared, int offset, const void* from) { \
    emulator::copy_later(shared, offset, from, bytes, true); \
  } \
  inline void copy_async_##bytes##_guarded(void* shared, int offset, const void* from, bool inside) { \
    emulator::copy_later(shared, offset, from, bytes, inside); \
  } \
  inline void copy_async_##bytes##_apart(void* shared, int offset, int shared_more, const void* from, int from_more) { \
    emulator::copy_later(shared, offset + shared_more, (const char*)from + from_more, bytes, true); \
  }
EMULATE_COPY(16) EMULATE_COPY(8) EMULATE_COPY(4)
inline void copy_async_commit() {
  emulator::Copies& copies = emulator::copies_of_thread();
  if (++copies.committed - copies.first == emulator::most_groups) emulator::wait_for_copies(emulator::most_groups - 1);
}
#define EMULATE_WAIT(pending) inline void copy_async_wait_##pending() { emulator::wait_for_copies(pending); }
EMULATE_WAIT(0) EMULATE_WAIT(1) EMULATE_WAIT(2) EMULATE_WAIT(3) EMULATE_WAIT(4) EMULATE_WAIT(5) EMULATE_WAIT(6)
