// Who wrote every byte of shared memory and of the arguments that a launch writes, and who has read it since.
//
// A cell stands for a word of four bytes, and for each of its bytes once one of them was accessed alone.
#pragma once
#include "clocks.h"

namespace emulator {
// `who` is the thread's number in the launch; `via` says by which asynchronous group, if by one.
struct Access { uint32_t who; Stamp stamp; uint32_t place; uint32_t via; };
// How the latest write stands to the one before it: after it, or in no order, with the same value or with another one.
enum Contest : uint8_t { settled, same_value, other_value };
// The two latest readers since the write; where each thread last read it, where more than barriers order threads; how many
// products under way read it, and by warp those that did; the value that a copy brings, or that stands against the latest write; what is needed if that is
// read and differs from what was there `before`.
struct Cell {
  Access write, read[2];
  Access *readers, *product_readers;
  uint32_t value, before;
  uint16_t products, pending_need;
  Contest contest;
};
constexpr uint32_t atomically = ~0u;

// An argument, or shared memory: an area with nothing around it.
struct Area {
  unsigned char* start;
  size_t bytes, extent;  // of which `extent` are more than guard
  char name;             // 'a', 'd', 's' (report.h)
  unsigned number;
  bool is_constant, is_exact, is_global;
  Cell *words, *parts;   // parts[3 w + b - 1] is of byte b of word w
  bool* is_split;

