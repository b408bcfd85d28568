// CUDA C++ as generated kernels use it, for g++ on a CPU: one fiber per CUDA thread, one block at a time.
//
// Every lane of a warp holds a complete matrix fragment and computes all of it, so that wmma needs no exchange between
// lanes. Shared memory and output slack are filled with 0xFF bytes, NaN in every float type, before they are used.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#define CUDA_ON_CPU

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static __attribute__((section("shared_memory")))
#undef alignas
#define alignas(n) __attribute__((aligned(n)))

struct dim3_t { unsigned x, y, z; };
extern dim3_t threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
extern unsigned char* dynamic_shared;
void sync_block();
void sync_warp();
unsigned lane();
unsigned warp_lanes();          // bit mask of the lanes that have not returned
constexpr unsigned exchanged_bytes = 32;
unsigned char* exchange(unsigned lane);  // as many bytes, through which a lane hands values to its warp
[[noreturn]] void fail(const char* reason);

template <typename T> T from_lane(T value, unsigned source) {
  std::memcpy(exchange(lane()), &value, sizeof(T));
  sync_warp();
  T result;
  std::memcpy(&result, exchange(source), sizeof(T));
  sync_warp();
  return result;
}
}  // namespace emulator

inline void __syncthreads() { emulator::sync_block(); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulator::sync_warp(); }
inline unsigned __activemask() { return emulator::warp_lanes(); }
template <typename T> T __shfl_sync(unsigned, T value, int source, int width = 32) {
  unsigned lane = emulator::lane();
  return emulator::from_lane(value, (lane & ~(unsigned)(width - 1)) | ((unsigned)source & (unsigned)(width - 1)));
}
template <typename T> T __shfl_down_sync(unsigned, T value, unsigned delta, int width = 32) {
  unsigned lane = emulator::lane();
  bool inside = (lane & (unsigned)(width - 1)) + delta < (unsigned)width;
  return emulator::from_lane(value, inside ? lane + delta : lane);
}
template <typename T> T __shfl_up_sync(unsigned, T value, unsigned delta, int width = 32) {
  unsigned lane = emulator::lane();
  return emulator::from_lane(value, (lane & (unsigned)(width - 1)) >= delta ? lane - delta : lane);
}
template <typename T> T __shfl_xor_sync(unsigned, T value, int mask, int = 32) {
  return emulator::from_lane(value, emulator::lane() ^ (unsigned)mask);
}

// ---- 16-bit floats

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
  nv_bfloat16(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (value != value) bits = 0x7fff;
    else bits = (uint16_t)((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
  }
  operator float() const {
    uint32_t word = (uint32_t)bits << 16;
    float value;
    std::memcpy(&value, &word, 4);
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
template <typename T> T __ldg(const T* pointer) { return *pointer; }

// ---- matrix fragments

namespace nvcuda::wmma {
struct matrix_a; struct matrix_b; struct accumulator; struct row_major; struct col_major;
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void> struct fragment {
  static constexpr int rows = std::is_same_v<Use, matrix_b> ? K : M;
  static constexpr int columns = std::is_same_v<Use, matrix_a> ? K : N;
  float at[rows][columns];
  fragment() { std::memset(at, 0xff, sizeof at); }
};

template <typename T> void check_access(const T* pointer, unsigned leading) {
  if ((uintptr_t)pointer % 32) emulator::fail("a fragment is not aligned to 32 bytes");
  if (leading * sizeof(T) % 16) emulator::fail("the leading dimension of a fragment is no multiple of 16 bytes");
}
template <typename F> void fill_fragment(F& f, float value) {
  for (int i = 0; i < F::rows; ++i) for (int j = 0; j < F::columns; ++j) f.at[i][j] = value;
}
template <typename Use, int M, int N, int K, typename T, typename Layout>
void load_matrix_sync(fragment<Use, M, N, K, T, Layout>& f, const T* from, unsigned leading) {
  check_access(from, leading);
  for (int i = 0; i < f.rows; ++i)
    for (int j = 0; j < f.columns; ++j)
      f.at[i][j] = (float)(std::is_same_v<Layout, row_major> ? from[i * leading + j] : from[j * leading + i]);
}
template <int M, int N, int K, typename T, typename LA, typename LB>
void mma_sync(fragment<accumulator, M, N, K, float>& d, const fragment<matrix_a, M, N, K, T, LA>& a,
              const fragment<matrix_b, M, N, K, T, LB>& b, const fragment<accumulator, M, N, K, float>& c) {
  float sums[M][N];
  std::memcpy(sums, c.at, sizeof sums);
  for (int i = 0; i < M; ++i)
    for (int k = 0; k < K; ++k)
      for (int j = 0; j < N; ++j) sums[i][j] += a.at[i][k] * b.at[k][j];
  std::memcpy(d.at, sums, sizeof sums);
}
template <int M, int N, int K>
void store_matrix_sync(float* to, const fragment<accumulator, M, N, K, float>& f, unsigned leading, layout_t layout) {
  check_access(to, leading);
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) to[layout == mem_row_major ? i * leading + j : j * leading + i] = f.at[i][j];
}
}  // namespace nvcuda::wmma

#include "mma_on_cpu.h"
#include "wgmma_on_cpu.h"
