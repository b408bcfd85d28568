// Barriers in shared memory (mbarrier) and bulk copies of tiles (cp.async.bulk.tensor), which arrive at them.
//
// A phase of a barrier is complete once as many threads have arrived as it was made for and as many bytes as they expect. To
// arrive tells all that the thread knows, to wait for a phase is to know what was told in it. A bulk copy is a write of
// nobody who is ordered before or after anyone from its start to the phase that it arrives in; its data move at any time
// between, as drawn. Every barrier is an actor of its own for the copies that arrive at it.
#pragma once
#include "asynchronous.h"

namespace emulator {
constexpr unsigned most_barriers = 64, most_bytes_expected = (1u << 20) - 1;
struct Barrier {
  unsigned rank, at;  // its block in the cluster, and byte of the block's shared memory
  unsigned count, missing, phase;
  long long bytes;    // expected and not there
  bool is_fenced;     // other blocks and bulk copies may use it
  uint32_t maker;
  Stamp made;
  Stamp *told, *telling;  // by actor: in the latest complete phase, and in this one
};
static Barrier barriers[most_barriers];
static unsigned barrier_count;
struct Bulk {
  const TensorMap* map;
  TensorMap tensor;
  int at[5];
  unsigned rank, to, barrier;
  uint32_t place;
};
static std::vector<Bulk> bulk;

static unsigned barrier_actor(unsigned number) { return thread_count + warp_count + number; }
static const char* named_barrier(unsigned actor) {
  if (actor < thread_count + warp_count) return words("the products of warp %u", actor - thread_count);
  const Barrier& barrier = barriers[actor - thread_count - warp_count];
  return words("a bulk copy to the barrier at shared+%u", barrier.at);
}
static unsigned own_rank() { return me / block_threads; }
static bool has_ended(unsigned rank) {
  if (rank == own_rank()) return false;
  for (unsigned i = rank * block_threads; i < (rank + 1) * block_threads; ++i)
    if (fibers[i].state != returned) return false;
  return true;
}
// An address of another block of the cluster has its rank, from 1, above its 24 bits.
static Barrier& barrier_at(unsigned address, uint32_t place) {
  unsigned rank = address >> 24 ? (address >> 24) - 1 : own_rank(), at = address & 0xffffff;
  if (rank >= cluster_size) fail_at(place, words("block %u of a cluster of %u is named", rank, cluster_size));
  if (has_ended(rank)) fail_at(place, words("block %u of the cluster has ended, and its barrier is used", rank));
  for (unsigned i = 0; i < barrier_count; ++i) {
    Barrier& barrier = barriers[i];
    if (barrier.rank != rank || barrier.at != at) continue;
    unsigned alone = none;
    if (barrier.maker != me && !happened(barrier.maker, barrier.made, alone))
      fail_at(place, words("the barrier at shared+%u is used before it is known to be made", at));
    if (alone != none) need(alone);
    if (!barrier.is_fenced && barrier.maker != me)
      fail_at(place, words("the barrier at shared+%u is used, and no fence has followed its making", at));
    return barrier;
  }
  fail_at(place, words("there is no barrier at shared+%u", at));
  __builtin_unreachable();
}
void make_barrier(unsigned address, unsigned count) {
  uint32_t place = EMULATOR_PLACE;
  if (address % 8 || address >> 24 || address + 8 > shared_bytes || !count) fail_at(place, "a barrier at no place for one, or of nobody,");
  if (barrier_count == most_barriers) report("more than %u barriers", most_barriers);
  Barrier& barrier = barriers[barrier_count++];
  Stamp *told = barrier.told, *telling = barrier.telling;
  size_t bytes = sizeof(Stamp) * actor_count;
  if (!told) told = (Stamp*)malloc(bytes), telling = (Stamp*)malloc(bytes);
  memset(told, 0, bytes);
  memset(telling, 0, bytes);
  barrier = {own_rank(), address, count, count, 0, 0, false, me, stamp, told, telling};
  barriers_begin = std::min<size_t>(barriers_begin, address);
  barriers_end = std::max<size_t>(barriers_end, address + 8);
}
static void check_barriers(size_t at, unsigned bytes, uint32_t place, bool writes) {
  for (unsigned i = 0; i < barrier_count; ++i)
    if (barriers[i].rank == own_rank() && at < barriers[i].at + 8 && at + bytes > barriers[i].at)
      fail_at(place, words("the barrier at shared+%u is %s as memory", barriers[i].at, writes ? "written" : "read"));
}
void fence_barriers() {
  for (unsigned i = 0; i < barrier_count; ++i) barriers[i].is_fenced |= barriers[i].maker == me;
}
static void complete_phase(Barrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  std::swap(barrier.told, barrier.telling);
  memset(barrier.telling, 0, sizeof(Stamp) * actor_count);
  barrier.missing = barrier.count;
  ++barrier.phase;
}
// What this thread knows, itself included, is told; what it does from now on is not.
// A meeting of its warp that told it something is handed on with that, and may be all that orders it for who waits.
static void tell_barrier(Barrier& barrier) {
  const Stamp *row = known + (size_t)me * actor_count, *other = known_other + (size_t)me * actor_count;
  for (unsigned i = 0; i < actor_count; ++i) {
    Stamp what = i == me ? stamp : i < thread_count && row[i] < base ? base : row[i];
    if (i < thread_count && row[i] > other[i] && row[i] > base && partial_site[me] != none) need(partial_site[me]);
    if (what > barrier.telling[i]) barrier.telling[i] = what;
  }
  stamp = stamps[me] = ++tick;
}
static void arrive(unsigned address, unsigned bytes, uint32_t place) {
  Barrier& barrier = barrier_at(address, place);
  follow(address);
  if (!barrier.missing) fail_at(place, words("more arrivals than the barrier at shared+%u was made for", barrier.at));
  barrier.bytes += bytes;
  if (barrier.bytes > most_bytes_expected) fail_at(place, "a barrier expects more bytes than it can count");
  tell_barrier(barrier);
  --barrier.missing;
  complete_phase(barrier);
}
void arrive_at_barrier(unsigned address) { arrive(address, 0, EMULATOR_PLACE); }
void arrive_and_expect(unsigned address, unsigned bytes) {
  if (address >> 24) fail_at(EMULATOR_PLACE, "bytes are expected at a barrier of another block");
  arrive(address, bytes, EMULATOR_PLACE);
}
unsigned address_in_cluster(unsigned address, unsigned rank) { return address | (rank + 1) << 24; }
unsigned rank_in_cluster() { return own_rank(); }

// The phase of a parity is complete where the one under way has the other; before the first one is complete, it is as if one of
// parity 1 had been.
static bool phase_reached(Fiber& fiber) {
  Barrier& barrier = barriers[fiber.awaited];
  if ((barrier.phase & 1) == fiber.parity) return false;
  size_t row = (size_t)me * actor_count;
  for (unsigned i = 0; i < actor_count; ++i) {
    if (barrier.told[i] > known[row + i]) known[row + i] = barrier.told[i];
    if (barrier.told[i] > known_other[row + i]) known_other[row + i] = barrier.told[i];
  }
  return true;
}
void wait_for_phase(Site site, unsigned address, unsigned parity) {
  Fiber& fiber = fibers[me];
  if (address >> 24 || parity > 1) fail_at(site, "a wait for no parity, or at a barrier of another block,");
  fiber.awaited = (unsigned)(&barrier_at(address, EMULATOR_PLACE) - barriers);
  fiber.parity = parity;
  fiber.site = site;
  follow(site.line);
  if (!phase_reached(fiber)) wait(fiber, at_phase);
}
static void hangs(unsigned thread) {
  const Fiber& fiber = fibers[thread];
  const Barrier& barrier = barriers[fiber.awaited];
  unsigned count = 0;
  for (unsigned i = 0; i < thread_count; ++i)
    count += fibers[i].state == at_phase && fibers[i].awaited == fiber.awaited && fibers[i].parity == fiber.parity;
  report("a wait without end: %u threads, %s of %s among them, wait at %s for a phase of parity %u of the barrier at shared+%u, "
         "which is in phase %u and lacks %u of %u arrivals and %lld bytes",
         count, named(thread), block_of(thread), at_line(fiber.site.line), fiber.parity, barrier.at, barrier.phase, barrier.missing,
         barrier.count, barrier.bytes);
}

// ---- bulk copies

// `each(to, from)` for every 16 bytes of a box: where they go in shared memory, and where they come from (null outside).
template <typename Each> static void for_box(const Bulk& copy, Each each) {
  const TensorMap& map = copy.tensor;
  unsigned rows = 1, row_bytes = map.box[0] * map.element_bytes;
  for (unsigned i = 1; i < map.rank; ++i) rows *= map.box[i];
  for (unsigned row = 0; row < rows; ++row) {
    long long offset = 0, pitch = (long long)map.size[0] * map.element_bytes;
    bool is_inside = true;
    for (unsigned i = 1, rest = row; i < map.rank; rest /= map.box[i++]) {
      long long index = copy.at[i] + (long long)(rest % map.box[i]);
      is_inside &= index >= 0 && index < (long long)map.size[i];
      offset += index * pitch;
      pitch *= map.size[i];
    }
    for (unsigned byte = 0; byte < row_bytes; byte += 16) {
      long long column = copy.at[0] + (long long)(byte / map.element_bytes);
      unsigned to = copy.to + row * row_bytes + byte;
      unsigned swizzled = to ^ (to >> 7 & 7) << 4;
      bool is_there = is_inside && column >= 0 && column < (long long)map.size[0];
      each(swizzled, is_there ? map.start + offset + column * map.element_bytes : nullptr,
           is_there ? (unsigned)std::min<long long>(16, (map.size[0] - column) * map.element_bytes) : 0);
    }
  }
}
static unsigned box_bytes(const TensorMap& map) {
  unsigned bytes = map.element_bytes;
  for (unsigned i = 0; i < map.rank; ++i) bytes *= map.box[i];
  return bytes;
}
static size_t shared_of(unsigned rank) { return rank * shared_apart; }
// To the nearest TensorFloat-32, of two equally near ones to the even one (PTX ISA, "Tensors": dimension, size and format).
static void round_words(unsigned char* words, unsigned count) {
  for (unsigned i = 0; i < count; ++i) {
    uint32_t word;
    memcpy(&word, words + 4 * i, 4);
    if ((word & 0x7f800000) != 0x7f800000) word += 0xfff + (word >> 13 & 1);
    word &= ~0x1fffu;
    memcpy(words + 4 * i, &word, 4);
  }
}
static void arrive_bulk(size_t which) {
  Bulk copy = bulk[which];
  bulk.erase(bulk.begin() + (long)which);
  Area& area = dynamic_area();
  Barrier& barrier = barriers[copy.barrier];
  unsigned actor = barrier_actor(copy.barrier);
  Access now{block_number * actor_count + actor, ++tick, copy.place, 0};
  for_box(copy, [&](unsigned to, const unsigned char* from, unsigned count) {
    unsigned char* place = area.start + shared_of(copy.rank) + to;
    memset(place, 0, 16);
    memcpy(place, from, count);
    if (copy.tensor.rounds) round_words(place, count / 4);
    if (!is_checked) return;
    for_cells(area, (size_t)(place - area.start), 16, copy.place, true, [&](const Where&, Cell& cell) {
      if (cell.write.stamp == under_way && cell.write.who == now.who) cell.write = now;
    });
  });
  barrier.telling[actor] = tick;
  barrier.bytes -= box_bytes(copy.tensor);
  complete_phase(barrier);
}
static bool bulk_goes_on(bool must) {
  if (bulk.empty() || (!must && draw(4))) return false;
  arrive_bulk(draw((unsigned)bulk.size()));
  return true;
}
static void start_bulk(const Bulk& copy) {
  if (is_checked) {
    Area& area = dynamic_area();
    Access now{block_number * actor_count + barrier_actor(copy.barrier), under_way, copy.place, 0};
    for_box(copy, [&](unsigned to, const unsigned char*, unsigned) {
      for_cells(area, shared_of(copy.rank) + to, 16, copy.place, true,
                [&](const Where& where, Cell& cell) { write_cell(where, cell, now); });
    });
    count_step();
  }
  bulk.push_back(copy);
}
void copy_tile(Site site, unsigned to, const TensorMap* map, unsigned barrier, unsigned blocks, const int* at) {
  uint32_t place = EMULATOR_PLACE;
  Bulk copy{map, *map, {}, 0, to, 0, place};
  const TensorMap& tensor = copy.tensor;
  memcpy(copy.at, at, sizeof(int) * tensor.rank);
  unsigned bytes = box_bytes(tensor);
  if (tensor.box[0] * tensor.element_bytes != 128) fail_at(site, "a bulk copy in 128-byte swizzle of rows of other than 128 bytes");
  if ((long long)tensor.size[0] * tensor.element_bytes % 16) fail_at(site, "a bulk copy from rows that are no multiples of 16 bytes");
  for (unsigned i = 0; i < tensor.rank; ++i)
    if (!tensor.box[i] || tensor.box[i] > 256) fail_at(site, "a box of a bulk copy has 1 to 256 elements along a dimension");
  if (to % 128 || to >> 24 || to + bytes > shared_bytes) fail_at(site, "a bulk copy to no place in shared memory, or not aligned to 128 bytes,");
  if (barrier >> 24) fail_at(site, "a bulk copy arrives at barriers of its own offset in each block");
  check_barriers(to, bytes, place, true);
  if (is_checked)
    for_box(copy, [&](unsigned, const unsigned char* from, unsigned count) {
      if (from) access<false>(from, count, place);
    });
  follow(to);
  if (!blocks) blocks = 1u << own_rank();
  if (blocks >> cluster_size) fail_at(site, "a bulk copy to blocks that the cluster does not have");
  for_lanes(blocks, [&](unsigned rank) {
    copy.rank = rank;
    copy.barrier = (unsigned)(&barrier_at(rank == own_rank() ? barrier : address_in_cluster(barrier, rank), place) - barriers);
    if (!barriers[copy.barrier].is_fenced) fail_at(site, "a bulk copy arrives at a barrier, and no fence has followed its making,");
    start_bulk(copy);
  });
}
static void start_barriers() {
  barrier_count = 0;
  barriers_begin = ~(size_t)0;
  barriers_end = 0;
}
static void end_barriers() {
  if (!bulk.empty()) report("a block ends before its bulk copies have arrived, the one at %s among them", at_place(bulk.front().place));
}

void sync_cluster(Site site) {
  follow(site.line);
  fibers[me].site = site;
  wait(fibers[me], at_block);
}
}  // namespace emulator
