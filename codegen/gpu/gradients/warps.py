"""Gradients of attention by ``mma.sync``: every warp multiplies rows of its own by all rows of a step.

A step computes the logits of the block's rows and of those it walks, and what the gradient of the results would make of
them, both in fragments of sums. Probabilities and gradients of logits leave those fragments as factors of the products
that follow, without shared memory, since the layouts are the same (T. Dao, "FlashAttention-2", 2023, algorithm 2; its
columns of keys are the gradient of keys here, and the gradient of queries has a kernel of its own in place of atomic
additions).

Where results of wide heads do not fit the registers of a warp, several have the same rows: each has some columns of a
step and some of the results, and factors pass from one to the other through shared memory, with a barrier in between.
"""

from __future__ import annotations

from codegen.gpu.gradients.slope_texts import WHOLE_STEP, StepColumns, cleared_slopes, pair_of, slope_stores
from codegen.gpu.gradients.texts import (
    FIRST_QUERY,
    HEAD,
    OWN_NUMBERS,
    PLACE_OF_KEYS,
    PLACE_OF_QUERIES,
    Result,
    constants,
    each_logit,
    mask_of_keys,
    results_of,
    stores,
    sums_of,
)
from codegen.gpu.walks.attention_warps import PRODUCTS, THREAD_PLACE
from codegen.gpu.walks.fragments import cleared, product_of_columns, product_of_rows, row_fragments, unseen_keys
from codegen.gpu.walks.staged_tiles import StagedTile
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.tir.lowering import LoweringRequest
from sokoban.kernel.attention_gradient import AttentionGradientKernel
from sokoban.kernel.instructions import Instruction
from sokoban.schedule.attention import PIECE_BYTES
from sokoban.schedule.attention_gradient import GradientSchedule, gradient_shared_bytes, number_place


def takes(request: LoweringRequest[AttentionGradientKernel, GradientSchedule]) -> bool:
    """Gradients of attention by the matrix instructions of single warps."""
    return request.schedule.instruction is Instruction.MMA_16X8X16


def lower(request: LoweringRequest[AttentionGradientKernel, GradientSchedule]) -> Lowered:
    """The kernel of a gradient."""
    kernel, schedule = request.problem, request.schedule
    shared = gradient_shared_bytes(kernel, schedule)
    text = _text(kernel, schedule, request.entry)
    return Lowered.of_text(
        text, request.entry, blocks=schedule.blocks(kernel), threads=schedule.threads, shared_bytes=shared
    )


