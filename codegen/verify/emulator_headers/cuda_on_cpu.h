// CUDA C++ as generated kernels use it, for g++ on a CPU: every thread is a fiber that the runtime schedules.
//
// The first lane of a warp holds its matrix fragments and computes them whole. Shared memory and output slack are filled
// with 0xFF bytes, NaN in every float type, before they are used.
#pragma once
// The C library's functions alone: those of C++ take g++ as long as everything else here together.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stdint.h>
#include <string.h>
#include "interface.h"

#define CUDA_ON_CPU

#define EMULATOR_INLINE static inline __attribute__((always_inline))
#define EMULATOR_SITE (emulator::Site{__LINE__, __COUNTER__})

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory")))
#undef alignas
#define alignas(n) __attribute__((aligned(n)))

#define __syncthreads() emulator::sync_block(EMULATOR_SITE)
#define __syncwarp(...) emulator::sync_warp(EMULATOR_SITE, emulator::mask_or_all(__VA_ARGS__))
#define __activemask() emulator::warp_lanes()
#define __ballot_sync(...) emulator::ballot(EMULATOR_SITE, __VA_ARGS__)
#define __shfl_sync(...) emulator::shuffle(EMULATOR_SITE, __VA_ARGS__)
#define __shfl_down_sync(...) emulator::shuffle_down(EMULATOR_SITE, __VA_ARGS__)
#define __shfl_up_sync(...) emulator::shuffle_up(EMULATOR_SITE, __VA_ARGS__)
#define __shfl_xor_sync(...) emulator::shuffle_xor(EMULATOR_SITE, __VA_ARGS__)

namespace emulator {
EMULATOR_INLINE unsigned mask_or_all(unsigned mask = 0xffffffffu) { return mask; }
template <typename T> EMULATOR_INLINE T moved(Site site, unsigned mask, T value, unsigned source) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = from_lane(site, mask, bits, source);
  memcpy(&value, &bits, sizeof(T));
  return value;
}
template <typename T> EMULATOR_INLINE T shuffle(Site site, unsigned mask, T value, int source, int width = 32) {
  unsigned part = (unsigned)(width - 1);
  return moved(site, mask, value, (lane() & ~part) | ((unsigned)source & part));
}
template <typename T> EMULATOR_INLINE T shuffle_down(Site site, unsigned mask, T value, unsigned delta, int width = 32) {
  bool inside = (lane() & (unsigned)(width - 1)) + delta < (unsigned)width;
  return moved(site, mask, value, inside ? lane() + delta : 32);
}
template <typename T> EMULATOR_INLINE T shuffle_up(Site site, unsigned mask, T value, unsigned delta, int width = 32) {
  return moved(site, mask, value, (lane() & (unsigned)(width - 1)) >= delta ? lane() - delta : 32);
}
template <typename T> EMULATOR_INLINE T shuffle_xor(Site site, unsigned mask, T value, int other, int = 32) {
  return moved(site, mask, value, lane() ^ (unsigned)other);
}
}  // namespace emulator

inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __popc(unsigned int bits) { return __builtin_popcount(bits); }

template <typename T> EMULATOR_INLINE T atomicAdd(T* address, T value) {
  uint64_t bits = emulator::load_atomic(address, sizeof(T));
  T before;
  memcpy(&before, &bits, sizeof(T));
  T after = before + value;
  memcpy(&bits, &after, sizeof(T));
  emulator::store_atomic(address, sizeof(T), bits);
  return before;
}

// ---- 16-bit floats

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline double __longlong_as_double(long long bits) { return __builtin_bit_cast(double, bits); }
inline unsigned __float_as_uint(float value) { return __builtin_bit_cast(unsigned, value); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }

typedef _Float16 half;
typedef _Float16 __half;
inline float __half2float(half x) { return (float)x; }
inline half __float2half(float x) { return (half)x; }
inline half __float2half_rn(float x) { return (half)x; }
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }
struct __align__(4) half2 { half x, y; };
typedef half2 __half2;
inline half2 make_half2(half x, half y) { return {x, y}; }
#define EMULATE_HALF(name, function) inline half name(half x) { return (half)function((float)x); }
EMULATE_HALF(hexp, expf) EMULATE_HALF(hlog, logf) EMULATE_HALF(hsqrt, sqrtf) EMULATE_HALF(htanh, tanhf)
EMULATE_HALF(hsin, sinf) EMULATE_HALF(hcos, cosf) EMULATE_HALF(hfloor, floorf) EMULATE_HALF(hceil, ceilf)
EMULATE_HALF(__habs, fabsf)

