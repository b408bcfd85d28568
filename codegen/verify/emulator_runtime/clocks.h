// Which accesses happened before which: vector clocks, as stamps of one counter that moves on wherever threads meet.
//
// A barrier of the block tells everyone everything, so that one number stands for it: what was done up to `base`. What
// fewer threads tell each other stands in `known`. Shuffles, matrix loads and products of a warp order no memory (CUDA C++
// Programming Guide, "Warp shuffle functions": they "do not imply a memory barrier"; PTX says none of the others).
#pragma once
#include "fibers.h"

namespace emulator {
typedef uint32_t Stamp;
constexpr Stamp under_way = ~0u;
constexpr unsigned most_actors = 4096;

enum Kind { barrier_kind, wait_kind, commit_kind, fence_kind, warp_kind };
constexpr const char* kind_names[] = {"barrier", "wait", "commit", "fence", "warp"};
constexpr unsigned most_sites = 4096, none = ~0u;
struct Used { unsigned line; Kind kind; bool executed, needed; };
static Used sites[most_sites];
static unsigned undecided_waits;  // waits and commits that were executed and not needed yet

static Stamp tick = 1, launch_start, block_start;
static Stamp base, base_other;    // the latest barrier; the latest one at another place than it
static Stamp decisive;            // what was done after it is unordered, or ordered by a place not known to be needed
static unsigned base_site = none;
static Stamp* stamps;             // of threads: what they do now
static Stamp stamp;               // of `me`
static bool is_checked, has_partial, has_phases;
static Stamp *known, *known_other;  // [thread][actor]; before the latest meetings at `partial_site` of the thread
static unsigned* partial_site;
// A thread's fences between the proxies.
struct Fence { Stamp stamp; unsigned site; };
struct Fences { Fence* all; unsigned count, capacity; };
static Fences* fences;

static void execute(Site site, Kind kind) {
  Used& used = sites[site.number % most_sites];
  if (used.executed) return;
  used = {site.line, kind, true, false};
  undecided_waits += kind == wait_kind || kind == commit_kind;
}
static void decide() { decisive = base_site == none || sites[base_site].needed ? base : base_other; }
static void need(unsigned site) {
  Used& used = sites[site % most_sites];
  if (used.needed) return;
  used.needed = true;
  undecided_waits -= used.kind == wait_kind || used.kind == commit_kind;
  decide();
}
static void start_clocks() {
  stamps = new Stamp[thread_count]();
  fences = new Fences[thread_count]();
  if (!has_partial) return;
  size_t bytes = sizeof(Stamp) * thread_count * actor_count;
  known = (Stamp*)calloc(1, bytes);
  known_other = (Stamp*)calloc(1, bytes);
  partial_site = new unsigned[thread_count];
}
static void block_started() {
  block_start = base = base_other = tick++;
  base_site = none;
  decide();
  for (unsigned i = 0; i < thread_count; ++i) {
    stamps[i] = tick;
    fences[i].count = 0;
    if (has_partial) partial_site[i] = none;
  }
}
static void barrier_passed(Site site) {
  if (base_site != site.number % most_sites) base_other = base;
  base_site = site.number % most_sites;
  base = tick++;
  decide();
  for (unsigned i = 0; i < thread_count; ++i) stamps[i] = tick;
}
static void act_as(unsigned thread) {
  me = thread;
  stamp = stamps[thread];
}
// Up to when this thread knows what thread `other` did.
static Stamp knows_of(unsigned other) {
  if (other == me) return stamp;
  Stamp more = has_partial ? known[me * actor_count + other] : 0;
  return more > base ? more : base;
}
// Whether what another thread did at `then` happened before now; `alone` says which place alone makes it so, if one does.
static bool happened(unsigned other, Stamp then, unsigned& alone) {
  Stamp by_others = has_partial ? known[me * actor_count + other] : 0;
  if (other >= thread_count) return by_others >= then;  // no barrier of the block waits for it
  if (then <= base) {
    if (then > base_other && by_others < then) alone = base_site;
    return true;
  }
  if (by_others < then) return false;
  if (known_other[me * actor_count + other] < then) alone = partial_site[me];
  return true;
}
// Threads tell each other all they know: those of `tell` to those of `listen`, both from `first` on.
static void tell(unsigned first, unsigned lanes, unsigned site) {
  static Stamp joined[most_actors];
  memset(joined, 0, sizeof joined);
  for_lanes(lanes, [&](unsigned i) {
    const Stamp* row = known + (size_t)(first + i) * actor_count;
    for (unsigned other = 0; other < actor_count; ++other) joined[other] = row[other] > joined[other] ? row[other] : joined[other];
  });
  for_lanes(lanes, [&](unsigned i) { joined[first + i] = stamps[first + i]; });
  ++tick;
  for_lanes(lanes, [&](unsigned i) {
    size_t row = (size_t)(first + i) * actor_count;
    if (partial_site[first + i] != site) memcpy(known_other + row, known + row, sizeof(Stamp) * actor_count);
    partial_site[first + i] = site;
    memcpy(known + row, joined, sizeof(Stamp) * actor_count);
    stamps[first + i] = tick;
  });
}
}  // namespace emulator
