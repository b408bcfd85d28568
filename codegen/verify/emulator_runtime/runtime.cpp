// Executes a kernel that was compiled with ../emulator_headers: its blocks (or clusters of them) one after another, once for every seed, each time
// from the same memory, and holds what they do against each other.
//
// Arguments: a file; grid x y z; block x y z; bytes of dynamic shared memory; `c` to check and `p` where more than barriers
// order threads, `b` where barriers in shared memory do and a digit for the blocks of a cluster (`-` for none); most steps; seeds, by commas; then for every array its bytes, how many of them are no
// guard, and `i` where it must not be written, `o` where all of it must be, once, `u` otherwise. The file holds all arrays
// one after another and is written back.
#define EMULATOR_RUNTIME
#include <csignal>
#include <string>
#include "matrix.h"

unsigned char* emulator_dynamic_shared;
extern unsigned char __start_shared_memory[] __attribute__((weak));
extern unsigned char __stop_shared_memory[] __attribute__((weak));

namespace emulator {
// The memory of all arrays: 64 MiB before and behind each cannot be touched. Its end is as near to them as an alignment of 64
// bytes allows; the bytes between are checked.
static void place_areas() {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), largest = 0;
  for (unsigned i = 0; i < area_count; ++i) largest = areas[i].bytes > largest ? areas[i].bytes : largest;
  arena_shift = 63 - __builtin_clzll(2 * (largest + page + 2 * guard_bytes) - 1);
  arena_bytes = (size_t)area_count << arena_shift;
  arena = (uintptr_t)mmap(nullptr, arena_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == (uintptr_t)MAP_FAILED) report("out of memory");
  for (unsigned i = 0; i < area_count; ++i) {
    size_t rounded = (areas[i].bytes + 63) / 64 * 64, pages = (rounded + page - 1) / page * page;
    unsigned char* first = (unsigned char*)arena + ((size_t)i << arena_shift) + guard_bytes;
    if (pages && mprotect(first, pages, PROT_READ | PROT_WRITE)) report("out of memory");
    memset(first, 0xff, pages);
    areas[i].start = first + pages - rounded;
  }
}
// A crash tells who ran, and where.
static void crashed(int number, siginfo_t* information, void* context) {
#if defined __x86_64__
  unsigned place = (unsigned)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
#elif defined __aarch64__
  unsigned place = (unsigned)((ucontext_t*)context)->uc_mcontext.pc;
#else
  unsigned place = 0;
#endif
  // The place is looked up as a call's, by the byte before.
  fail_at(place + 1, number == SIGILL || number == SIGTRAP
                         ? "a vector access that is not aligned, or an index beyond a shared or local array,"
                         : "an access outside an array");
}
static void catch_crashes() {
  static unsigned char own_stack[1 << 16];
  stack_t stack{};
  stack.ss_sp = own_stack;
  stack.ss_size = sizeof own_stack;
  sigaltstack(&stack, nullptr);
  struct sigaction action{};
  action.sa_sigaction = crashed;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int number : {SIGSEGV, SIGBUS, SIGILL, SIGTRAP}) sigaction(number, &action, nullptr);
}
static uint64_t trace;  // of all threads of all blocks, in no order
static void run_grid() {
  uint32_t blocks = gridDim.x * gridDim.y * gridDim.z / cluster_size;
  Area& dynamic = dynamic_area();
  launch_start = tick++;
  std::vector<uint32_t> order(blocks);
  for (uint32_t i = 0; i < blocks; ++i) {
    uint32_t j = draw(i + 1);
    order[i] = order[j];
    order[j] = i;
  }
  for (uint32_t number : order) {
    block_number = number;
    if (cluster_size == 1) blockIdx = {number % gridDim.x, number / gridDim.x % gridDim.y, number / gridDim.x / gridDim.y};
    memset(dynamic.start, 0xff, dynamic.bytes);
    if (static_shared) memset(static_shared->start, 0xff, static_shared->bytes);
    block_started();
    start_queues();
    start_barriers();
    for (unsigned i = 0; i < thread_count; ++i) fibers[i].trace = number;
    run_block();
    end_queues();
    end_barriers();
    for (unsigned i = 0; i < thread_count; ++i) trace += fibers[i].trace;
  }
}
static void launch(unsigned arrays, const std::vector<std::vector<unsigned char>>& contents) {
  steps = 0;
  random_state = (seed + 1) * 0x9E3779B97F4A7C15ULL;
  for (unsigned i = 0; i < arrays; ++i) memcpy(areas[i].start, contents[i].data(), areas[i].bytes);
  run_grid();
  for (unsigned i = 0; i < arrays; ++i) {
    for (size_t j = areas[i].bytes; j % 64; ++j)
      if (areas[i].start[j] != 0xff) report("a store beyond the end of an array, @a%u", i);
    if (is_checked && areas[i].is_exact) check_coverage(areas[i]);
  }
}
static int run(char** text) {
  auto number = [&](int i) { return strtoull(text[i], nullptr, 10); };
  gridDim = {(unsigned)number(2), (unsigned)number(3), (unsigned)number(4)};
  blockDim = {(unsigned)number(5), (unsigned)number(6), (unsigned)number(7)};
  is_checked = strchr(text[9], 'c');
  has_phases = strchr(text[9], 'b');
  has_partial = has_phases || strchr(text[9], 'p');
  for (const char* flag = text[9]; *flag; ++flag)
    if (*flag >= '2' && *flag <= '8') cluster_size = (unsigned)(*flag - '0');
  if (number(10)) most_steps = number(10);
  unsigned arrays = 0;
  for (char** array = text + 12; *array; array += 3, ++arrays) {
    Area& area = areas[arrays];
    area.bytes = strtoull(array[0], nullptr, 10);
    area.extent = strtoull(array[1], nullptr, 10);
    area.is_constant = *array[2] == 'i';
    area.is_exact = *array[2] == 'o';
    area.is_global = true;
    area.name = 'a';
    area.number = arrays;
  }
  area_count = arrays + 1;
  shared_bytes = number(8);
  shared_apart = (shared_bytes + 1023) / 1024 * 1024;
  areas[arrays].bytes = areas[arrays].extent = cluster_size == 1 ? shared_bytes : shared_apart * cluster_size;
  areas[arrays].name = 'd';
  place_areas();
  emulator_dynamic_shared = areas[arrays].start;
  if (__start_shared_memory) {
    static_shared = &areas[area_count];
    static_shared->start = __start_shared_memory;
    static_shared->bytes = static_shared->extent = (size_t)(__stop_shared_memory - __start_shared_memory);
    static_shared->name = 's';
  }
  FILE* file = fopen(text[1], "r+b");
  if (!file) return 4;
  std::vector<std::vector<unsigned char>> contents(arrays), results(arrays);
  void* arguments[64];
  for (unsigned i = 0; i < arrays; ++i) {
    contents[i].resize(areas[i].bytes);
    if (fread(contents[i].data(), 1, areas[i].bytes, file) != areas[i].bytes) return 4;
    arguments[i] = areas[i].start;
  }
  kernel_arguments = arguments;
  block_threads = blockDim.x * blockDim.y * blockDim.z;
  thread_count = block_threads * cluster_size;
  warp_count = (thread_count + 31) / 32;
  actor_count = has_phases ? thread_count + warp_count + most_barriers : thread_count;
  if (has_phases && block_threads % 32) report("blocks of %u threads have no barriers in shared memory here", block_threads);
  catch_crashes();
  start_clocks();
  start_fibers();
  copies = new QueueOf<Copy>[thread_count];
  products = new Products[warp_count];
  agreed = new std::vector<std::pair<uint64_t, uint64_t>>[warp_count / 4 + 1];
  if (is_checked)
    for (Area& area : areas)
      if (area.bytes && !area.is_constant) add_cells(area);
  uint64_t first_trace = 0, all_steps = 0;
  unsigned first = 0, count = 0;
  for (char* next = text[11]; *next; next += *next == ',') {
    seed = (unsigned)strtoul(next, &next, 10);
    launch(arrays, contents);
    all_steps = steps > all_steps ? steps : all_steps;
    if (count++ == 0) {
      first = seed;
      first_trace = trace;
      for (unsigned i = 0; i < arrays; ++i) results[i].assign(areas[i].start, areas[i].start + areas[i].bytes);
    } else if (!has_atomics) {
      for (unsigned i = 0; i < arrays; ++i)
        for (size_t j = 0; j < areas[i].bytes; ++j)
          if (areas[i].start[j] != results[i][j]) report("%s is not the same as by seed %u", byte_of(areas[i], j), first);
    }
  }
  rewind(file);
  for (const std::vector<unsigned char>& result : results)
    if (fwrite(result.data(), 1, result.size(), file) != result.size()) return 4;
  printf("%llu %llu\n", (unsigned long long)first_trace, (unsigned long long)all_steps);
  for (const Used& used : sites)
    if (used.executed && !used.needed) printf("%s %u\n", kind_names[used.kind], used.line);
  return fclose(file) ? 4 : 0;
}
}  // namespace emulator

int main(int, char** text) { return emulator::run(text); }
