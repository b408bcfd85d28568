// What is done later than it is asked for: copies (cp.async) of threads, products of warp groups (wgmma) of warps. Both are
// gathered in groups by commits, and waits tell how many groups may still be under way.
//
// From its start to the wait that completes its group a copy is a write of nobody who is ordered before or after anyone,
// and a product a read. Data moves at the start or at the wait, as drawn.
#pragma once
#include <vector>
#include "numbers.h"
#include "shadow.h"

namespace emulator {
constexpr unsigned most_commit_sites = 24;
// Commits so far, in all and by the places that made them.
struct Commits { unsigned all = 0; uint16_t by_site[most_commit_sites] = {}; };
struct Wait { unsigned site, pending; Commits commits; Stamp stamp; };
template <typename Item> struct Group { std::vector<Item> items; Commits before; bool is_early = false; };

struct Queue {
  unsigned owner;  // a thread, or the first of a warp
  bool is_warps;
  Commits commits;
  std::vector<Wait> waits;
};
template <typename Item> struct QueueOf : Queue {
  std::vector<Group<Item>> groups;  // committed and not complete
  Group<Item> open;

  void start(unsigned first, bool of_warp) {
    owner = first;
    is_warps = of_warp;
    commits = Commits();
    waits.clear();
    groups.clear();
    open = Group<Item>();
  }
};
static unsigned commit_sites[most_commit_sites], commit_site_count;

// A group of a queue that a wait has completed.
struct Completion { Queue* queue; Commits before; size_t wait; };
static std::vector<Completion> completions;

static unsigned commit_index(Site site) {
  for (unsigned i = 0; i < commit_site_count; ++i)
    if (commit_sites[i] == site.number % most_sites) return i;
  if (commit_site_count == most_commit_sites) report("more than %u places commit groups", most_commit_sites);
  commit_sites[commit_site_count] = site.number % most_sites;
  return commit_site_count++;
}
// Waits of a queue that this thread knows of, from the one on that completed a group.
static size_t known_waits(const Completion& done) {
  const Queue& queue = *done.queue;
  bool is_own = queue.is_warps ? queue.owner / 32 == me / 32 : queue.owner == me;
  size_t end = done.wait + 1;
  while (end < queue.waits.size() && (is_own || queue.waits[end].stamp <= knows_of(queue.owner))) ++end;
  return end;
}
// The place that alone has completed a group by now, if one has.
static unsigned only_wait(uint32_t via) {
  const Completion& done = completions[via - 1];
  const std::vector<Wait>& waits = done.queue->waits;
  unsigned site = waits[done.wait].site;
  for (size_t i = done.wait, end = known_waits(done); i < end; ++i)
    if (waits[i].site != site && waits[i].commits.all > done.before.all + waits[i].pending) return none;
  return site;
}
// An access that a wait made safe: the wait is needed, and so are commits, if no other wait since would have done.
static void waited_for(uint32_t via) {
  const Completion& done = completions[via - 1];
  const std::vector<Wait>& waits = done.queue->waits;
  if (!sites[waits[done.wait].site].needed) {
    unsigned site = only_wait(via);
    if (site != none) need(site);
  }
  for (unsigned without = 0; without < commit_site_count; ++without) {
    if (sites[commit_sites[without]].needed) continue;
    unsigned before = done.before.all - done.before.by_site[without];
    bool is_complete = false;
    for (size_t i = done.wait, end = known_waits(done); i < end; ++i)
      is_complete |= waits[i].commits.all - waits[i].commits.by_site[without] > before + waits[i].pending;
    if (!is_complete) need(commit_sites[without]);
  }
}
template <typename Item> static void commit(QueueOf<Item>& queue, Site site) {
  execute(site, commit_kind);
  queue.groups.push_back(std::move(queue.open));
  ++queue.commits.all;
  ++queue.commits.by_site[commit_index(site)];
  queue.open = Group<Item>();
  queue.open.before = queue.commits;
}
template <typename Item, typename Each> static void complete(QueueOf<Item>& queue, Site site, unsigned pending, Each each) {
  execute(site, wait_kind);
  queue.waits.push_back({site.number % most_sites, pending, queue.commits, stamp});
  size_t done = queue.groups.size() > pending ? queue.groups.size() - pending : 0;
  for (size_t i = 0; i < done; ++i) {
    Group<Item>& group = queue.groups[i];
    if (group.items.empty()) continue;
    completions.push_back({&queue, group.before, queue.waits.size() - 1});
    for (Item& item : group.items) each(item, group.is_early, (uint32_t)completions.size());
  }
  queue.groups.erase(queue.groups.begin(), queue.groups.begin() + (long)done);
}

// ---- copies

struct Copy { unsigned char* to; const unsigned char* from; unsigned bytes, taken; uint32_t who, place; };
static QueueOf<Copy>* copies;

static void perform(const Copy& copy) {
  memset(copy.to, 0, copy.bytes);
  memcpy(copy.to, copy.from, copy.taken);
}
static void mark(const Copy& copy, Access now) {
  Area& area = *area_of((uintptr_t)copy.to);
  for_cells(area, (size_t)(copy.to - area.start), copy.bytes, copy.place, true, [&](const Where&, Cell& cell) {
    // Another may have written since, in no order.
    if (cell.write.stamp == under_way && cell.write.who == copy.who) cell.write = now;
  });
}
void copy_later(void* to, const void* from, unsigned bytes, bool inside) {
  uint32_t place = EMULATOR_PLACE;
  if ((uintptr_t)to % bytes || (inside && (uintptr_t)from % bytes)) fail_at(place, "an asynchronous copy is not aligned");
  Copy copy{(unsigned char*)to, (const unsigned char*)from, bytes, inside ? bytes : 0, self(), place};
  QueueOf<Copy>& queue = copies[me];
  Group<Copy>& open = queue.open;
  if (open.items.empty()) open.is_early = draw() & 1;
  open.items.push_back(copy);
  if (is_checked) {
    Area* area = area_of((uintptr_t)to);
    if (!area || area->is_global) fail_at(place, "an asynchronous copy to no shared memory");
    if (inside) access<false>(from, bytes, place);
    check_bounds(*area, (uintptr_t)to, bytes, place, true);
    count_step();
    follow(*area, (uintptr_t)to, bytes, true);
    Access now{self(), under_way, place, 0};
    for_cells(*area, (uintptr_t)to - (uintptr_t)area->start, bytes, place, true, [&](const Where& where, Cell& cell) {
      uint32_t value = 0;
      if (inside) memcpy(&value, copy.from + (where.area.start + where.at - copy.to), where.bytes);
      write_cell(where, cell, now, &value);
    });
  }
  if (open.is_early) perform(copy);
}
void commit_copies(Site site) {
  commit(copies[me], site);
  follow(site.line);
}
void wait_for_copies(Site site, unsigned pending) {
  follow(site.line);
  complete(copies[me], site, pending, [&](const Copy& copy, bool is_early, uint32_t via) {
    if (!is_early) perform(copy);
    if (is_checked) mark(copy, {self(), stamp, copy.place, via});
  });
}

// ---- products of warp groups

// An operand as its descriptor tells: a tile in 128-byte swizzle, in atoms of eight rows of 128 bytes.
struct Described {
  unsigned start, leading, stride, bytes;
  bool is_turned;
  Described(uint64_t descriptor, bool is_turned, Element element) : bytes(bytes_of(element)), is_turned(is_turned) {
    if (is_turned && bytes != 2) fail("a matrix descriptor turns an operand that has no elements of 16 bits");
    start = (descriptor & 0x3FFF) << 4;
    leading = (descriptor >> 16 & 0x3FFF) << 4;
    stride = (descriptor >> 32 & 0x3FFF) << 4;
    if (descriptor >> 62 != 1) fail("a matrix descriptor asks for another swizzle than 128 bytes");
    if (descriptor & (7ULL << 49 | 3ULL << 14 | 3ULL << 30 | 7ULL << 46 | 1023ULL << 52))
      fail("a matrix descriptor has bits where it has no field, or a base offset");
  }
  // Byte of element `spatial` (row of A, column of B) at step `depth` of the product's depth.
  unsigned at(unsigned spatial, unsigned depth) const {
    // K-major: ((8, m), (T, 2k)) : ((8T, SBO), (1, T)); MN-major: ((T, 8, m), (8, k)) : ((1, T, LBO), (8T, SBO)), both
    // in elements, T of them to 16 bytes; those of MN-major operands have 16 bits.
    unsigned byte = is_turned ? spatial % 64 * 2 + spatial / 64 * leading + depth % 8 * 128 + depth / 8 * stride
                              : spatial % 8 * 128 + spatial / 8 * stride + depth * bytes;
    unsigned address = start + byte;
    return address ^ (address >> 7 & 7) << 4;  // Swizzle<3, 4, 3> on addresses
  }
};
constexpr unsigned group_threads = 128, most_width = 256;
// A warp's part of a product: 16 rows of A by all of B.
struct Product {
  uint64_t a, b;
  Element element;
  unsigned width, row;
  bool a_turned, b_turned;
  uint32_t place;
  float* sums[32];
  size_t shared;  // where its block's shared memory starts
  const unsigned* rows[32] = {};  // registers of A, where it is not described
  bool is_new = false;            // sums start anew
};
struct Products : QueueOf<Product> {
  unsigned issued = 0;
  bool is_dirty = true;                 // its accumulators were touched since the last product
  std::vector<unsigned> arrivals;       // places of the fences since
  std::vector<Completion> completed;    // the group of the latest product, if complete
};
static Products* products;  // by warp
// What the warps of a group said to every product: all have to say the same.
static std::vector<std::pair<uint64_t, uint64_t>>* agreed;

static Area& dynamic_area() { return areas[area_count - 1]; }
static float number_at(size_t byte, Element element) { return number_of(dynamic_area().start + byte, element); }
static float number_in(unsigned word, unsigned half, Element element) {
  return number_of((const unsigned char*)&word + 2 * half, element);
}
// Bytes of the depth of a product.
constexpr unsigned depth_bytes = 32;
// `each(byte)` for every piece of 16 bytes of both operands, which lie side by side.
template <typename Each> static void for_pieces(const Product& product, Each each) {
  auto operand = [&](uint64_t descriptor, bool is_turned, unsigned first, unsigned count) {
    Described from(descriptor, is_turned, product.element);
    unsigned depth = depth_bytes / from.bytes, piece = 16 / from.bytes;
    for (unsigned i = 0; i < count; i += is_turned ? piece : 1)
      for (unsigned k = 0; k < depth; k += is_turned ? 1 : piece) each(from.at(first + i, k));
  };
  if (!product.rows[0]) operand(product.a, product.a_turned, product.row, 16);
  operand(product.b, product.b_turned, 0, product.width);
}
static void perform(const Product& product) {
  Described a(product.rows[0] ? product.b : product.a, product.a_turned, product.element);
  Described b(product.b, product.b_turned, product.element);
  const unsigned depth = depth_bytes / b.bytes;
  float rows[16][depth_bytes], columns[most_width][depth_bytes];
  for (unsigned k = 0; k < depth; ++k) {
    for (unsigned m = 0; m < 16; ++m)
      rows[m][k] = product.rows[0] ? number_in(product.rows[m % 8 * 4 + k % 8 / 2][m / 8 + k / 8 * 2], k % 2, product.element)
                                   : number_at(product.shared + a.at(product.row + m, k), product.element);
    for (unsigned n = 0; n < product.width; ++n) columns[n][k] = number_at(product.shared + b.at(n, k), product.element);
  }
  // Lane l of a warp has rows l / 4 and 8 more; columns l % 4 * 2, one more, and all 8 apart.
  for (unsigned m = 0; m < 16; ++m)
    for (unsigned n = 0; n < product.width; ++n) {
      float& sum = product.sums[m % 8 * 4 + n % 8 / 2][n / 8 * 4 + m / 8 * 2 + n % 2];
      if (product.element == int8) {
        int& whole = (int&)sum;
        for (unsigned k = 0; k < depth; ++k) whole += (int)rows[m][k] * (int)columns[n][k];
        continue;
      }
      if (product.is_new) sum = 0.0f;
      for (unsigned k = 0; k < depth; ++k) sum += rows[m][k] * columns[n][k];
    }
}
// Writes that the asynchronous proxy is to see: their threads have fenced since, and this thread knows of it.
static void check_fenced(const Where& where, const Access& write) {
  if (write.stamp <= block_start) return;
  unsigned writer = write.who % actor_count;
  if (writer >= thread_count) return;  // a bulk copy, of the same proxy
  const Fences& all = fences[writer];
  Stamp known_until = writer == me ? stamp : knows_of(writer);
  unsigned one = none;
  bool is_alone = true;
  for (unsigned i = all.count; i-- && all.all[i].stamp > write.stamp;) {
    if (all.all[i].stamp > known_until) continue;
    is_alone &= one == none || one == all.all[i].site;
    one = all.all[i].site;
  }
  if (one == none)
    report("a warp group multiplies %s without a fence between the proxies: written by %s at %s and read by %s at %s",
           byte_of(where.area, where.at), someone(write.who), at_place(write.place), someone(self()), at_place(where.place));
  if (is_alone) need(one);
}
template <typename Each> static void for_operand_cells(const Product& product, Each each) {
  for_pieces(product, [&](unsigned byte) { for_cells(dynamic_area(), product.shared + byte, 16, product.place, false, each); });
}
static void multiply_together(unsigned first, unsigned lanes) {
  Fiber& leader = fibers[me];
  Products& own = products[first / 32];
  if (lanes != 0xffffffffu || first % 32) fail("a warp group multiplies without all of its lanes");
  if (own.is_dirty && own.arrivals.empty()) fail_at(leader.place, "a warp group multiplies without a fence before it");
  if (own.is_dirty) {
    bool is_alone = true;
    for (unsigned site : own.arrivals) is_alone &= site == own.arrivals.front();
    if (is_alone) need(own.arrivals.front());
  }
  own.is_dirty = false;
  own.arrivals.clear();
  Product product{leader.given[1], leader.given[2], (Element)(leader.given[3] & 15), (unsigned)leader.given[4],
                  first % group_threads / 32 * 16, (bool)(leader.given[3] & 16), (bool)(leader.given[3] & 32), leader.place, {}, own_shared()};
  for (unsigned i = 0; i < 32; ++i) {
    Fiber& fiber = fibers[first + i];
    product.sums[i] = (float*)fiber.given[0];
    uintptr_t start = fiber.given[0], end = start + product.width * 2;
    if (fiber.sums_bytes) {
      uintptr_t known_end = fiber.sums + fiber.sums_bytes;
      start = start < fiber.sums ? start : fiber.sums;
      end = end > known_end ? end : known_end;
    }
    fiber.sums = start;
    fiber.sums_bytes = end - start;
    if (leader.given[3] & 64) product.rows[i] = (const unsigned*)fiber.given[5];
    if (fiber.given[1] != product.a || fiber.given[2] != product.b) fail_at(leader.place, "threads of a warp group describe different matrices");
  }
  product.is_new = leader.given[3] & 128;
  auto& said = agreed[first / group_threads];
  if (own.issued == said.size()) said.push_back({product.a, product.b});
  if (said[own.issued++] != std::pair(product.a, product.b)) fail_at(leader.place, "threads of a warp group describe different matrices");
  if (is_checked) {
    unsigned thread = first + draw(32);
    act_as(thread);
    for_pieces(product, [&](unsigned byte) {
      check_bounds(dynamic_area(), (uintptr_t)dynamic_area().start + product.shared + byte, 16, product.place, false);
    });
    for_operand_cells(product, [&](const Where& where, Cell& cell) {
      check_write(where, cell);
      check_fenced(where, cell.write);
      ++cell.products;
    });
    count_step();
  }
  Group<Product>& open = own.open;
  if (open.items.empty()) open.is_early = draw() & 1;
  open.items.push_back(product);
  if (!open.is_early) return;
  // In order: those before it, if late until now, come first.
  for (Group<Product>& group : own.groups) {
    if (!group.is_early)
      for (const Product& earlier : group.items) perform(earlier);
    group.is_early = true;
  }
  perform(product);
}
static void commit_together(unsigned first, unsigned) { commit(products[first / 32], fibers[me].site); }
static void arrive_together(unsigned first, unsigned) {
  execute(fibers[me].site, fence_kind);
  products[first / 32].arrivals.push_back(fibers[me].site.number % most_sites);
}
// The products of a warp are one more actor, of which the lanes know that waited for them. Who reads, and the time.
static uint32_t products_done(unsigned warp) {
  ++tick;
  for (unsigned lane = 0; lane < 32; ++lane) {
    size_t at = (size_t)(warp * 32 + lane) * actor_count + thread_count + warp;
    known[at] = known_other[at] = tick;
  }
  return block_number * actor_count + thread_count + warp;
}
static void wait_together(unsigned first, unsigned) {
  Site site = fibers[me].site;
  Products& own = products[first / 32];
  act_as(first + draw(32));
  Access now{has_phases ? products_done(first / 32) : self(), stamp, 0, 0};
  if (has_phases) now.stamp = tick;
  complete(own, site, (unsigned)fibers[first].given[0], [&](const Product& product, bool is_early, uint32_t via) {
    if (!is_early) perform(product);
    own.completed.assign(1, completions[via - 1]);
    if (!is_checked) return;
    now.place = product.place;
    now.via = via;
    for_operand_cells(product, [&](const Where&, Cell& cell) {
      --cell.products;
      if (has_partial) {
        if (!cell.product_readers) cell.product_readers = (Access*)calloc(warp_count, sizeof(Access));
        cell.product_readers[first / 32] = now;
      } else {
        cell.read[cell.read[0].stamp > cell.read[1].stamp] = now;
      }
    });
  });
}
static void race_with_product(const Where& where) {
  for (unsigned warp = 0; warp < warp_count; ++warp) {
    auto look = [&](const Group<Product>& group) {
      for (const Product& product : group.items)
        for_pieces(product, [&](unsigned byte) {
          if ((product.shared + byte) / 16 != where.at / 16) return;
          report("race on %s: a product of warp %u at %s is under way, when it is written by %s at %s",
                 byte_of(where.area, where.at), warp, at_place(product.place), someone(self()), at_place(where.place));
        });
    };
    for (const Group<Product>& group : products[warp].groups) look(group);
    look(products[warp].open);
  }
  report("race on %s: a product is under way, when it is written by %s at %s", byte_of(where.area, where.at), someone(self()),
         at_place(where.place));
}
static void touch_sums(uintptr_t address, uint32_t place) {
  Products& own = products[me / 32];
  own.is_dirty = true;
  auto look = [&](const Group<Product>& group) {
    for (const Product& product : group.items) {
      uintptr_t start = (uintptr_t)product.sums[me % 32];
      if (address - start < product.width * 2)
        report("sums of a product that is under way, of %s at %s, are touched at %s", someone(self()), at_place(product.place),
               at_place(place));
    }
  };
  for (const Group<Product>& group : own.groups) look(group);
  look(own.open);
  if (undecided_waits && !own.completed.empty()) {
    completions.push_back(own.completed.front());
    waited_for((uint32_t)completions.size());
    completions.pop_back();
  }
}
void arrive_at_warp_group(Site site) { together(site, ~0u, EMULATOR_PLACE, arrive_together); }
void commit_products(Site site) { together(site, ~0u, EMULATOR_PLACE, commit_together); }
void wait_for_products(Site site, unsigned pending) {
  fibers[me].given[0] = pending;
  together(site, ~0u, EMULATOR_PLACE, wait_together);
}
void multiply_by_warp_group(Site site, void* sums, uint64_t a, uint64_t b, Element element, unsigned width, bool a_turned,
                            bool b_turned) {
  uint64_t* given = fibers[me].given;
  given[0] = (uint64_t)sums;
  given[1] = a;
  given[2] = b;
  given[3] = (uint64_t)element | (uint64_t)a_turned << 4 | (uint64_t)b_turned << 5;
  given[4] = width;
  together(site, ~0u, EMULATOR_PLACE, multiply_together);
}
void multiply_anew(Site site, float* sums, uint64_t a, uint64_t b, Element element, unsigned width, bool a_turned,
                   bool b_turned) {
  multiply_by_warp_group(site, sums, a, b, (Element)(element | 128), width, a_turned, b_turned);
}
void multiply_registers(Site site, float* sums, const unsigned* a, uint64_t b, Element element, unsigned width, bool b_turned) {
  fibers[me].given[5] = (uint64_t)a;
  multiply_by_warp_group(site, sums, 0, b, (Element)(element | 64), width, false, b_turned);
}
void fence_proxies(Site site) {
  execute(site, fence_kind);
  follow(site.line);
  Fences& own = fences[me];
  if (own.count == own.capacity) own.all = (Fence*)realloc(own.all, sizeof(Fence) * (own.capacity = 2 * own.capacity + 8));
  stamp = stamps[me] = ++tick;
  own.all[own.count++] = {tick, site.number % most_sites};
}

static void start_queues() {
  for (unsigned i = 0; i < thread_count; ++i) copies[i].start(i, false);
  for (unsigned i = 0; i < warp_count; ++i) {
    products[i] = Products();
    products[i].start(i * 32, true);
    agreed[i / 4].clear();
  }
  for (unsigned i = 0; i < thread_count; ++i) fibers[i].sums_bytes = 0;
  completions.clear();
}
// What nobody waited for is nobody's concern once the block has ended.
static void end_queues() {
  for (unsigned i = 0; i < warp_count; ++i) {
    Products& own = products[i];
    if (own.open.items.empty() && own.groups.empty()) continue;
    me = i * 32;
    fail("a warp group ends before it waited for its products");
  }
  if (!is_checked) return;
  for (unsigned i = 0; i < thread_count; ++i) {
    for (const Group<Copy>& group : copies[i].groups)
      for (const Copy& copy : group.items) mark(copy, {0, 0, 0, 0});
    for (const Copy& copy : copies[i].open.items) mark(copy, {0, 0, 0, 0});
  }
}
}  // namespace emulator
