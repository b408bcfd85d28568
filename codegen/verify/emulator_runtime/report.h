// Errors in one line, with marks that the caller puts words in place of: @p4011a0 a place in the machine code, @l41 a line of
// the text, @a2+128 a byte of an argument, @d+512 of dynamic shared memory, @s404000 of a static shared array.
#pragma once
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include "../emulator_headers/interface.h"

dim3_t threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
static unsigned seed;

// Words, in one of a few buffers that take turns.
__attribute__((format(printf, 1, 2))) static const char* words(const char* format, ...) {
  static char buffers[16][256];
  static unsigned turn;
  char* buffer = buffers[turn++ % 16];
  va_list values;
  va_start(values, format);
  vsnprintf(buffer, sizeof *buffers, format, values);
  va_end(values);
  return buffer;
}
static const char* at_place(unsigned place) { return words("@p%x", place); }
static const char* at_line(unsigned line) { return words("@l%u", line); }

__attribute__((format(printf, 1, 2))) [[noreturn]] static void report(const char* format, ...) {
  va_list values;
  va_start(values, format);
  vfprintf(stderr, format, values);
  fprintf(stderr, " (seed %u)\n", seed);
  _exit(3);
}
}  // namespace emulator
