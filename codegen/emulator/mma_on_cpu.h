// The functions of codegen/mma_device.py for the CPU: what each PTX instruction does, lane by lane, by the layouts of
// the PTX manual ("Matrix Fragments for mma.m16n8k16", "ldmatrix", "Asynchronous copy").
//
// Asynchronous copies happen as late as they may: when their thread waits for them. A kernel that reads before it
// waited finds old data.
#pragma once

namespace emulator {
struct Copy { unsigned char* to; const void* from; unsigned bytes, taken; };
typedef std::vector<Copy> Group;
constexpr unsigned most_groups = 8;
struct Copies { Group groups[most_groups]; unsigned first, committed; };  // groups[committed % most_groups] is open
Copies& copies_of_thread();

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
  copies.groups[copies.committed % most_groups].push_back({to, from, bytes, inside ? bytes : 0});
}
inline void wait_for_copies(unsigned pending) {
  Copies& copies = copies_of_thread();
  for (; copies.committed - copies.first > pending; ++copies.first) perform(copies.groups[copies.first % most_groups]);
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
struct Fragments { uint16_t a[4][2], b[2][2]; };  // by register; adjacent k
static_assert(sizeof(Fragments) <= exchanged_bytes);
template <typename T> float number(uint16_t bits) {
  T value;
  std::memcpy(&value, &bits, 2);
  return (float)value;
}
// Rows lane / 4 and 8 more of A and D; column lane / 4 of B; columns lane % 4 * 2 and one more of D.
template <typename T> void multiply(float* sums, const unsigned* a, const unsigned* b) {
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
        for (unsigned k = 0; k < 4; ++k)
          sums[2 * i + j] += number<T>(rows.a[i + 2 * (k / 2)][k % 2]) * number<T>(columns[j].b[k / 2][k % 2]);
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
inline void mma_16x8x16_f16(float* sums, int at, const unsigned* a, int a_at, const unsigned* b, int b_at) {
  emulator::multiply<half>(sums + at, a + a_at, b + b_at);
}
inline void mma_16x8x16_bf16(float* sums, int at, const unsigned* a, int a_at, const unsigned* b, int b_at) {
  emulator::multiply<nv_bfloat16>(sums + at, a + a_at, b + b_at);
}
#define EMULATE_COPY(bytes) \
  inline void copy_async_##bytes(void* shared, int offset, const void* from) { \
    emulator::copy_later(shared, offset, from, bytes, true); \
  } \
  inline void copy_async_##bytes##_guarded(void* shared, int offset, const void* from, bool inside) { \
    emulator::copy_later(shared, offset, from, bytes, inside); \
  }
EMULATE_COPY(16) EMULATE_COPY(8) EMULATE_COPY(4)
inline void copy_async_commit() {
  emulator::Copies& copies = emulator::copies_of_thread();
  if (++copies.committed - copies.first == emulator::most_groups) emulator::wait_for_copies(emulator::most_groups - 1);
}
#define EMULATE_WAIT(pending) inline void copy_async_wait_##pending() { emulator::wait_for_copies(pending); }
EMULATE_WAIT(0) EMULATE_WAIT(1) EMULATE_WAIT(2) EMULATE_WAIT(3) EMULATE_WAIT(4) EMULATE_WAIT(5) EMULATE_WAIT(6)
template <typename T> void store_shared(void* shared, int offset, T value) {
  *(T*)((unsigned char*)shared + offset) = value;
}
