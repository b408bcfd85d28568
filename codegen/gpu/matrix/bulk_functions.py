"""The device functions of kernels that copy tiles in bulk: barriers in shared memory, tensor maps, clusters (sm_90).

As those of :mod:`codegen.gpu.matrix.wgmma_functions`, each is a PTX instruction or a few by name (PTX ISA, "mbarrier",
"cp.async.bulk.tensor", "barrier.cluster", "setmaxnreg"). Their emulated meaning is in
``codegen/verify/emulator_headers/tma_on_cpu.h``.
"""

from __future__ import annotations

from sokoban.schedule.warp_groups import MOVED_REGISTERS


def _function(name: str, parameters: str, body: str) -> str:
    return f"""\
#ifndef CUDA_ON_CPU
static __device__ __forceinline__ void {name}({parameters}) {{
{body}
}}
#endif"""


def _registers(kind: str, count: int) -> str:
    action = {"more": "inc", "fewer": "dec"}[kind]
    return _function(
        f"registers_{kind}_{count}", "", f'  asm volatile("setmaxnreg.{action}.sync.aligned.u32 {count};");'
    )


_TENSOR_MAP = """\
#ifndef CUDA_ON_CPU
struct __align__(64) TensorMap { unsigned long long words[16]; };
#endif"""

_MAKE = _function(
    "barrier_make",
    "const void* shared, int offset, unsigned count",
    """\
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :: "r"(shared_address(shared, offset)), "r"(count) : "memory");""",
)

_FENCE = _function("barrier_fence", "", '  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");')

_EXPECT = _function(
    "barrier_expect",
    "const void* shared, int offset, unsigned bytes",
    """\
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(shared, offset)), "r"(bytes) : "memory");""",
)

_ARRIVE = _function(
    "barrier_arrive",
    "const void* shared, int offset",
    '  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(shared, offset)) : "memory");',
)

_ARRIVE_IN = _function(
    "barrier_arrive_in",
    "const void* shared, int offset, unsigned rank",
    """\
  asm volatile("{\\n"
               " .reg .b32 remote;\\n"
               " mapa.shared::cluster.u32 remote, %0, %1;\\n"
               " mbarrier.arrive.shared::cluster.b64 _, [remote];\\n"
               "}" :: "r"(shared_address(shared, offset)), "r"(rank) : "memory");""",
)

#: Arrivals and waits order within the block, as those of the pipelines of CUTLASS do (``ClusterBarrier``): what they
#: hand on is written by bulk copies and read by products, which count at the barrier or are waited for. An order of the
#: cluster would flush and invalidate caches at every step.
_WAIT = _function(
    "barrier_wait",
    "const void* shared, int offset, unsigned parity",
    """\
  asm volatile("{\\n"
               " .reg .pred done;\\n"
               "again:\\n"
               " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\\n"
               " @done bra over;\\n"
               " bra again;\\n"
               "over:\\n"
               "}" :: "r"(shared_address(shared, offset)), "r"(parity) : "memory");""",
)

_RANK = """\
#ifndef CUDA_ON_CPU
static __device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
#endif"""

#: Lanes of a warp come one by one.
_SYNC = _function(
    "cluster_sync",
    "",
    """\
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");""",
)


def _copy(name: str, is_multicast: bool) -> str:
    """The copies of boxes of two to five dimensions, overloads of one name; indices from the innermost dimension on."""
    texts = []
    for rank in range(2, 6):
        indices = [f"int i{dimension}" for dimension in range(rank)]
        first = 4 if is_multicast else 3
        places = ", ".join(f"%{first + dimension}" for dimension in range(rank))
        given = ", ".join(f'"r"(i{dimension})' for dimension in range(rank))
        blocks = ", unsigned blocks" if is_multicast else ""
        multicast, mask, mask_given = (
            (".multicast::cluster", ", %3", '"h"((unsigned short)blocks), ') if is_multicast else ("",) * 3
        )
        texts.append(f"""\
static __device__ __forceinline__ void {name}(const void* shared, int to, const TensorMap* map, int barrier{blocks},
                                              {", ".join(indices)}) {{
  asm volatile("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes{multicast} "
               "[%0], [%1, {{{places}}}], [%2]{mask};"
               :: "r"(shared_address(shared, to)), "l"(map), "r"(shared_address(shared, barrier)),
                  {mask_given}{given} : "memory");
}}""")
    return "\n".join(["#ifndef CUDA_ON_CPU", *texts, "#endif"])


def _pair(name: str, ptx: str, cpu: str) -> str:
    """Two floats rounded to 16 bits, the first one in the lower half."""
    return f"""\
static __device__ __forceinline__ unsigned {name}(float low, float high) {{
#ifdef CUDA_ON_CPU
  {cpu} values[2] = {{({cpu})low, ({cpu})high}};
  unsigned pair;
  memcpy(&pair, values, 4);
#else
  unsigned pair;
  asm("cvt.rn.{ptx}x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}}"""


_HALF_TO_FLOAT = """\
static __device__ __forceinline__ float float_of_f16(unsigned short bits) {
#ifdef CUDA_ON_CPU
  half value;
  memcpy(&value, &bits, 2);
  return (float)value;
#else
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#endif
}"""

_BFLOAT16_TO_FLOAT = """\
static __device__ __forceinline__ float float_of_bf16(unsigned short bits) {
#ifdef CUDA_ON_CPU
  unsigned word = (unsigned)bits << 16;
  float value;
  memcpy(&value, &word, 4);
  return value;
#else
  return __uint_as_float((unsigned)bits << 16);
#endif
}"""

#: A matrix of four by four words, a row to a lane, turned among the four lanes.
_TURN = """\
static __device__ __forceinline__ void turn_words(unsigned* words, int lane) {
#pragma unroll
  for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & apart)) {
        unsigned given = lane & apart ? words[i] : words[i + apart];
        unsigned got = __shfl_xor_sync(0xffffffffu, given, apart);
        if (lane & apart) words[i] = got;
        else words[i + apart] = got;
      }
}"""

_FUNCTIONS = {
    "TensorMap": _TENSOR_MAP,
    "barrier_make": _MAKE,
    "barrier_fence": _FENCE,
    "barrier_expect": _EXPECT,
    "barrier_arrive": _ARRIVE,
    "barrier_arrive_in": _ARRIVE_IN,
    "barrier_wait": _WAIT,
    "cluster_rank": _RANK,
    "cluster_sync": _SYNC,
    "copy_tile": _copy("copy_tile", False),
    "copy_tile_to_all": _copy("copy_tile_to_all", True),
    **{f"registers_more_{most}": _registers("more", most) for most, _ in MOVED_REGISTERS.values()},
    **{f"registers_fewer_{fewest}": _registers("fewer", fewest) for _, fewest in MOVED_REGISTERS.values()},
    "rounded_pair_f16": _pair("rounded_pair_f16", "f16", "half"),
    "rounded_pair_bf16": _pair("rounded_pair_bf16", "bf16", "nv_bfloat16"),
    "float_of_f16": _HALF_TO_FLOAT,
    "float_of_bf16": _BFLOAT16_TO_FLOAT,
    "turn_words": _TURN,
}


def device_functions(used: set[str]) -> str:
    """The text of the functions among the names ``used``, empty where there are none; ``shared_address`` of
    :mod:`codegen.gpu.matrix.mma_functions` stands before it."""
    return "\n".join(text for name, text in _FUNCTIONS.items() if name in used)
