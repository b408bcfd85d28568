// Threads as fibers, which switch where they wait for each other, in an order drawn from the seed: the block, the warp, the
// lanes of a warp at every turn. A warp runs until each of its lanes waits.
#pragma once
#include <sys/mman.h>
#include <ucontext.h>
#include "report.h"

namespace emulator {
enum State : unsigned char { runnable, at_block, at_warp, at_phase, returned };
// What the lanes of a warp do together once all are there; `first` is the thread that is lane 0.
typedef void (*Perform)(unsigned first, unsigned lanes);

struct Fiber {
  void* jump[5];
  State state;
  Site site;       // where it waits,
  unsigned place;  // and from where in the machine code it was asked to
  unsigned mask;
  Perform perform;
  uint64_t given[6];
  unsigned awaited, parity;    // the barrier in shared memory whose phase it waits for
  dim3_t index;
  uintptr_t sums, sums_bytes;  // its accumulators of warp group products
  uint64_t trace;
  ucontext_t context;
};
constexpr size_t stack_bytes = 1 << 18;
constexpr unsigned most_warps = 256;  // of a cluster
static Fiber* fibers;
// Blocks of a cluster run together, their threads one block's after the other's; `actor_count` are its threads and whatever
// else acts at times of its own (barriers.h).
static unsigned thread_count, block_threads, cluster_size = 1, actor_count, warp_count, me;
static uint32_t block_number;  // of the cluster, where there are several to one
static unsigned char* stacks;
static void** kernel_arguments;
static void* scheduler[5];
static ucontext_t starter;

static uint64_t random_state;
static uint32_t draw() {  // xorshift64*
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return (uint32_t)(random_state * 0x2545F4914F6CDD1DULL >> 32);
}
static uint32_t draw(uint32_t count) { return (uint32_t)((uint64_t)draw() * count >> 32); }

static const char* named_barrier(unsigned actor);
static const char* named(unsigned thread) {
  if (thread >= thread_count) return named_barrier(thread);
  thread %= block_threads;
  if (blockDim.y * blockDim.z == 1) return words("thread %u", thread);
  return words("thread (%u, %u, %u)", thread % blockDim.x, thread / blockDim.x % blockDim.y, thread / blockDim.x / blockDim.y);
}
static const char* block_named(uint32_t number) {
  if (gridDim.y * gridDim.z == 1) return words("block %u", number);
  return words("block (%u, %u, %u)", number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y);
}
static const char* block_of(unsigned thread) {
  return block_named(block_number * cluster_size + (thread < thread_count ? thread / block_threads : 0));
}
static void fail_at(unsigned place, const char* reason) {
  report("%s by %s of %s at %s", reason, named(me), block_of(me), at_place(place));
}
static void fail_at(Site site, const char* reason) {
  report("%s by %s of %s at %s", reason, named(me), block_of(me), at_line(site.line));
}
void fail(const char* reason) { report("%s by %s of %s", reason, named(me), block_of(me)); }

__attribute__((noinline, noipa)) static void jump_to(void** to) { __builtin_longjmp(to, 1); }
__attribute__((noinline, noipa)) static void switch_from(void** from, void** to) {
  if (__builtin_setjmp(from) == 0) jump_to(to);
}
__attribute__((noinline, noipa)) static void park(Fiber& fiber) {
  if (__builtin_setjmp(fiber.jump) == 0) swapcontext(&fiber.context, &starter);
}
static void body() {
  Fiber& fiber = fibers[me];
  park(fiber);
  for (;;) {
    emulator_call(kernel_arguments);
    fiber.state = returned;
    switch_from(fiber.jump, scheduler);
  }
}
static void start_fibers() {
  stacks = (unsigned char*)mmap(nullptr, thread_count * stack_bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  fibers = new Fiber[thread_count]();
  if (stacks == MAP_FAILED) report("out of memory");
  for (me = 0; me < thread_count; ++me) {
    Fiber& fiber = fibers[me];
    unsigned own = me % block_threads;
    fiber.index = {own % blockDim.x, own / blockDim.x % blockDim.y, own / blockDim.x / blockDim.y};
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + me * stack_bytes;
    fiber.context.uc_stack.ss_size = stack_bytes;
    makecontext(&fiber.context, body, 0);
    swapcontext(&starter, &fiber.context);
  }
}

unsigned lane() { return me % 32; }
static unsigned lanes_of(unsigned first) {  // that have not returned
  unsigned mask = 0;
  for (unsigned i = first; i < first + 32 && i < thread_count; ++i)
    if (fibers[i].state != returned) mask |= 1u << (i - first);
  return mask;
}
unsigned warp_lanes() { return lanes_of(me / 32 * 32); }

static void wait(Fiber& fiber, State state) {
  fiber.state = state;
  switch_from(fiber.jump, scheduler);
}
// Wait until the lanes of `mask` are here, all of them at this place of the text, and have done it together.
static Fiber& together(Site site, unsigned mask, unsigned place, Perform perform) {
  Fiber& fiber = fibers[me];
  if (!(mask >> me % 32 & 1)) fail_at(site, words("a mask, 0x%x, without the lane itself", mask));
  fiber.site = site;
  fiber.place = place;
  fiber.mask = mask;
  fiber.perform = perform;
  wait(fiber, at_warp);
  return fiber;
}
template <typename Each> static void for_lanes(unsigned lanes, Each each) {
  for (; lanes; lanes &= lanes - 1) each((unsigned)__builtin_ctz(lanes));
}
// The lanes of a warp that meet go on; whether there were some.
static bool release_warp(unsigned first) {
  unsigned waiting = 0, alive = lanes_of(first);
  for_lanes(alive, [&](unsigned i) { waiting |= (unsigned)(fibers[first + i].state == at_warp) << i; });
  bool some = false;
  for (unsigned open = waiting; open;) {
    unsigned i = (unsigned)__builtin_ctz(open);
    Fiber& leader = fibers[first + i];
    unsigned wanted = leader.mask & alive;
    open &= ~(1u << i);
    if ((wanted & waiting) != wanted) continue;
    for_lanes(wanted, [&](unsigned j) {
      Fiber& other = fibers[first + j];
      me = first + i;
      if (other.site.number != leader.site.number)
        report("lanes of a warp meet at different places: %s of %s at %s and %s at %s", named(first + i),
               block_of(first + i), at_line(leader.site.line), named(first + j), at_line(other.site.line));
      if (other.mask != leader.mask)
        fail_at(leader.site, words("lanes of a warp name different masks, 0x%x and 0x%x,", leader.mask, other.mask));
    });
    open &= ~wanted;
    waiting &= ~wanted;
    me = first + i;
    leader.perform(first, wanted);
    for_lanes(wanted, [&](unsigned j) { fibers[first + j].state = runnable; });
    some = true;
  }
  return some;
}
static void barrier_passed(Site site);  // all threads are at it
static void thread_resumed();           // `me` runs next
static bool phase_reached(Fiber& fiber);  // the one that it waits for; then it goes on
static bool bulk_goes_on(bool must);    // a bulk copy arrives, if there is one and it is time, or it must

[[noreturn]] static void hangs(unsigned thread);
static bool release_block() {
  unsigned one = thread_count;
  for (unsigned i = 0; i < thread_count; ++i) {
    if (fibers[i].state == at_block && one == thread_count) one = i;
    else if (fibers[i].state == at_block && fibers[i].site.number != fibers[one].site.number)
      report("threads of a block wait for each other at different places: %s of %s at %s and %s at %s", named(one),
             block_of(one), at_line(fibers[one].site.line), named(i), at_line(fibers[i].site.line));
  }
  if (one == thread_count) return false;
  for (unsigned i = 0; i < thread_count; ++i)
    if (fibers[i].state == at_phase) hangs(i);
    else if (fibers[i].state == at_warp)
      report("threads of a block wait for each other at different places: %s of %s at %s and %s at %s", named(one),
             block_of(one), at_line(fibers[one].site.line), named(i), at_line(fibers[i].site.line));
  barrier_passed(fibers[one].site);
  for (unsigned i = 0; i < thread_count; ++i)
    if (fibers[i].state == at_block) fibers[i].state = runnable;
  return true;
}
static void run_lanes(unsigned first) {
  unsigned count = first + 32 < thread_count ? 32 : thread_count - first;
  unsigned start = draw(), step = count == 32 ? draw() | 1 : 1;
  for (unsigned turn = 0; turn < count; ++turn) {
    unsigned i = first + (start + turn * step) % count;
    me = i;
    if (fibers[i].state == at_phase && phase_reached(fibers[i])) fibers[i].state = runnable;
    if (fibers[i].state != runnable) continue;
    threadIdx = fibers[i].index;
    thread_resumed();
    switch_from(scheduler, fibers[i].jump);
  }
}
static bool some_phase_reached() {
  for (unsigned i = 0; i < thread_count; ++i) {
    me = i;
    if (fibers[i].state != at_phase || !phase_reached(fibers[i])) continue;
    fibers[i].state = runnable;
    return true;
  }
  return false;
}
static void run_block() {
  static unsigned ready[most_warps];
  for (unsigned i = 0; i < thread_count; ++i) fibers[i].state = runnable;
  do do {
    unsigned count = 0;
    for (unsigned warp = 0; warp < warp_count; ++warp) ready[count++] = warp;
    while (count) {
      bulk_goes_on(false);
      unsigned at = draw(count);
      run_lanes(ready[at] * 32);
      // Most often it goes on as far as it can: what only a barrier orders, and has none, is then far apart.
      do {
        if (!release_warp(ready[at] * 32)) {
          ready[at] = ready[--count];
          break;
        }
        if (draw(8) == 0) break;
        run_lanes(ready[at] * 32);
      } while (true);
    }
  } while (some_phase_reached() || bulk_goes_on(true));
  while (release_block());
  for (unsigned i = 0; i < thread_count; ++i)
    if (fibers[i].state != returned) {
      me = i;
      if (fibers[i].state == at_phase) hangs(i);
      fail_at(fibers[i].site, words("lanes 0x%x of a warp are waited for in vain,", fibers[i].mask & ~(1u << i % 32)));
    }
}
}  // namespace emulator
