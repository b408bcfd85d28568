// Elements of matrices as floats.
#pragma once
#include <cmath>
#include "report.h"

namespace emulator {
static float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
// Eight-bit floats: `fraction` bits of mantissa; a bias of 7 without infinities, or IEEE's 15 with them.
static float float8(unsigned bits, int fraction, int bias) {
  int exponent = (bits & 127) >> fraction, mantissa = bits & ((1 << fraction) - 1), one = 1 << fraction;
  float size = std::ldexp((float)(exponent ? one + mantissa : mantissa), (exponent ? exponent : 1) - bias - fraction);
  if (bias == 7 && (bits & 127) == 127) size = NAN;
  if (bias == 15 && exponent == 31) size = mantissa ? NAN : INFINITY;
  return bits >> 7 ? -size : size;
}
static float number_of(const unsigned char* from, Element element) {
  uint32_t word = 0;
  switch (element) {
    case float16: {
      _Float16 value;
      memcpy(&value, from, 2);
      return (float)value;
    }
    case bfloat16: memcpy((char*)&word + 2, from, 2); return bits_to_float(word);
    case int8: return (float)(int8_t)*from;
    case float8_e4m3: return float8(*from, 3, 7);
    case float8_e5m2: return float8(*from, 2, 15);
    case tfloat32:
      memcpy(&word, from, 4);
      // Hardware reads the upper bits alone; who did not round to them gets a truncated value there.
      if (word & 0x1fff) fail("a number that is multiplied was not rounded to TensorFloat-32");
      return bits_to_float(word);
    default: memcpy(&word, from, 4); return bits_to_float(word);
  }
}
static unsigned bytes_of(Element element) { return element <= bfloat16 ? 2 : element <= tfloat32 ? 4 : 1; }
}  // namespace emulator