  Cell& part(size_t word, unsigned byte) { return byte ? parts[3 * word + byte - 1] : words[word]; }
};
constexpr size_t guard_bytes = 1 << 26;
static Area areas[66];  // the arguments, dynamic and static shared memory
static unsigned area_count;
static uintptr_t arena, arena_bytes;
static unsigned arena_shift;
static Area* static_shared;
static uint64_t steps, most_steps = ~0ull;
static bool has_atomics;

static size_t shared_bytes, shared_apart;  // dynamic shared memory of a block, and from one of a cluster to the next

static size_t own_shared() { return me / block_threads * shared_apart; }  // where it starts in the area
static void thread_resumed() {
  stamp = stamps[me];
  if (cluster_size == 1) return;
  unsigned number = block_number * cluster_size + me / block_threads;
  blockIdx = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
  emulator_dynamic_shared = areas[area_count - 1].start + own_shared();
}
static uint32_t self() { return block_number * actor_count + me; }

static const char* byte_of(const Area& area, size_t at) {
  if (area.name == 's') return words("@s%zx", (size_t)area.start + at);
  if (area.name == 'd') return words("@d+%zu", at);
  return words("@a%u+%zu", area.number, at);
}
static const char* someone(uint32_t who) {
  unsigned actor = who % actor_count, rank = actor < thread_count ? actor / block_threads : 0;
  return words("%s of %s", named(actor), block_named(who / actor_count * cluster_size + rank));
}
struct Where { Area& area; size_t at; unsigned bytes; uint32_t place; };

[[noreturn]] static void race(const Where& where, const Access& first, bool first_writes, bool writes) {
  const char* order = first.stamp <= block_start ? "blocks are in no order" : "no barrier is between";
  report("race on %s: %s by %s at %s and %s by %s at %s: %s", byte_of(where.area, where.at), first_writes ? "written" : "read",
         someone(first.who), at_place(first.place), writes ? "written" : "read", someone(self()), at_place(where.place), order);
}
[[noreturn]] static void race_with_copy(const Where& where, const Access& copy, bool writes) {
  report("race on %s: an asynchronous copy of %s at %s is under way, when it is %s by %s at %s", byte_of(where.area, where.at),
         someone(copy.who), at_place(copy.place), writes ? "written" : "read", someone(self()), at_place(where.place));
}
[[noreturn]] static void race_with_product(const Where& where);
static void waited_for(uint32_t via);
static unsigned only_wait(uint32_t via);

[[noreturn]] static void contested(const Where& where, const Cell& cell) {
  report("race on %s: written by %s at %s and by %s at %s, in no order, and read by %s at %s", byte_of(where.area, where.at),
         someone(cell.read[0].who), at_place(cell.read[0].place), someone(cell.write.who), at_place(cell.write.place),
         someone(self()), at_place(where.place));
}
// Whether this thread's access comes after another one that was made in the same block. A place that alone makes it so is
// needed, or, where `alone` is given, said there.
static bool comes_after(const Where& where, const Access& other, bool other_writes, bool writes, unsigned* alone = nullptr) {
  if (other.stamp <= block_start) {
    if (where.area.is_global && other.stamp > launch_start) race(where, other, other_writes, writes);
    return true;
  }
  if (other.who == self() && other.stamp != under_way) return true;
  if (other.stamp == under_way) return false;
  unsigned place = none;
  if (!happened(other.who % actor_count, other.stamp, place)) return false;
  if (alone) *alone = place;
  else if (place != none) need(place);
  return true;
}
static inline bool may_matter(const Where& where, const Access& other) {
  return other.stamp > decisive || (where.area.is_global && other.stamp > launch_start && other.stamp <= block_start) ||
         (has_partial && other.stamp > block_start);
}
static uint32_t value_at(const Where& where) {
  uint32_t value = 0;
  memcpy(&value, where.area.start + where.at, where.bytes);
  return value;
}
// A read of what was written last.
static inline void check_write(const Where& where, Cell& cell) {
  const Access& write = cell.write;
  if (may_matter(where, write) && (write.who != self() || write.stamp == under_way) &&
      !comes_after(where, write, true, false)) {
    if (write.stamp == under_way) race_with_copy(where, write, false);
    race(where, write, true, false);
  }
  if ((cell.contest || cell.pending_need) && write.stamp > block_start) {
    if (cell.contest == other_value || (cell.contest && value_at(where) != cell.value)) contested(where, cell);
    if (cell.pending_need && value_at(where) != cell.before) need(cell.pending_need - 1u);
    cell.pending_need = 0;
  }
  if (undecided_waits && write.via && write.via != atomically && write.stamp > block_start) waited_for(write.via);
}
// A write over the last one. What nobody reads may be written in any order, and so may the same value.
static inline void check_overwritten(const Where& where, Cell& cell, const Access& now, const uint32_t* value) {
  const Access write = cell.write;
  if (now.via == atomically && write.via == atomically) return;
  bool was_under_way = write.stamp == under_way;
  unsigned alone = none;
  if (may_matter(where, write) && (write.who != self() || was_under_way)) {
    if (!comes_after(where, write, true, true, &alone)) {
      if (where.area.is_global) race(where, write, true, true);
      if (!was_under_way && cell.contest == settled) cell.value = value_at(where);
      bool is_same = cell.contest != other_value && (value ? *value == cell.value : !was_under_way && value_at(where) == cell.value);
      cell.contest = is_same ? same_value : other_value;
      cell.read[0] = write;
      cell.read[0].stamp = 0;
      return;
    }
  }
  cell.contest = settled;
  cell.pending_need = 0;
  if (undecided_waits && write.via && write.via != atomically && write.stamp > block_start && alone == none)
    alone = only_wait(write.via);
  if (alone == none || sites[alone].needed) return;
  cell.pending_need = (uint16_t)(alone + 1);
  cell.before = value_at(where);
}
static void read_cell(const Where& where, Cell& cell) {
  check_write(where, cell);
  if (has_partial) {
    if (!cell.readers) cell.readers = (Access*)calloc(thread_count, sizeof(Access));
    cell.readers[me] = {self(), stamp, where.place, 0};
    return;
  }
  Access& older = cell.read[cell.read[0].stamp > cell.read[1].stamp];
  Access& own = cell.read[0].who == self() ? cell.read[0] : cell.read[1].who == self() ? cell.read[1] : older;
  own = {self(), stamp, where.place, 0};
}
// An earlier read, which a write puts an end to.
static inline void check_read(const Where& where, Access& read) {
  // A product of a warp group is the reading of all lanes that waited for it.
  bool is_own = read.via ? read.who / 32 == self() / 32 : read.who == self();
  if (may_matter(where, read) && !is_own && !comes_after(where, read, false, true)) race(where, read, false, true);
  if (undecided_waits && read.via && read.stamp > block_start) waited_for(read.via);
  read.stamp = 0;
}
// `value` is what is written, where that is known.
static void write_cell(const Where& where, Cell& cell, Access now, const uint32_t* value = nullptr) {
  if (where.area.is_exact && cell.write.stamp > launch_start)
    report("%s is written twice: by %s at %s and by %s at %s", byte_of(where.area, where.at), someone(cell.write.who),
           at_place(cell.write.place), someone(self()), at_place(where.place));
  for (Access& read : cell.read) check_read(where, read);
  if (cell.readers)
    for (unsigned i = 0; i < thread_count; ++i) check_read(where, cell.readers[i]);
  if (cell.product_readers)
    for (unsigned i = 0; i < warp_count; ++i) check_read(where, cell.product_readers[i]);
  if (cell.products) race_with_product(where);
  check_overwritten(where, cell, now, value);
  cell.write = now;
  if (value && cell.contest == settled) cell.value = *value;
}
static void split(Area& area, size_t word) {
  if (area.is_split[word]) return;
  area.is_split[word] = true;
  for (unsigned byte = 1; byte < 4; ++byte) {
    Cell& part = area.part(word, byte);
    Access *readers = part.readers, *product_readers = part.product_readers;
    part = area.words[word];
    part.product_readers = product_readers;
    if (area.words[word].product_readers) {
      if (!product_readers) part.product_readers = (Access*)calloc(warp_count, sizeof(Access));
      memcpy(part.product_readers, area.words[word].product_readers, warp_count * sizeof(Access));
    }
    part.value = area.words[word].value >> 8 * byte & 255;
    part.before = area.words[word].before >> 8 * byte & 255;
    part.readers = readers;
    if (area.words[word].readers) {
      if (!readers) part.readers = (Access*)calloc(thread_count, sizeof(Access));
      memcpy(part.readers, area.words[word].readers, thread_count * sizeof(Access));
    }
  }
  area.words[word].value &= 255;
  area.words[word].before &= 255;
}
// A word was written whole: its bytes have one writer, unless one of them is contested.
static void join_parts(Area& area, size_t word) {
  for (unsigned byte = 0; byte < 4; ++byte)
    if (area.part(word, byte).contest || area.part(word, byte).pending_need) return;
  for (unsigned byte = 1; byte < 4; ++byte) area.words[word].value |= area.part(word, byte).value << 8 * byte;
  area.is_split[word] = false;
}
// `each(where, cell)` for all cells of some bytes.
template <typename Each>
static inline void for_cells(Area& area, size_t at, size_t bytes, uint32_t place, bool fills, Each each) {
  for (size_t end = at + bytes; at < end;) {
    size_t word = at / 4;
    bool is_whole = at % 4 == 0 && at + 4 <= end;
    if (is_whole && !area.is_split[word]) {
      each(Where{area, at, 4, place}, area.words[word]);
      at += 4;
      continue;
    }
    split(area, word);
    size_t stop = is_whole ? at + 4 : end < word * 4 + 4 ? end : word * 4 + 4;
    for (; at < stop; ++at) each(Where{area, at, 1, place}, area.part(word, at % 4));
    if (is_whole && fills) join_parts(area, word);
  }
}

// The area of some bytes; none for a thread's own memory.
static inline Area* area_of(uintptr_t address) {
  if (address - arena < arena_bytes) return &areas[(address - arena) >> arena_shift];
  if (static_shared && address - (uintptr_t)static_shared->start < static_shared->bytes) return static_shared;
  return nullptr;
}
[[noreturn]] static void outside(const Area& area, uintptr_t address, unsigned bytes, uint32_t place, bool writes) {
  long long at = (long long)(address - (uintptr_t)area.start);
  const char* name = area.name == 'a' ? words("@a%u", area.number) : "dynamic shared memory";
  report("an access outside an array: %u bytes at byte %lld of the %zu of %s are %s by %s at %s", bytes, at, area.extent, name,
         writes ? "written" : "read", someone(self()), at_place(place));
}
static inline void count_step() {
  if (++steps > most_steps) report("still running after %llu steps", (unsigned long long)most_steps);
}
static inline void follow(uint64_t what) {
  uint64_t& trace = fibers[me].trace;
  trace = (trace ^ what) * 0x9E3779B97F4A7C15ULL;
  trace ^= trace >> 29;
}
static inline void follow(const Area& area, uintptr_t address, unsigned bytes, bool writes) {
  follow((address - (uintptr_t)area.start) << 12 | (uint64_t)(&area - areas) << 5 | bytes << 1 | writes);
  if (writes) return;
  for (unsigned at = 0; at < bytes; at += 8) {
    uint64_t value = 0;
    memcpy(&value, (const void*)(address + at), bytes - at < 8 ? bytes - at : 8);
    follow(value);
  }
}
// Bytes of a block's shared memory from its first barrier to behind its last one, and what happens to memory among them.
static size_t barriers_begin = ~(size_t)0, barriers_end;
static void check_barriers(size_t at, unsigned bytes, uint32_t place, bool writes);
static inline void check_bounds(const Area& area, uintptr_t address, unsigned bytes, uint32_t place, bool writes) {
  uintptr_t at = address - (uintptr_t)area.start;
  if (at > area.extent || at + bytes > area.extent) outside(area, address, bytes, place, writes);
  if (cluster_size > 1 && area.name == 'd' && at - own_shared() + bytes > shared_bytes) outside(area, address, bytes, place, writes);
  if (area.name == 'd' && at - own_shared() + bytes > barriers_begin && at - own_shared() < barriers_end)
    check_barriers(at - own_shared(), bytes, place, writes);
  if (writes && area.is_constant)
    report("an input is written: %s by %s at %s", byte_of(area, at), someone(self()), at_place(place));
}
static inline void note_read(Area& area, uintptr_t address, unsigned bytes, uint32_t place) {
  check_bounds(area, address, bytes, place, false);
  count_step();
  follow(area, address, bytes, false);
  if (!area.is_constant)
    for_cells(area, address - (uintptr_t)area.start, bytes, place, false, read_cell);
}
static inline void note_write(Area& area, uintptr_t address, unsigned bytes, uint32_t place, uint32_t via = 0) {
  check_bounds(area, address, bytes, place, true);
  count_step();
  follow(area, address, bytes, true);
  Access now{self(), stamp, place, via};
  for_cells(area, address - (uintptr_t)area.start, bytes, place, true, [&](const Where& where, Cell& cell) { write_cell(where, cell, now); });
}
static void touch_sums(uintptr_t address, uint32_t place);

template <bool writes> static inline void access(const void* pointer, unsigned bytes, uint32_t place) {
  uintptr_t address = (uintptr_t)pointer;
  if (address - (uintptr_t)stacks < stack_bytes * thread_count) {
    Fiber& fiber = fibers[me];
    if (fiber.sums_bytes && address - fiber.sums < fiber.sums_bytes) touch_sums(address, place);
    return;
  }
  if (!is_checked) return;
  Area* area = area_of(address);
  if (!area) return;
  if (writes) note_write(*area, address, bytes, place);
  else note_read(*area, address, bytes, place);
}
#define EMULATOR_PLACE ((uint32_t)(uintptr_t)__builtin_return_address(0))

uint64_t load_atomic(const void* address, unsigned bytes) {
  uint64_t value = 0;
  memcpy(&value, address, bytes);
  has_atomics = true;
  Area* area = is_checked ? area_of((uintptr_t)address) : nullptr;
  if (area) note_write(*area, (uintptr_t)address, bytes, EMULATOR_PLACE, atomically);
  return value;
}
void store_atomic(void* address, unsigned bytes, uint64_t value) { memcpy(address, &value, bytes); }

static void add_cells(Area& area) {
  auto zeros = [](size_t bytes) {
    void* start = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) report("out of memory");
    return start;
  };
  size_t words = (area.bytes + 3) / 4;
  area.words = (Cell*)zeros(words * sizeof(Cell));
  area.parts = (Cell*)zeros(3 * words * sizeof(Cell));
  area.is_split = (bool*)zeros(words);
}
// All of an output has to be written.
static void check_coverage(Area& area) {
  for_cells(area, 0, area.extent, 0, false, [](const Where& where, Cell& cell) {
    if (cell.write.stamp <= launch_start) report("%s is never written", byte_of(where.area, where.at));
  });
}
}  // namespace emulator

#define EMULATE_HOOKS(bytes) \
  extern "C" void __tsan_read##bytes(void* p) { emulator::access<false>(p, bytes, EMULATOR_PLACE); } \
  extern "C" void __tsan_write##bytes(void* p) { emulator::access<true>(p, bytes, EMULATOR_PLACE); } \
  extern "C" void __tsan_unaligned_read##bytes(void* p) { emulator::access<false>(p, bytes, EMULATOR_PLACE); } \
  extern "C" void __tsan_unaligned_write##bytes(void* p) { emulator::access<true>(p, bytes, EMULATOR_PLACE); }
EMULATE_HOOKS(1) EMULATE_HOOKS(2) EMULATE_HOOKS(4) EMULATE_HOOKS(8) EMULATE_HOOKS(16)
extern "C" void __tsan_read_range(void* p, size_t bytes) { emulator::access<false>(p, (unsigned)bytes, EMULATOR_PLACE); }
extern "C" void __tsan_write_range(void* p, size_t bytes) { emulator::access<true>(p, (unsigned)bytes, EMULATOR_PLACE); }
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void**, void*) {}
extern "C" void __tsan_vptr_read(void**) {}
