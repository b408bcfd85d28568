"""The device functions that attention kernels call besides those of :mod:`codegen.gpu.matrix.mma_functions`."""

from __future__ import annotations

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


def _pair(name: str, ptx: str, stand_in: str) -> str:
    return f"""\
static __device__ __forceinline__ unsigned {name}(float low, float high) {{
#ifdef CUDA_ON_CPU
  {stand_in} pair[2] = {{({stand_in})low, ({stand_in})high}};
  unsigned word;
  memcpy(&word, pair, 4);
#else
  unsigned word;
  asm("cvt.rn.{ptx}x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
#endif
  return word;
}}"""


_FUNCTIONS = {
    "power_of_two": _EXPONENTIAL,
    "pair_f16": _pair("pair_f16", "f16", "half"),
    "pair_bf16": _pair("pair_bf16", "bf16", "nv_bfloat16"),
}


def device_functions(used: set[str]) -> str:
    """The text of the functions among the names ``used``, empty where there are none."""
    return "\n".join(text for name, text in _FUNCTIONS.items() if name in used)
