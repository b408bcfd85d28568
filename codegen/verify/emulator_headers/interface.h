// What a kernel, compiled with these headers, asks of the runtime that executes it (../emulator_runtime).
//
// The compiler calls the runtime too: `-fsanitize=thread` puts a call of `__tsan_read4(address)` or its like before every
// load and store, and the runtime, not the sanitizer's library, answers it. Headers therefore touch no shared or global
// memory themselves: what they do there the runtime has to hear of.
#pragma once
#include <stdint.h>

struct dim3_t { unsigned x, y, z; };
extern "C" {
#ifdef EMULATOR_RUNTIME
extern dim3_t threadIdx, blockIdx, blockDim, gridDim;
#else
extern const dim3_t threadIdx, blockIdx, blockDim, gridDim;  // constant to their thread, and so no accesses to check
#endif
void emulator_call(void** arguments);  // calls the kernel
extern unsigned char* emulator_dynamic_shared;
}

namespace emulator {
// A place of the text where threads meet or wait: its line, and a number that no other place has.
struct Site { unsigned line, number; };
enum Element { float16, bfloat16, float32, tfloat32, int8, float8_e4m3, float8_e5m2 };

[[noreturn]] void fail(const char* reason);
unsigned lane();
unsigned warp_lanes();  // bit mask of the lanes that have not returned
void sync_block(Site);
void sync_warp(Site, unsigned mask);
void fence_proxies(Site);
uint64_t from_lane(Site, unsigned mask, uint64_t value, unsigned source);  // a source of 32 and more is the lane itself
unsigned ballot(Site, unsigned mask, bool vote);

// An atomic change is one load and one store; no other fiber runs between them.
uint64_t load_atomic(const void* address, unsigned bytes);
void store_atomic(void* address, unsigned bytes, uint64_t value);
void copy_later(void* to, const void* from, unsigned bytes, bool inside);
void commit_copies(Site);
void wait_for_copies(Site, unsigned pending);

void load_matrix(Site, unsigned* fragment, const void* row, bool transposed);
// Sums of float, or of int for int8; `apart` sums are between those of a product and the next.
void multiply(Site, void* sums, const unsigned* a, const unsigned* b, Element, unsigned apart);

void load_fragment(Site, float* to, const void* from, unsigned leading, Element, unsigned rows, unsigned columns,
                   bool is_row_major);
void store_fragment(Site, float* to, const float* from, unsigned leading, unsigned rows, unsigned columns,
                    bool is_row_major);
// d = a b + c: d and c of m by n, a of m by k, b of k by n.
void multiply_fragments(Site, float* d, const float* a, const float* b, const float* c, unsigned m, unsigned n, unsigned k);

void arrive_at_warp_group(Site);
// Sums of float, or of int for int8.
void multiply_by_warp_group(Site, void* sums, uint64_t a, uint64_t b, Element, unsigned width, bool a_turned, bool b_turned);
// Rows of A in registers, as those of `mma.sync`; sums that are not `added` to start anew.
void multiply_registers(Site, float* sums, const unsigned* a, uint64_t b, Element, unsigned width, bool b_turned);
void multiply_anew(Site, float* sums, uint64_t a, uint64_t b, Element, unsigned width, bool a_turned, bool b_turned);
void commit_products(Site);
void wait_for_products(Site, unsigned pending);

// A tensor and a box of it, both from the innermost dimension on, as a bulk copy sees them; one that rounds makes TensorFloat-32
// of float32.
struct TensorMap { const unsigned char* start; unsigned element_bytes, rank, size[5], box[5]; bool rounds; };
// Addresses are bytes of the block's own dynamic shared memory.
void make_barrier(unsigned address, unsigned count);
void fence_barriers();
void arrive_at_barrier(unsigned address);
void arrive_and_expect(unsigned address, unsigned bytes);
void wait_for_phase(Site, unsigned address, unsigned parity);
// `blocks`: a bit for every block of the cluster that gets it, at the same offset; 0 for the own block alone.
void copy_tile(Site, unsigned to, const TensorMap*, unsigned barrier, unsigned blocks, const int* at);
unsigned address_in_cluster(unsigned address, unsigned rank);
unsigned rank_in_cluster();
void sync_cluster(Site);
}  // namespace emulator
