// What the lanes of a warp do together: shuffles, matrix loads and products, and fragments that the first lane holds whole.
#pragma once
#include <cmath>
#include "barriers.h"

namespace emulator {
static void join_warp(unsigned first, unsigned lanes) {
  if (has_partial) tell(first, lanes, fibers[me].site.number % most_sites);
}
void sync_warp(Site site, unsigned mask) {
  execute(site, warp_kind);
  follow(site.line);
  together(site, mask, EMULATOR_PLACE, join_warp);
}
void sync_block(Site site) {
  if (cluster_size > 1) fail_at(site, "a barrier of a single block of a cluster, which is not emulated,");
  execute(site, barrier_kind);
  follow(site.line);
  fibers[me].site = site;
  wait(fibers[me], at_block);
}

static void shuffle_together(unsigned first, unsigned lanes) {
  for_lanes(lanes, [&](unsigned i) {
    Fiber& fiber = fibers[first + i];
    unsigned source = (unsigned)fiber.given[1] < 32 ? (unsigned)fiber.given[1] : i;
    fiber.given[2] = ~0ull;  // of a lane that the block does not have
    if (lanes >> source & 1) fiber.given[2] = fibers[first + source].given[0];
    else if (first + source < thread_count) {
      me = first + i;
      fail_at(fiber.site, words("lane %u, which takes no part, is asked for its value", source));
    }
  });
}
uint64_t from_lane(Site site, unsigned mask, uint64_t value, unsigned source) {
  fibers[me].given[0] = value;
  fibers[me].given[1] = source;
  follow(site.line);
  uint64_t result = together(site, mask, EMULATOR_PLACE, shuffle_together).given[2];
  follow(result);
  return result;
}

static void ballot_together(unsigned first, unsigned lanes) {
  uint64_t votes = 0;
  for_lanes(lanes, [&](unsigned i) { votes |= fibers[first + i].given[0] << i; });
  for_lanes(lanes, [&](unsigned i) { fibers[first + i].given[2] = votes; });
}
unsigned ballot(Site site, unsigned mask, bool vote) {
  fibers[me].given[0] = vote;
  follow(site.line);
  uint64_t result = together(site, mask, EMULATOR_PLACE, ballot_together).given[2];
  follow(result);
  return (unsigned)result;
}

// ---- mma.sync and ldmatrix, by the PTX manual's "Matrix fragments for mma.m16n8k16" and "ldmatrix"

static void check_whole(unsigned lanes) {
  if (lanes != 0xffffffffu) fail_at(fibers[me].site, "a matrix instruction without all lanes of its warp");
}
// Eight rows of 16 bytes, by their addresses in lanes 8i to 8i + 7, make matrix i; a lane gets two elements of it. Which
// lane reads a byte nobody says.
static void load_together(unsigned first, unsigned lanes) {
  check_whole(lanes);
  bool transposed = fibers[first].given[2];
  const unsigned char* rows[32];
  for (unsigned i = 0; i < 32; ++i) rows[i] = (const unsigned char*)fibers[first + i].given[1];
  act_as(first + draw(32));
  for (unsigned i = 0; i < 32; ++i) {
    if ((uintptr_t)rows[i] % 16) fail_at(fibers[first + i].place, "a row of a matrix is not aligned to 16 bytes");
    access<false>(rows[i], 16, fibers[first + i].place);
  }
  for (unsigned lane = 0; lane < 32; ++lane)
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      uint16_t pair[2];
      for (unsigned k = 0; k < 2; ++k) {
        unsigned i = lane / 4, j = lane % 4 * 2 + k;
        if (transposed) std::swap(i, j);
        memcpy(&pair[k], rows[matrix * 8 + i] + 2 * j, 2);
      }
      memcpy((unsigned*)fibers[first + lane].given[0] + matrix, pair, 4);
    }
}
void load_matrix(Site site, unsigned* fragment, const void* row, bool transposed) {
  Fiber& fiber = fibers[me];
  fiber.given[0] = (uint64_t)fragment;
  fiber.given[1] = (uint64_t)row;
  fiber.given[2] = transposed;
  together(site, ~0u, EMULATOR_PLACE, load_together);
}

// Rows lane / 4 and 8 more of A and D; column lane / 4 of B; columns lane % 4 * 2 and one more of D, `apart` sums apart.
template <typename Sum> static void multiply_lanes(unsigned first, Element element, unsigned apart) {
  unsigned bytes = bytes_of(element), per_word = 4 / bytes, depth = 8 * per_word;
  Sum a[16][32], b[8][32];
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned char* a_words = (const unsigned char*)fibers[first + lane].given[1];
    const unsigned char* b_words = (const unsigned char*)fibers[first + lane].given[2];
    for (unsigned i = 0; i < per_word; ++i) {
      unsigned k = lane % 4 * per_word + i;
      for (unsigned word = 0; word < 4; ++word)
        a[lane / 4 + word % 2 * 8][k + word / 2 * depth / 2] = (Sum)number_of(a_words + 4 * word + i * bytes, element);
      for (unsigned word = 0; word < 2; ++word)
        b[lane / 4][k + word * depth / 2] = (Sum)number_of(b_words + 4 * word + i * bytes, element);
    }
  }
  for (unsigned lane = 0; lane < 32; ++lane) {
    Sum* sums = (Sum*)fibers[first + lane].given[0];
    for (unsigned i = 0; i < 2; ++i)
      for (unsigned j = 0; j < 2; ++j) {
        Sum& sum = sums[(2 * i + j) * apart];
        for (unsigned k = 0; k < depth; ++k) sum += a[lane / 4 + 8 * i][k] * b[lane % 4 * 2 + j][k];
      }
  }
}
static void multiply_warp(unsigned first, unsigned lanes) {
  check_whole(lanes);
  Element element = (Element)fibers[first].given[3];
  unsigned apart = (unsigned)fibers[first].given[4];
  if (element == int8) multiply_lanes<int>(first, element, apart);
  else multiply_lanes<float>(first, element, apart);
}
void multiply(Site site, void* sums, const unsigned* a, const unsigned* b, Element element, unsigned apart) {
  uint64_t* given = fibers[me].given;
  given[0] = (uint64_t)sums;
  given[1] = (uint64_t)a;
  given[2] = (uint64_t)b;
  given[3] = element;
  given[4] = apart;
  together(site, ~0u, EMULATOR_PLACE, multiply_warp);
}