struct nv_bfloat16 {
  uint16_t bits;
  nv_bfloat16() = default;
  __attribute__((always_inline)) nv_bfloat16(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if (value != value) bits = 0x7fff;
    else bits = (uint16_t)((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  __attribute__((always_inline)) operator float() const {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
  }
};
typedef nv_bfloat16 __nv_bfloat16;
struct __align__(4) nv_bfloat162 {
  nv_bfloat16 x, y;
  nv_bfloat162() = default;
  nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) : x(x), y(y) {}
};
typedef nv_bfloat162 __nv_bfloat162;
inline float __bfloat162float(nv_bfloat16 x) { return (float)x; }
inline nv_bfloat16 __float2bfloat16(float x) { return nv_bfloat16(x); }
inline nv_bfloat16 __float2bfloat16_rn(float x) { return nv_bfloat16(x); }
inline bool __hgt(nv_bfloat16 a, nv_bfloat16 b) { return (float)a > (float)b; }
inline bool __hlt(nv_bfloat16 a, nv_bfloat16 b) { return (float)a < (float)b; }

// ---- vectors

#define EMULATE_VECTORS(T, name, a2, a4) \
  struct __align__(a2) name##2 { T x, y; }; \
  struct name##3 { T x, y, z; }; \
  struct __align__(a4) name##4 { T x, y, z, w; }; \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATE_VECTORS(float, float, 8, 16)
EMULATE_VECTORS(double, double, 16, 16)
EMULATE_VECTORS(int, int, 8, 16)
EMULATE_VECTORS(unsigned, uint, 8, 16)
EMULATE_VECTORS(short, short, 4, 8)
EMULATE_VECTORS(unsigned short, ushort, 4, 8)
EMULATE_VECTORS(signed char, char, 2, 4)
EMULATE_VECTORS(unsigned char, uchar, 2, 4)
EMULATE_VECTORS(long long, longlong, 16, 16)
EMULATE_VECTORS(unsigned long long, ulonglong, 16, 16)

// ---- mathematics

inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline int max(int a, int b) { return a > b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
template <typename T> EMULATOR_INLINE T __ldg(const T* pointer) { return *pointer; }

// ---- matrix fragments

namespace emulator {
struct Yes { static constexpr bool value = true; };
struct No { static constexpr bool value = false; };
template <typename A, typename B> struct Same : No {};
template <typename A> struct Same<A, A> : Yes {};
template <typename T> constexpr Element element = float32;
template <> constexpr Element element<half> = float16;
template <> constexpr Element element<nv_bfloat16> = bfloat16;
}  // namespace emulator

namespace nvcuda::wmma {
struct matrix_a; struct matrix_b; struct accumulator; struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment {
  static constexpr int rows = emulator::Same<Use, matrix_b>::value ? K : M;
  static constexpr int columns = emulator::Same<Use, matrix_a>::value ? K : N;
  static constexpr bool is_row_major = emulator::Same<Layout, row_major>::value;
  typedef T Type;
  float at[rows][columns];
  fragment() { memset(at, 0xff, sizeof at); }
};
template <typename F> EMULATOR_INLINE void fill_fragment(F& f, float value) {
  for (int i = 0; i < F::rows; ++i) for (int j = 0; j < F::columns; ++j) f.at[i][j] = value;
}
}  // namespace nvcuda::wmma

#define load_matrix_sync(...) emulator_load_matrix(EMULATOR_SITE, __VA_ARGS__)
#define mma_sync(...) emulator_mma(EMULATOR_SITE, __VA_ARGS__)
#define store_matrix_sync(...) emulator_store_matrix(EMULATOR_SITE, __VA_ARGS__)
namespace nvcuda::wmma {
template <typename F, typename T>
EMULATOR_INLINE void emulator_load_matrix(emulator::Site site, F& f, const T* from, unsigned leading) {
  emulator::load_fragment(site, &f.at[0][0], from, leading, emulator::element<T>, F::rows, F::columns, F::is_row_major);
}
template <typename D, typename A, typename B, typename C>
EMULATOR_INLINE void emulator_mma(emulator::Site site, D& d, const A& a, const B& b, const C& c) {
  emulator::multiply_fragments(site, &d.at[0][0], &a.at[0][0], &b.at[0][0], &c.at[0][0], D::rows, D::columns, A::columns);
}
template <typename F>
EMULATOR_INLINE void emulator_store_matrix(emulator::Site site, float* to, const F& f, unsigned leading, layout_t layout) {
  emulator::store_fragment(site, to, &f.at[0][0], leading, F::rows, F::columns, layout == mem_row_major);
}
}  // namespace nvcuda::wmma

#include "mma_on_cpu.h"
#include "wgmma_on_cpu.h"
#include "tma_on_cpu.h"
