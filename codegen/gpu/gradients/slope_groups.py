"""The gradient of attention's queries from the slopes of its logits, by ``wgmma`` of sm_90a: one product with the keys.

Copies and barriers are those of :mod:`codegen.gpu.gradients.groups`. Slopes lie key by key and arrive in panels of a
group's 64 queries; their fragments are read turned and go into the product out of registers, so that single ones that a
mask hides are zeros there, as where single warps multiply (:mod:`codegen.gpu.gradients.slopes`). Keys are read turned
by the instruction.
"""

from __future__ import annotations

from codegen.gpu.gradients.slopes import IS_EDGE, PLACE, constants, masked, stores
from codegen.gpu.matrix.wgmma_functions import ATOM_BYTES
from codegen.gpu.walks.attention_warps import PRODUCTS
from codegen.gpu.walks.fragments import cleared
from codegen.gpu.walks.group_functions import done_name
from codegen.gpu.walks.group_products import GROUP, Tile, moved_registers, panel_map, product_of_columns
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.tir.lowering import LoweringRequest
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.attention_gradient import SlopeProduct
from sokoban.schedule.attention import GROUP_WARPS, padded
from sokoban.schedule.attention_gradient import GRADIENT_BARRIERS_BYTES, GradientSchedule, slope_shared_bytes
from sokoban.schedule.warp_groups import PANEL_BYTES


def takes(request: LoweringRequest[SlopeProduct, GradientSchedule]) -> bool:
    """Products of slopes and keys by the matrix instructions of warp groups."""
    return request.schedule.instruction.is_by_groups


def lower(request: LoweringRequest[SlopeProduct, GradientSchedule]) -> Lowered:
    """The kernel of a product of slopes and keys."""
    kernel, schedule = request.problem, request.schedule
    return Lowered.of_text(
        _text(kernel, schedule, request.entry),
        request.entry,
        blocks=schedule.blocks(kernel),
        threads=schedule.threads,
        shared_bytes=slope_shared_bytes(kernel, schedule),
        maps=tuple(panel_map(tensor, schedule.step) for tensor in kernel.inputs),
    )


def _text(kernel: SlopeProduct, schedule: GradientSchedule, entry: str) -> str:
    """All of it, from ``extern "C" __global__`` on."""
    attention, (slopes, keys, output) = kernel.attention, kernel.parameters
    bound, more, fewer = moved_registers(schedule.warps // GROUP_WARPS)
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}{bound})
{entry}{KERNEL_SUFFIX}(const __grid_constant__ TensorMap {slopes}_map, const __grid_constant__ TensorMap {keys}_map,
    unsigned short* __restrict__ {output}_ptr) {{
{constants(kernel, schedule)}
  constexpr int WARPS = {schedule.warps}, SLOPE_TILE = STEP * SLOPE_PITCH, KEY_TILE = STEP * KEY_PITCH;
  // Two barriers of every buffer.
  constexpr int STEP_FULL = KEY_BUFFERS + STAGES * KEY_TILE, STEP_EMPTY = STEP_FULL + 8;
  extern __shared__ __align__({ATOM_BYTES}) char shared[];
{PLACE}
  if (thread == 0) {{
    for (int stage = 0; stage < STAGES; ++stage) {{
      barrier_make(shared, STEP_FULL + {GRADIENT_BARRIERS_BYTES} * stage, 1);
      barrier_make(shared, STEP_EMPTY + {GRADIENT_BARRIERS_BYTES} * stage, WARPS);
    }}
    barrier_fence();
  }}
  __syncthreads();
  if (warp >= WARPS) {{
    {fewer}
    if (thread == THREADS) {{
{_copies(kernel, schedule)}
    }}
  }} else {{
    {more}
    {GROUP}
    // Where this lane finds its part of fragments: panels have eight pieces a row, in another order in each of eight.
    const int slope_place = group * STEP * {PANEL_BYTES} + (lane / 16 * 8 + lane % 8) * {PANEL_BYTES} +
        ((warp % 4 * 2 + lane / 8 % 2) ^ (lane % 8)) * 16;
    float sums[FRAGMENTS][DEPTH / 8][4];
{cleared("sums", "DEPTH")}
#pragma unroll 1
    for (int number = 0; number < steps; ++number) {{
      const int first_walked = (first_step + number) * STEP, stage = number % STAGES;
      {IS_EDGE}
      unsigned factors[STEP / 16][4];
      barrier_wait(shared, STEP_FULL + {GRADIENT_BARRIERS_BYTES} * stage, number / STAGES % 2);
#pragma unroll
      for (int n = 0; n < STEP / 16; ++n) {{
        load_matrix_x4_trans(factors[n], 0, shared, stage * SLOPE_TILE + n * 16 * {PANEL_BYTES} + slope_place);
{masked("factors[n][c]")}
      }}
      // All lanes have read slopes when the first one gives the buffer back.
      __syncwarp();
      warp_group_arrive();
{_product(kernel)}
      {done_name(0, padded(attention.head_dim))}(sums[0][0]);
      if (lane == 0) barrier_arrive(shared, STEP_EMPTY + {GRADIENT_BARRIERS_BYTES} * stage);
    }}
{stores(kernel, PRODUCTS[attention.dtype][1])}
  }}
}}
"""


def _copies(kernel: SlopeProduct, schedule: GradientSchedule) -> str:
    """The walk of the thread that copies: a buffer that is empty gets the next step."""
    attention, (slopes, keys, _) = kernel.attention, kernel.parameters
    panel = PANEL_BYTES // DTYPE_BYTES[attention.dtype]
    full, empty = (f"STEP_{state} + {GRADIENT_BARRIERS_BYTES} * stage" for state in ("FULL", "EMPTY"))
    head = f"problem / GROUP % {attention.key_heads}, problem / GROUP / {attention.key_heads}"
    lines = [f"barrier_expect(shared, {full}, SLOPE_TILE + KEY_TILE);"]
    for map_name, to, first, width in (
        (slopes, "stage * SLOPE_TILE", "BEFORE + problem % GROUP * QUERIES_ALL + first_row", schedule.rows),
        (keys, "KEY_BUFFERS + stage * KEY_TILE", "0", attention.head_dim),
    ):
        for number in range(-(-width // panel)):
            at = f"{first} + {number * panel}, (first_step + number) * STEP, {head}"
            lines.append(
                f"copy_tile(shared, {to} + {number} * STEP * {PANEL_BYTES}, &{map_name}_map, {full},\n"
                f"                  {at});"
            )
    text = "\n".join(f"        {line}" for line in lines)
    return f"""\
#pragma unroll 1
      for (int number = 0; number < steps; ++number) {{
        const int stage = number % STAGES;
        barrier_wait(shared, {empty}, number / STAGES % 2 ^ 1);
{text}
      }}"""


def _product(kernel: SlopeProduct) -> str:
    """The product of a step: fragments of slopes, and columns of keys."""
    dtype, depth = kernel.attention.dtype, kernel.attention.head_dim
    walked = Tile("KEY_BUFFERS", moved="stage * (KEY_TILE / 16)")
    return product_of_columns("sums", "factors", dtype, depth, walked=walked, step_name="STEP")
