// Runs the blocks of a grid one after another: fibers of a block take turns, and switch where they wait for each other.
// Written behind the kernel, whose call is `emulator_call(void** arguments)`.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

dim3_t threadIdx, blockIdx, blockDim, gridDim;
static void emulator_call(void** arguments);

extern unsigned char __start_shared_memory[] __attribute__((weak));
extern unsigned char __stop_shared_memory[] __attribute__((weak));

namespace emulator {
enum State { runnable, at_block, at_warp, returned };
struct Fiber { ucontext_t context; State state; dim3_t index; };
constexpr size_t stack_bytes = 1 << 18;
unsigned char* dynamic_shared;
static Fiber* fibers;
static unsigned char (*exchanged)[exchanged_bytes];
static Copies* copies;
static unsigned current, fiber_count;
static ucontext_t scheduler;
static void** kernel_arguments;

void fail(const char* reason) {
  fprintf(stderr, "emulator: %s (block %u, thread %u)\n", reason, blockIdx.x, current);
  _exit(3);
}
static void wait(State state) {
  unsigned me = current;
  fibers[me].state = state;
  swapcontext(&fibers[me].context, &scheduler);
}
void sync_block() { wait(at_block); }
void sync_warp() { wait(at_warp); }
unsigned lane() { return current % 32; }
unsigned char* exchange(unsigned lane) { return exchanged[current / 32 * 32 + lane]; }
Copies& copies_of_thread() { return copies[current]; }
bool copies_are_hidden() {
  for (unsigned i = 0; i < fiber_count; ++i)
    if (copies[i].hidden) return true;
  return false;
}
unsigned warp_lanes() {
  unsigned mask = 0, first = current / 32 * 32;
  for (unsigned i = first; i < first + 32 && i < fiber_count; ++i)
    if (fibers[i].state != returned) mask |= 1u << (i - first);
  return mask;
}
static void body() {
  emulator_call(kernel_arguments);
  fibers[current].state = returned;
}
static bool release(unsigned first, unsigned end, State waited) {
  bool some = false;
  for (unsigned i = first; i < end; ++i) {
    if (fibers[i].state == waited) some = true;
    else if (fibers[i].state != returned) return false;
  }
  for (unsigned i = first; i < end; ++i)
    if (fibers[i].state == waited) fibers[i].state = runnable;
  return some;
}
// A warp runs as far as it can before the next one starts: what only a barrier orders, and has none, goes wrong.
static void run_warp(unsigned warp, bool backwards) {
  unsigned first = warp * 32, end = first + 32 < fiber_count ? first + 32 : fiber_count;
  do {
    for (unsigned turn = 0; turn < end - first; ++turn) {
      unsigned i = backwards ? end - 1 - turn : first + turn;
      if (fibers[i].state != runnable) continue;
      current = i;
      threadIdx = fibers[i].index;
      swapcontext(&scheduler, &fibers[i].context);
    }
  } while (release(first, end, at_warp));
}
static void run_block(unsigned char* stacks, bool backwards) {
  for (unsigned i = 0; i < fiber_count; ++i) {
    Fiber& fiber = fibers[i];
    copies[i] = Copies();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks + i * stack_bytes;
    fiber.context.uc_stack.ss_size = stack_bytes;
    fiber.context.uc_link = &scheduler;
    fiber.state = runnable;
    fiber.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    makecontext(&fiber.context, body, 0);
  }
  unsigned warps = (fiber_count + 31) / 32;
  for (;;) {
    for (unsigned turn = 0; turn < warps; ++turn) run_warp(backwards ? warps - 1 - turn : turn, backwards);
    bool all_returned = true;
    for (unsigned i = 0; i < fiber_count; ++i) all_returned &= fibers[i].state == returned;
    if (all_returned) return;
    if (!release(0, fiber_count, at_block)) fail("threads of a block wait for each other at different places");
  }
}
// 64 MiB before and behind an array cannot be touched. Its end is as near to them as an alignment of 64 bytes allows;
// the bytes between are checked.
constexpr size_t guard_bytes = 1 << 26;
struct Array { unsigned char* start; size_t bytes, slack; };
static Array place(size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), rounded = (bytes + 63) / 64 * 64;
  size_t pages = (rounded + page - 1) / page * page;
  unsigned char* base = (unsigned char*)mmap(nullptr, pages + 2 * guard_bytes, PROT_NONE,
                                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED || mprotect(base + guard_bytes, pages, PROT_READ | PROT_WRITE)) fail("out of memory");
  memset(base + guard_bytes, 0xff, pages);
  return {base + guard_bytes + pages - rounded, bytes, rounded - bytes};
}
}  // namespace emulator

// arguments: file, grid x y z, block x y z, dynamic shared bytes, then the bytes of every array. The file holds all
// arrays one after another, and is written back.
int main(int count, char** text) {
  using namespace emulator;
  auto number = [&](int i) { return (unsigned)strtoul(text[i], nullptr, 10); };
  gridDim = {number(2), number(3), number(4)};
  blockDim = {number(5), number(6), number(7)};
  size_t dynamic_bytes = number(8);
  int arrays = count - 9;
  Array placed[64];
  void* arguments[64];
  FILE* file = fopen(text[1], "r+b");
  if (!file) return 4;
  for (int i = 0; i < arrays; ++i) {
    placed[i] = place(strtoull(text[9 + i], nullptr, 10));
    if (fread(placed[i].start, 1, placed[i].bytes, file) != placed[i].bytes) return 4;
    arguments[i] = placed[i].start;
  }
  Array shared = place(dynamic_bytes);
  dynamic_shared = shared.start;
  kernel_arguments = arguments;
  fiber_count = blockDim.x * blockDim.y * blockDim.z;
  fibers = new Fiber[fiber_count];
  exchanged = new unsigned char[(fiber_count + 31) / 32 * 32][exchanged_bytes]();
  copies = new Copies[fiber_count]();
  unsigned char* stacks = (unsigned char*)mmap(nullptr, fiber_count * stack_bytes, PROT_READ | PROT_WRITE,
                                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stacks == MAP_FAILED) fail("out of memory");
  unsigned block = 0;
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x; ++x) {
        blockIdx = {x, y, z};
        memset(dynamic_shared, 0xff, shared.bytes);
        if (__start_shared_memory) memset(__start_shared_memory, 0xff, __stop_shared_memory - __start_shared_memory);
        run_block(stacks, block++ % 2);
      }
  rewind(file);
  for (int i = 0; i < arrays; ++i) {
    for (size_t j = 0; j < placed[i].slack; ++j)
      if (placed[i].start[placed[i].bytes + j] != 0xff) fail("a store beyond the end of an array");
    if (fwrite(placed[i].start, 1, placed[i].bytes, file) != placed[i].bytes) return 4;
  }
  return fclose(file) ? 4 : 0;
}