def _text(kernel: AttentionGradientKernel, schedule: GradientSchedule, entry: str) -> str:
    product, pair = PRODUCTS[kernel.attention.dtype]
    types = {"L": "float", "D": "float"}
    *inputs, output = kernel.parameters
    names = [f"const {types.get(name, 'unsigned short')}* __restrict__ {name}_ptr" for name in inputs]
    parameters = ", ".join([*names, f"unsigned short* __restrict__ {output}_ptr"])
    of_keys = kernel.is_of_keys
    queries, keys = ("(long long)problem * QUERY_ROWS * {}", "(long long)problem * KEYS_ALL * {}")
    pointers = {"Q": queries, "dY": queries, "K": keys, "V": keys}
    # A block's own rows and those it walks: one tile of the width of keys each, and one of that of values.
    roles = {
        "own_keys": "K" if of_keys else "Q", "own_values": "V" if of_keys else "dY",
        "walked_keys": "Q" if of_keys else "K", "walked_values": "dY" if of_keys else "V",
    }  # fmt: skip
    declared = "\n".join(
        f"  const unsigned short* {role} = "
        f"{tensor}_ptr + {pointers[tensor].format('VALUE_DIM' if role.endswith('values') else 'HEAD_DIM')};"
        for role, tensor in roles.items()
    )
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}) {entry}{KERNEL_SUFFIX}({parameters}) {{
{constants(kernel, schedule)}
{_PLACE_OF_PARTS if schedule.columns > 1 else THREAD_PLACE}
{PLACE_OF_KEYS if of_keys else PLACE_OF_QUERIES}
  // Rows of queries are those of all heads of a group one beside the other; each head lies by itself.
  auto place_of = [](int row) {{ return GROUP == 1 ? row : row % GROUP * QUERIES_ALL + row / GROUP; }};
{declared}
  extern __shared__ __align__({PIECE_BYTES}) char shared[];
  const int value_rows = ROWS * KEY_PITCH, key_buffers = value_rows + ROWS * VALUE_PITCH;
  const int value_buffers = key_buffers + STAGES * STEP * KEY_PITCH;
{_copies(kernel, schedule)}
{_numbers(kernel)}
{_step_copies(kernel)}
{cleared_slopes("thread", "THREADS") if kernel.writes_slopes else ""}
{_walk(kernel, schedule, product, pair)}
{stores(kernel, schedule, pair)}
}}
"""


#: The place of a thread where warps divide columns: those of other parts have the rows of ``warp``, too.
_PLACE_OF_PARTS = """\
  const int thread = threadIdx.x, lane = thread % 32;
  const int warp = thread / 32 % (WARPS / PARTS), part = thread / 32 / (WARPS / PARTS);"""


def _copies(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> str:
    """Copies of tiles to shared memory."""
    attention, walked_bound = kernel.attention, "QUERIES_ALL" if kernel.is_of_keys else "KEYS_ALL"
    tiles = []
    for is_walked in (False, True):
        rows = schedule.step if is_walked else schedule.rows
        all_rows = kernel.rows
        if is_walked:  # queries head by head
            all_rows = attention.queries if kernel.is_of_keys else attention.key_count
        for kind, width, full, pitch in (
            ("keys", attention.head_dim, "DEPTH", "KEY_PITCH"), ("values", attention.value_size, "WIDTH", "VALUE_PITCH")
        ):  # fmt: skip
            start = f"{kind[:-1]}_buffers + buffer * STEP * {pitch}" if is_walked else (
                "0" if kind == "keys" else "value_rows"
            )  # fmt: skip
            tiles.append(
                StagedTile(
                    tensor=f"{'walked' if is_walked else 'own'}_{kind}", width=width, full=full, rows=rows, pitch=pitch,
                    start=start, first="step * STEP" if is_walked else "first_row",
                    bound=walked_bound if is_walked else "ROWS_ALL", is_bounded=all_rows % rows != 0,
                    is_walked=is_walked, is_grouped=kernel.group > 1 and not is_walked and not kernel.is_of_keys,
                )
            )  # fmt: skip
    return "\n".join(tile.copy(schedule.threads) for tile in tiles)


def _numbers(kernel: AttentionGradientKernel) -> str:
    """The two numbers of every query: of a block's own in registers, of those it walks a step ahead of their use."""
    if kernel.is_of_keys:
        return f"""\
  const float *sums_ptr = L_ptr + (long long)problem * QUERY_ROWS, *dots_ptr = D_ptr + (long long)problem * QUERY_ROWS;
  float next_sum = 0.0f, next_dot = 0.0f;
  auto fetch_numbers = [&](int number) {{
    {FIRST_QUERY}
    {HEAD}
    const int query = first_walked + thread;
    if (thread < STEP && query < QUERIES_ALL) {{
      next_sum = sums_ptr[head * QUERIES_ALL + query] * TWOS;
      next_dot = dots_ptr[head * QUERIES_ALL + query];
    }}
  }};"""
    return OWN_NUMBERS


