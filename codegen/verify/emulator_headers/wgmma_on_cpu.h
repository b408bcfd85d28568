// What the functions of codegen/wgmma_device.py do, thread by thread: products of warp groups (wgmma) whose operands
// have a descriptor of 64 bits each. Read by the PTX manual, "Asynchronous warpgroup level matrix instructions".
//
// Products are asynchronous. In every other block they happen at once and copies as late as they may: a kernel that
// multiplies before its copies are there finds old data. In the others it is the other way round: one that reads sums,
// or lets copies overwrite an operand, before it waited finds what it should not.
#pragma once

inline unsigned shared_address(const void* shared, int offset) {
  return (unsigned)((const unsigned char*)shared - emulator::dynamic_shared) + offset;
}

namespace emulator {
constexpr unsigned group_threads = 128, most_threads = 1024;

inline unsigned thread_of_block() {
  return (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
}
inline unsigned block_number() { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }

// An operand as its descriptor tells: a tile in 128-byte swizzle, in atoms of eight rows of 128 bytes.
template <typename T> struct Described {
  unsigned start, leading, stride;
  bool turned;
  Described(uint64_t descriptor, bool turned) : turned(turned) {
    start = (descriptor & 0x3FFF) << 4;
    leading = (descriptor >> 16 & 0x3FFF) << 4;
    stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1) fail("a matrix descriptor asks for another swizzle than 128 bytes");
    if (descriptor & (7ULL << 49 | 3ULL << 14 | 3ULL << 30 | 7ULL << 46 | 1023ULL << 52)) {
      fail("a matrix descriptor has bits where it has no field, or a base offset");
    }
  }
  // Element `spatial` (row of A, column of B) at step `depth` of the product's depth.
  float at(unsigned spatial, unsigned depth) const {
    // K-major: ((8, m), (T, 2k)) : ((8T, SBO), (1, T)); MN-major: ((T, 8, m), (8, k)) : ((1, T, LBO), (8T, SBO)), both
    // in elements of 16 bits, T = 8 of them to 16 bytes.
    unsigned byte = turned ? spatial % 64 * 2 + spatial / 64 * leading + depth % 8 * 128 + depth / 8 * stride
                           : spatial % 8 * 128 + spatial / 8 * stride + depth * 2;
    unsigned address = start + byte;
    address ^= (address >> 7 & 7) << 4;  // Swizzle<3, 4, 3> on addresses
    T value;
    std::memcpy(&value, dynamic_shared + address, sizeof value);
    return (float)value;
  }
};

struct Product { float* sums; uint64_t a, b; void (*perform)(float*, uint64_t, uint64_t, unsigned); };
// What one thread has told the tensor cores; of the block `block`.
struct Products {
  unsigned block = ~0u, issued = 0;
  bool arrived = false;
  std::vector<Product> open;
  std::vector<std::vector<Product>> groups;
};
// What the first thread of a warp group said to every product: all have to say the same.
struct Agreed { unsigned block = ~0u; std::vector<std::pair<uint64_t, uint64_t>> products; };

inline Products& products_of_thread() {
  static Products all[most_threads];
  Products& own = all[thread_of_block()];
  if (own.block != block_number()) {
    own = Products();
    own.block = block_number();
  }
  return own;
}
inline void agree(unsigned number, uint64_t a, uint64_t b) {
  static Agreed all[most_threads / group_threads];
  Agreed& group = all[thread_of_block() / group_threads];
  if (group.block != block_number()) group = {block_number(), {}};
  if (number == group.products.size()) group.products.push_back({a, b});
  if (group.products[number] != std::pair(a, b)) fail("threads of a warp group describe different matrices");
}

// Thread t of a group has rows t / 32 * 16 + t % 32 / 4 and 8 more; columns t % 4 * 2, one more, and all 8 apart.
template <typename T, int width, bool a_turned, bool b_turned>
void multiply_now(float* sums, uint64_t a, uint64_t b, unsigned thread) {
  Described<T> left(a, a_turned), right(b, b_turned);
  float rows[2][16], column[16];
  for (unsigned eight = 0; eight < 2; ++eight)
    for (unsigned k = 0; k < 16; ++k) rows[eight][k] = left.at(thread / 32 * 16 + thread % 32 / 4 + eight * 8, k);
  for (unsigned n = 0; n < width / 4; ++n) {
    for (unsigned k = 0; k < 16; ++k) column[k] = right.at(n / 2 * 8 + thread % 4 * 2 + n % 2, k);
    for (unsigned eight = 0; eight < 2; ++eight)
      for (unsigned k = 0; k < 16; ++k) sums[n / 2 * 4 + eight * 2 + n % 2] += rows[eight][k] * column[k];
  }
}

inline bool products_are_late() { return copies_are_early(); }

template <typename T, int width, bool a_turned, bool b_turned>
void multiply_by_warp_group(float* sums, uint64_t a, uint64_t b) {
  Products& own = products_of_thread();
  if (!own.arrived) fail("a warp group multiplies without a fence before it");
  if (copies_are_hidden()) fail("a warp group multiplies what was copied without a fence between the proxies");
  agree(own.issued++, a, b);
  void (*perform)(float*, uint64_t, uint64_t, unsigned) = multiply_now<T, width, a_turned, b_turned>;
  if (products_are_late()) own.open.push_back({sums, a, b, perform});
  else perform(sums, a, b, thread_of_block() % group_threads);
}
inline void show_copies_to_warp_groups() { copies_of_thread().hidden = false; }
inline void arrive_at_warp_group() { products_of_thread().arrived = true; }
inline void commit_products() {
  Products& own = products_of_thread();
  own.groups.push_back(std::move(own.open));
  own.open.clear();
  own.arrived = false;
}
inline void wait_for_products(unsigned pending) {
  Products& own = products_of_thread();
  while (own.groups.size() > pending) {
    for (Product& each : own.groups.front()) each.perform(each.sums, each.a, each.b, thread_of_block() % group_threads);
    own.groups.erase(own.groups.begin());
  }
}
}  // namespace emulator