// ---- wmma: nobody says which lane holds, reads or writes which element; the first lane does all, as any lane

static void check_same(unsigned first, unsigned count) {
  for (unsigned i = 1; i < 32; ++i)
    for (unsigned k = 1; k <= count; ++k)
      if (fibers[first + i].given[k] != fibers[first].given[k]) fail_at(fibers[first].site, "lanes of a warp name different fragments");
}
// given: fragment, memory, leading, element, rows, columns and whether they are row major
static void move_fragment(unsigned first, unsigned lanes, bool stores) {
  check_whole(lanes);
  check_same(first, 5);
  Fiber& fiber = fibers[first];
  float* at = (float*)fiber.given[0];
  unsigned char* memory = (unsigned char*)fiber.given[1];
  unsigned leading = (unsigned)fiber.given[2], rows = (unsigned)fiber.given[4] & 255, columns = (unsigned)fiber.given[4] >> 8 & 255;
  bool is_row_major = fiber.given[4] >> 16;
  Element element = (Element)fiber.given[3];
  unsigned bytes = bytes_of(element), lines = is_row_major ? rows : columns, length = is_row_major ? columns : rows;
  if ((uintptr_t)memory % 32) fail_at(fiber.place, "a fragment is not aligned to 32 bytes");
  if (leading * bytes % 16) fail_at(fiber.place, "the leading dimension of a fragment is no multiple of 16 bytes");
  act_as(first + draw(32));
  for (unsigned line = 0; line < lines; ++line) {
    unsigned char* start = memory + (size_t)line * leading * bytes;
    if (stores) access<true>(start, length * bytes, fiber.place);
    else access<false>(start, length * bytes, fiber.place);
    for (unsigned i = 0; i < length; ++i) {
      float& value = at[is_row_major ? line * columns + i : i * columns + line];
      if (stores) memcpy(start + 4 * i, &value, 4);
      else value = number_of(start + i * bytes, element);
    }
  }
}
static void load_fragments(unsigned first, unsigned lanes) { move_fragment(first, lanes, false); }
static void store_fragments(unsigned first, unsigned lanes) { move_fragment(first, lanes, true); }
static void give_fragment(const float* fragment, const void* memory, unsigned leading, Element element, unsigned rows,
                          unsigned columns, bool is_row_major) {
  uint64_t* given = fibers[me].given;
  given[0] = (uint64_t)fragment;
  given[1] = (uint64_t)memory;
  given[2] = leading;
  given[3] = element;
  given[4] = rows | columns << 8 | (unsigned)is_row_major << 16;
}
void load_fragment(Site site, float* to, const void* from, unsigned leading, Element element, unsigned rows, unsigned columns,
                   bool is_row_major) {
  give_fragment(to, from, leading, element, rows, columns, is_row_major);
  together(site, ~0u, EMULATOR_PLACE, load_fragments);
}
void store_fragment(Site site, float* to, const float* from, unsigned leading, unsigned rows, unsigned columns, bool is_row_major) {
  give_fragment(from, to, leading, float32, rows, columns, is_row_major);
  together(site, ~0u, EMULATOR_PLACE, store_fragments);
}
static void multiply_held(unsigned first, unsigned lanes) {
  check_whole(lanes);
  const uint64_t* given = fibers[first].given;
  float* d = (float*)given[0];
  const float *a = (const float*)given[1], *b = (const float*)given[2], *c = (const float*)given[3];
  unsigned m = given[4] & 255, n = given[4] >> 8 & 255, depth = given[4] >> 16 & 255;
  for (unsigned i = 0; i < m; ++i) {
    float sums[32];
    for (unsigned j = 0; j < n; ++j) sums[j] = c[i * n + j];
    for (unsigned k = 0; k < depth; ++k)
      for (unsigned j = 0; j < n; ++j) sums[j] += a[i * depth + k] * b[k * n + j];
    for (unsigned j = 0; j < n; ++j) d[i * n + j] = sums[j];
  }
}
void multiply_fragments(Site site, float* d, const float* a, const float* b, const float* c, unsigned m, unsigned n, unsigned k) {
  uint64_t* given = fibers[me].given;
  given[0] = (uint64_t)d;
  given[1] = (uint64_t)a;
  given[2] = (uint64_t)b;
  given[3] = (uint64_t)c;
  given[4] = m | n << 8 | k << 16;
  together(site, ~0u, EMULATOR_PLACE, multiply_held);
}
}  // namespace emulator