def _step_copies(kernel: AttentionGradientKernel) -> str:
    """The copies of a step, queries head by head."""
    place = "const int step = first_step + number;"
    if kernel.is_of_keys and kernel.group > 1:
        place = f"""\
{HEAD}
    const int step = first_step + number % head_steps;
    walked_keys = Q_ptr + ((long long)problem * GROUP + head) * QUERIES_ALL * HEAD_DIM;
    walked_values = dY_ptr + ((long long)problem * GROUP + head) * QUERIES_ALL * VALUE_DIM;"""
    return f"""\
  auto copy_step = [&](int number, int buffer) {{
    {place}
    copy_walked_keys(step, buffer);
    copy_walked_values(step, buffer);
    copy_async_commit();
  }};"""


def _walk(kernel: AttentionGradientKernel, schedule: GradientSchedule, product: str, pair: str) -> str:
    """The steps of a block."""
    of_keys, results, has_parts = kernel.is_of_keys, results_of(kernel, schedule), schedule.columns > 1
    columns = StepColumns("first_column", "COLUMNS") if has_parts else WHOLE_STEP
    moved = " + part * (COLUMNS * {})" if has_parts else ""
    declared = "\n".join(
        f"  float {sums}[FRAGMENTS][{width} / 8][4];\n{cleared(sums, width)}"
        for sums, width in sums_of(results, schedule).items()
    )
    key_rows, value_rows = (f"{each}s_now + {each}_rows_place{moved}" for each in ("key", "value"))
    logits = _dots("logits", "own_key_place", "KEY_PITCH", key_rows.format("KEY_PITCH"), "DEPTH", product, columns)
    wanted = _dots(
        "wanted", "own_value_place", "VALUE_PITCH", value_rows.format("VALUE_PITCH"), "WIDTH", product, columns
    )  # fmt: skip
    place = f"{'part * COLUMNS + ' if has_parts else ''}n * 8 + lane % 4 * 2 + j"
    exponent = f"numbers[{place}]" if of_keys else "exponents[m][i]"
    dot = f"numbers[STEP + {place}]" if of_keys else "dots[m][i]"
    logit, slope = "logits[m][n][2 * i + j]", "wanted[m][n][2 * i + j]"
    slopes = f"""\
    float wanted[FRAGMENTS][{columns.size} / 8][4];
{wanted}
{each_logit(f"{slope} = {logit} * ({slope} - {dot});", columns)}"""
    if kernel.writes_slopes:
        low, high = (pair_of("wanted", pair, more) for more in ("", " + 1"))
        slopes += f"\n{slope_stores(low, high, columns)}"
    next_copies = _next_copies("1 - buffer" if schedule.stages > 1 else "0", waits=schedule.stages == 1)
    first = FIRST_QUERY if of_keys else "const int first_walked = (first_step + number) * STEP;"
    if has_parts:
        first += "\n    const int first_column = first_walked + part * COLUMNS;"
    mask = mask_of_keys(columns) if of_keys else unseen_keys(columns.size, columns.first, "0.0f")
    return f"""\
  // Where this lane finds rows of fragments: of the block's own tiles, of two tiles of eight walked rows, of columns.
  const int own_key_place = (warp * FRAGMENTS * 16 + lane % 16) * KEY_PITCH + lane / 16 * 16;
  const int own_value_place = value_rows + (warp * FRAGMENTS * 16 + lane % 16) * VALUE_PITCH + lane / 16 * 16;
  const int key_rows_place = (lane / 16 * 8 + lane % 8) * KEY_PITCH + lane / 8 % 2 * 16;
  const int value_rows_place = (lane / 16 * 8 + lane % 8) * VALUE_PITCH + lane / 8 % 2 * 16;
  const int key_columns = lane % 16 * KEY_PITCH + lane / 16 * 16;
  const int value_columns = lane % 16 * VALUE_PITCH + lane / 16 * 16;
{declared}
  if (steps > 0) {{
    copy_own_keys();
    copy_own_values();
    copy_step(0, 0);
{"    fetch_numbers(0);" if of_keys else ""}
  }}
  for (int number = 0; number < steps; ++number) {{
    {first}
    const int buffer = number % STAGES, keys_now = key_buffers + buffer * STEP * KEY_PITCH;
    const int values_now = value_buffers + buffer * STEP * VALUE_PITCH;
{_arrived_numbers(number_place(kernel, schedule)) if of_keys else ""}
    copy_async_wait_0();
    __syncthreads();
{next_copies if schedule.stages > 1 else ""}
{"    if (number + 1 < steps) fetch_numbers(number + 1);" if of_keys else ""}
    float logits[FRAGMENTS][{columns.size} / 8][4];
{logits}
{each_logit(f"{logit} = power_of_two(fmaf({logit}, SCALE, -{exponent}));", columns)}
{mask}
{_sums(results, slopes, product, pair, has_parts=has_parts)}
{next_copies if schedule.stages == 1 else ""}
  }}"""


