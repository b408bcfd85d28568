"""Device functions of attention kernels, in CUDA and by the same names in OpenCL C.

Those of :mod:`codegen.gpu.matrix.mma_functions` come on top in CUDA.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_EXPONENTIAL = """\
// 2**x by the special function unit: off by 2e-7 of itself, and 0 below the normal numbers.
static __device__ __forceinline__ float power_of_two(float x) {
#ifdef CUDA_ON_CPU
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}"""


_NEAR = """\
// 1/x by the special function unit, off by a unit in the last place, and what is near enough where it is rounded to 16
// bits afterwards: erf(x) off by 1.5e-7 (M. Abramowitz, I. A. Stegun, Handbook of Mathematical Functions, 7.1.26), and
// 1/(1 + exp(-x)).
static __device__ __forceinline__ float near_reciprocal(float x) {
#ifdef CUDA_ON_CPU
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
static __device__ __forceinline__ float near_erf(float x) {
  const float t = near_reciprocal(fmaf(0.3275911f, fabsf(x), 1.0f));
  float sum = fmaf(fmaf(1.061405429f, t, -1.453152027f), t, 1.421413741f);
  sum = fmaf(fmaf(sum, t, -0.284496736f), t, 0.254829592f) * t;
  return copysignf(fmaf(-sum, power_of_two(x * x * -1.44269504f), 1.0f), x);
}
static __device__ __forceinline__ float near_sigmoid(float x) {
  return near_reciprocal(1.0f + power_of_two(x * -1.44269504f));
}"""


def _pair(name: str, ptx: str, stand_in: str, older: str) -> str:
    """Two elements of floats, rounded to the nearest; ``older`` makes them where no instruction does."""
    return f"""\
static __device__ __forceinline__ unsigned {name}(float low, float high) {{
#ifdef CUDA_ON_CPU
  {stand_in} pair[2] = {{({stand_in})low, ({stand_in})high}};
  unsigned word;
  memcpy(&word, pair, 4);
  return word;
#elif __CUDA_ARCH__ >= 800
  unsigned word;
  asm("cvt.rn.{ptx}x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
#else
{older}
#endif
}}"""


_OLDER_F16 = """\
  unsigned short bits[2];
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[0]) : "f"(low));
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits[1]) : "f"(high));
  return bits[0] | (unsigned)bits[1] << 16;"""

_OLDER_BF16 = """\
  const unsigned first = __float_as_uint(low), second = __float_as_uint(high);
  return (first + 0x7fff + (first >> 16 & 1)) >> 16 | ((second + 0x7fff + (second >> 16 & 1)) & 0xffff0000u);"""


_FOUR_F32 = """\
static __device__ __forceinline__ float4 four_f32(const float* from) { return *(const float4*)from; }"""

_FOUR_F16 = """\
static __device__ __forceinline__ float f16_value(unsigned short bits) {
#ifdef CUDA_ON_CPU
  half element;
  memcpy(&element, &bits, 2);
  return (float)element;
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}
static __device__ __forceinline__ float4 four_f16(const unsigned short* from) {
  const ushort4 bits = *(const ushort4*)from;
  float4 four;
  four.x = f16_value(bits.x), four.y = f16_value(bits.y), four.z = f16_value(bits.z), four.w = f16_value(bits.w);
  return four;
}"""

_FOUR_BF16 = """\
static __device__ __forceinline__ float4 four_bf16(const unsigned short* from) {
  const ushort4 bits = *(const ushort4*)from;
  float4 four;
  four.x = __uint_as_float((unsigned)bits.x << 16), four.y = __uint_as_float((unsigned)bits.y << 16);
  four.z = __uint_as_float((unsigned)bits.z << 16), four.w = __uint_as_float((unsigned)bits.w << 16);
  return four;
}"""

_STORE_F32 = """\
static __device__ __forceinline__ void store_f32(float* to, const float* values, float scale) {
  float4 four;
  four.x = values[0] * scale, four.y = values[1] * scale, four.z = values[2] * scale, four.w = values[3] * scale;
  *(float4*)to = four;
}"""


def _store(name: str, pair: str) -> str:
    """Four elements in one access."""
    return f"""\
static __device__ __forceinline__ void {name}(unsigned short* to, const float* values, float scale) {{
  uint2 two;
  two.x = {pair}(values[0] * scale, values[1] * scale), two.y = {pair}(values[2] * scale, values[3] * scale);
  *(uint2*)to = two;
}}"""


#: By name, in the order in which they need each other.
_CUDA: Mapping[str, str] = {
    "power_of_two": _EXPONENTIAL,
    "near_reciprocal": _NEAR,
    "pair_f16": _pair("pair_f16", "f16", "half", _OLDER_F16),
    "pair_bf16": _pair("pair_bf16", "bf16", "nv_bfloat16", _OLDER_BF16),
    "four_f32": _FOUR_F32,
    "four_f16": _FOUR_F16,
    "four_bf16": _FOUR_BF16,
    "store_f32": _STORE_F32,
    "store_f16": _store("store_f16", "pair_f16"),
    "store_bf16": _store("store_bf16", "pair_bf16"),
}

_OPENCL: Mapping[str, str] = {
    "float_of_f16": "static float float_of_f16(unsigned short bits) { return vload_half(0, (const half*)&bits); }",
    "float_of_bf16": "static float float_of_bf16(unsigned short bits) { return as_float((uint)bits << 16); }",
    "power_of_two": "static float power_of_two(float x) { return exp2(x); }",
    "four_f32": "static float4 four_f32(const __global float* from) { return vload4(0, from); }",
    "four_f16": """\
static float4 four_f16(const __global unsigned short* from) { return vload_half4(0, (const __global half*)from); }""",
    "four_bf16": """\
static float4 four_bf16(const __global unsigned short* from) {
  return as_float4(convert_uint4(vload4(0, from)) << 16);
}""",
    "store_f32": """\
static void store_f32(__global float* to, const float* values, float scale) {
  vstore4(vload4(0, values) * scale, 0, to);
}""",
    "store_f16": """\
static void store_f16(__global unsigned short* to, const float* values, float scale) {
  vstore_half4_rte(vload4(0, values) * scale, 0, (__global half*)to);
}""",
    "store_bf16": """\
static void store_bf16(__global unsigned short* to, const float* values, float scale) {
  const uint4 bits = as_uint4(vload4(0, values) * scale);
  vstore4(convert_ushort4((bits + 0x7fff + (bits >> 16 & 1)) >> 16), 0, to);
}""",
}

#: What functions call themselves.
_CALLED = {
    "store_f16": ("pair_f16",), "store_bf16": ("pair_bf16",), "near_erf": ("near_reciprocal", "power_of_two"),
    "near_sigmoid": ("near_reciprocal", "power_of_two"),
}  # fmt: skip

_NAME = re.compile(r"[A-Za-z_]\w*")


def device_functions(used: set[str] | str, *, is_opencl: bool = False) -> str:
    """The text of the functions among the names ``used``, or of those that a text uses; empty where there are none."""
    names = set(_NAME.findall(used)) if isinstance(used, str) else set(used)
    names |= {called for name, all_called in _CALLED.items() if name in names for called in all_called}
    return "\n".join(text for name, text in (_OPENCL if is_opencl else _CUDA).items() if name in names)