def _next_copies(buffer: str, *, waits: bool) -> str:
    """The copies of the next step; they wait for all warps where they write what those still read."""
    wait = "      __syncthreads();\n" if waits else ""
    return f"""\
    if (number + 1 < steps) {{
{wait}      copy_step(number + 1, {buffer});
    }}"""


def _arrived_numbers(place: int) -> str:
    """The numbers of a step's queries, fetched a step before, where all threads find them."""
    return f"""\
    float* numbers = (float*)(shared + {place}) + number % 2 * 2 * STEP;
    if (thread < STEP) {{
      numbers[thread] = next_sum;
      numbers[STEP + thread] = next_dot;
    }}"""


def _dots(
    sums: str, place: str, pitch: str, walked: str, depth: str, product: str, columns: StepColumns
) -> str:  # fmt: skip
    """The product of the block's own rows and those of a step, along the rows of both."""
    loads = f"      unsigned own_fragment[FRAGMENTS][4];\n{row_fragments('own_fragment[m]', place, pitch)}\n"
    return product_of_rows(
        sums, "own_fragment[m]", walked, pitch, depth=depth, step=columns.size, product=product, loads=loads
    )


def _sums(results: list[Result], slopes: str, product: str, pair: str, *, has_parts: bool) -> str:
    """The products that results are sums of; probabilities come before gradients of logits, which need them."""
    tables = [f"FACTORS + {number} * ROWS * FACTOR_PITCH" for number in range(len(results))]
    of_slopes, *of_weights = (
        product_of_columns(
            result.sums, result.factors, result.columns, result.pitch, width=result.width, step="STEP",
            product=product, pair=pair, loads=_passed_fragments(table) if has_parts else "",
        )
        for result, table in zip(results, tables, strict=True)
    )  # fmt: skip
    if not has_parts:
        return "\n".join([*of_weights, slopes, of_slopes])
    passed, *passed_weights = (_passed(each.factors, table, pair) for each, table in zip(results, tables, strict=True))
    return "\n".join([*passed_weights, slopes, passed, "    __syncthreads();", *of_weights, of_slopes])


def _passed(factors: str, table: str, pair: str) -> str:
    """Factors of a warp on their way to those that have its rows."""
    low, high = (f"{factors}[m][n][2 * i{more}]" for more in ("", " + 1"))
    return f"""\
#pragma unroll
    for (int m = 0; m < FRAGMENTS; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; ++n)
          *(unsigned*)(shared + {table} + ((warp * FRAGMENTS + m) * 16 + lane / 4 + 8 * i) * FACTOR_PITCH +
                       (part * COLUMNS + n * 8 + lane % 4 * 2) * 2) = {pair}({low}, {high});"""


def _passed_fragments(table: str) -> str:
    """Loads of fragments of factors, of the columns of all warps that have the same rows."""
    return f"""\
        load_matrix_x4(weights[m], 0, shared,
                       {table} + ((warp * FRAGMENTS + m) * 16 + lane % 16) * FACTOR_PITCH + lane / 16 * 16 + n * 32);"""
