"""Gradients of attention by ``wgmma`` of sm_90a: four warps multiply 64 rows of the block's own together.

Tiles, copies and barriers are those of :mod:`codegen.gpu.walks.attention_groups`: a warp group of its own copies what
is walked in bulk, and both sides of it are in one buffer, with one barrier for *full* and one for *empty*. What a block
walks is read along its rows for logits and their gradients, and turned for the results; probabilities and gradients of
logits go into those products out of registers. The numbers of queries that are walked come by the warp that copies.

Products of results run on while the next step's logits are issued, and those of values while gradients of logits are
worked out (J. Shah et al., "FlashAttention-3", 2024, 3.1, has the backward pass so). Queries of heads that share keys
are walked head by head. Where dK and dV of wide heads take more registers than a group has, different blocks make them:
those of dV leave out what is wanted of the logits.
"""

from __future__ import annotations

from codegen.gpu.gradients.slope_texts import cleared_slopes, slope_stores
from codegen.gpu.gradients.texts import (
    FIRST_QUERY,
    HEAD,
    OWN_NUMBERS,
    PLACE_OF_KEYS,
    PLACE_OF_QUERIES,
    constants,
    each_logit,
    mask_of_keys,
    results_of,
    stores,
    sums_of,
)
from codegen.gpu.matrix.wgmma_functions import ATOM_BYTES
from codegen.gpu.walks.attention_warps import PRODUCTS, THREAD_PLACE
from codegen.gpu.walks.fragments import cleared, unseen_keys
from codegen.gpu.walks.group_functions import behind_name, beside, done_name
from codegen.gpu.walks.group_products import (
    GROUP,
    Tile,
    factors_of,
    moved_registers,
    panel_map,
    product_of_columns,
    product_of_rows,
)
from codegen.gpu.walks.staged_tiles import StagedTile
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered
from codegen.tir.lowering import LoweringRequest
from hal.spec.parts import DTYPE_BYTES
from sokoban.kernel.attention_gradient import GRADIENT_INPUTS, AttentionGradientKernel
from sokoban.language.expression import Tensor
from sokoban.schedule.attention import GROUP_WARPS, LANES, padded
from sokoban.schedule.attention_gradient import (
    GRADIENT_BARRIERS_BYTES,
    GROUP_QUERY_NUMBERS,
    GradientSchedule,
    gradient_shared_bytes,
    number_bytes,
    number_place,
)
from sokoban.schedule.warp_groups import PANEL_BYTES


def takes(request: LoweringRequest[AttentionGradientKernel, GradientSchedule]) -> bool:
    """Gradients of attention by the matrix instructions of warp groups."""
    return request.schedule.instruction.is_by_groups


def lower(request: LoweringRequest[AttentionGradientKernel, GradientSchedule]) -> Lowered:
    """The kernel of a gradient."""
    kernel, schedule = request.problem, request.schedule
    return Lowered.of_text(
        _text(kernel, schedule, request.entry),
        request.entry,
        blocks=schedule.blocks(kernel),
        threads=schedule.threads,
        shared_bytes=gradient_shared_bytes(kernel, schedule),
        maps=tuple(
            panel_map(tensor, schedule.step) for name, tensor in _inputs(kernel).items() if name in _walked(kernel)
        ),
    )


def _inputs(kernel: AttentionGradientKernel) -> dict[str, Tensor]:
    """The inputs by their names as parameters."""
    return dict(zip(GRADIENT_INPUTS, kernel.inputs, strict=True))


def _walked(kernel: AttentionGradientKernel) -> tuple[str, str]:
    """Names of what is walked: as wide as keys, and as values."""
    return ("Q", "dY") if kernel.is_of_keys else ("K", "V")


def _text(kernel: AttentionGradientKernel, schedule: GradientSchedule, entry: str) -> str:
    """All of it, from ``extern "C" __global__`` on."""
    pair, of_keys = PRODUCTS[kernel.attention.dtype][1], kernel.is_of_keys
    bound, more, fewer = moved_registers(schedule.warps // GROUP_WARPS)
    own_keys, own_values, own_rows = ("K", "V", "KEYS_ALL") if of_keys else ("Q", "dY", "QUERY_ROWS")
    numbers = number_place(kernel, schedule)
    barriers = numbers + number_bytes(kernel, schedule)
    # The thread that copies, and a lane for every number of it, fill a buffer.
    fillers = 1 + LANES * of_keys
    return f"""\
extern "C" __global__ void __launch_bounds__({schedule.threads}{bound})
{entry}{KERNEL_SUFFIX}({_parameters(kernel)}) {{
{constants(kernel, schedule)}
  constexpr int WARPS = {schedule.warps}, KEY_TILE = STEP * KEY_PITCH, VALUE_TILE = STEP * VALUE_PITCH;
  constexpr int OWN_VALUES = ROWS * KEY_PITCH, KEY_BUFFERS = OWN_VALUES + ROWS * VALUE_PITCH;
  // Of a step keys, and values behind them.
  constexpr int VALUE_BUFFERS = KEY_BUFFERS + KEY_TILE, STEP_TILES = KEY_TILE + VALUE_TILE, NUMBERS = {numbers};
  constexpr int NUMBERS_OF_STEP = {GROUP_QUERY_NUMBERS} * STEP;
  // Barriers: of the block's own tiles, then two of every buffer.
  constexpr int OWN_FULL = {barriers}, STEP_FULL = OWN_FULL + {GRADIENT_BARRIERS_BYTES}, STEP_EMPTY = STEP_FULL + 8;
  extern __shared__ __align__({ATOM_BYTES}) char shared[];
{THREAD_PLACE}
{PLACE_OF_KEYS if of_keys else PLACE_OF_QUERIES}
  // Rows of queries are those of all heads of a group one beside the other; each head lies by itself.
  auto place_of = [](int row) {{ return GROUP == 1 ? row : row % GROUP * QUERIES_ALL + row / GROUP; }};
  if (thread == 0) {{
    barrier_make(shared, OWN_FULL, THREADS);
    for (int stage = 0; stage < STAGES; ++stage) {{
      barrier_make(shared, STEP_FULL + {GRADIENT_BARRIERS_BYTES} * stage, {fillers});
      barrier_make(shared, STEP_EMPTY + {GRADIENT_BARRIERS_BYTES} * stage, WARPS);
    }}
    barrier_fence();
  }}
  __syncthreads();
  if (warp >= WARPS) {{
    {fewer}
    if ({"warp == WARPS" if of_keys else "thread == THREADS"}) {{
{_copies(kernel)}
    }}{_cleared(kernel)}
  }} else {{
    {more}
    {GROUP}
    const unsigned short* own_keys = {own_keys}_ptr + (long long)problem * {own_rows} * HEAD_DIM;
    const unsigned short* own_values = {own_values}_ptr + (long long)problem * {own_rows} * VALUE_DIM;
{_own_tiles(kernel, schedule)}
{"" if of_keys else OWN_NUMBERS}
{_walk(kernel, schedule, pair)}
{stores(kernel, schedule, pair)}
  }}
}}
"""


def _cleared(kernel: AttentionGradientKernel) -> str:
    """Zeros for slopes of queries that are not walked, by the warps of the group that copies which have nothing else to
    do."""
    if not kernel.writes_slopes:
        return ""
    idle = cleared_slopes(f"thread - THREADS - {LANES}", str((GROUP_WARPS - 1) * LANES))
    return f" else {{\n{idle}\n    }}"


def _parameters(kernel: AttentionGradientKernel) -> str:
    """Parameters: tensor maps of what is walked, pointers to everything else."""
    walked, inputs = _walked(kernel), _inputs(kernel)
    texts = []
    for name in inputs:
        element = "float" if name in "LD" else "unsigned short"
        pointer = f"const {element}* __restrict__ {name}_ptr"
        texts.append(f"const __grid_constant__ TensorMap {name}_map" if name in walked else pointer)
    return ",\n    ".join([*texts, f"unsigned short* __restrict__ {kernel.parameters[-1]}_ptr"])


def _copies(kernel: AttentionGradientKernel) -> str:
    """The walk of the thread, or of the warp, that copies: a buffer that is empty gets the next step."""
    attention, of_keys = kernel.attention, kernel.is_of_keys
    heads = f"problem % {attention.key_heads}"
    if of_keys and kernel.group > 1:
        heads = f"{heads} * GROUP + head"
    full, empty = (f"STEP_{state} + {GRADIENT_BARRIERS_BYTES} * stage" for state in ("FULL", "EMPTY"))
    copies = [f"barrier_expect(shared, {full}, KEY_TILE + VALUE_TILE);"]
    for name, subject, width in zip(
        _walked(kernel), ("KEY", "VALUE"), (attention.head_dim, attention.value_size), strict=True
    ):
        panel = PANEL_BYTES // DTYPE_BYTES[attention.dtype]
        for number in range(-(-width // panel)):
            to = f"{subject}_BUFFERS + stage * STEP_TILES + {number} * STEP * {PANEL_BYTES}"
            at = f"{number * panel}, first_walked, {heads}, problem / {attention.key_heads}"
            copies.append(f"copy_tile(shared, {to}, &{name}_map, {full},\n                    {at});")
    indent = "          " if of_keys else "        "
    text = "\n".join(f"{indent}{copy}" for copy in copies)
    place = FIRST_QUERY if of_keys else "const int first_walked = (first_step + number) * STEP;"
    return f"""\
#pragma unroll 1
      for (int number = 0; number < steps; ++number) {{
        const int stage = number % STAGES, parity = number / STAGES % 2;
        {place}
        barrier_wait(shared, {empty}, parity ^ 1);
{_with_numbers(text, full) if of_keys else text}
      }}"""


def _with_numbers(copies: str, full: str) -> str:
    """The two numbers of every query of a step, by the warp whose first thread copies."""
    return f"""\
        {HEAD}
        if (lane == 0) {{
{copies}
        }}
        float* numbers = (float*)(shared + NUMBERS) + stage * NUMBERS_OF_STEP;
        const long long first = (long long)problem * QUERY_ROWS + head * QUERIES_ALL + first_walked;
        for (int row = lane; row < STEP; row += 32) {{
          const bool is_there = first_walked + row < QUERIES_ALL;
          // Of two adjacent tiles of eight the pairs of a lane side by side.
          numbers[row / 16 * 16 + row % 8 / 2 * 4 + row % 16 / 8 * 2 + row % 2] =
              is_there ? L_ptr[first + row] * TWOS : 0.0f;
          // As sums of the products that D is taken from: of two rows of a fragment, columns by pairs.
          float* begun = numbers + STEP + row / 2 * 4 + row % 2;
          begun[0] = begun[2] = is_there ? -D_ptr[first + row] : 0.0f;
        }}
        barrier_arrive(shared, {full});"""


def _own_tiles(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> str:
    """Copies of the block's own rows."""
    attention = kernel.attention
    tiles = [
        StagedTile(
            tensor=tensor, width=width, full=full, rows=schedule.rows, pitch=pitch, start=start, first="first_row",
            bound="ROWS_ALL", is_bounded=kernel.rows % schedule.rows != 0, is_walked=False,
            is_grouped=kernel.group > 1 and not kernel.is_of_keys, is_swizzled=True,
        )
        for tensor, width, full, pitch, start in (
            ("own_keys", attention.head_dim, "DEPTH", "KEY_PITCH", "0"),
            ("own_values", attention.value_size, "WIDTH", "VALUE_PITCH", "OWN_VALUES"),
        )
    ]  # fmt: skip
    return "\n".join(tile.copy(schedule.warps * LANES) for tile in tiles)


def _walk(kernel: AttentionGradientKernel, schedule: GradientSchedule, pair: str) -> str:
    """The steps of a block, behind its own tiles."""
    of_keys, is_shared = kernel.is_of_keys, schedule.shares > 1
    sums = "\n".join(
        f"  float {name}[FRAGMENTS][{width} / 8][4];\n{cleared(name, width)}"
        for name, width in sums_of(results_of(kernel, schedule), schedule).items()
    )
    steps = _steps_of_keys if of_keys else _steps_of_queries
    walk = _steps_of_shares if is_shared else steps
    return f"""\
{sums}
  float logits[FRAGMENTS][STEP / 8][4], wanted[FRAGMENTS][STEP / 8][4];
  unsigned {"weights[STEP / 16][4], " if of_keys else ""}slopes[STEP / 16][4];
  if (steps > 0) {{
    copy_own_keys();
    {"if (share == 0) " if is_shared else ""}copy_own_values();
    copy_async_commit();
    copy_async_wait_0();
    async_proxy_fence();
    barrier_arrive(shared, OWN_FULL);
    barrier_wait(shared, OWN_FULL, 0);
{walk(kernel, schedule, pair)}
  }}"""


def _buffer(subject: str, number: str) -> Tile:
    """Where the tile of a step lies."""
    return Tile(f"{subject}_BUFFERS", moved=f"{number} % STAGES * (STEP_TILES / 16)")


def _full(number: str) -> str:
    """The wait for the tiles of a step."""
    return f"barrier_wait(shared, STEP_FULL + {GRADIENT_BARRIERS_BYTES} * ({number} % STAGES), {number} / STAGES % 2);"


def _empty(condition: str, number: str) -> str:
    """The warp has no more use for the tiles of a step."""
    return f"if ({condition}) barrier_arrive(shared, STEP_EMPTY + {GRADIENT_BARRIERS_BYTES} * ({number} % STAGES));"


def _dots(
    kernel: AttentionGradientKernel,
    schedule: GradientSchedule,
    sums: str,
    number: str,
    *,
    begins: bool = True,
    ends: bool = True,
) -> str:
    """The products of a group's own rows and those of a step: ``logits``, or what is ``wanted`` of them; added to what
    is there where they do not begin anew."""
    attention, is_logits = kernel.attention, sums == "logits"
    return product_of_rows(
        sums, attention.dtype, attention.head_dim if is_logits else attention.value_size,
        own=Tile("0" if is_logits else "OWN_VALUES", "own_start"),
        walked=_buffer("KEY" if is_logits else "VALUE", number), step=schedule.step, step_name="STEP",
        begins=begins, ends=ends,
    )  # fmt: skip


def _key_sums(kernel: AttentionGradientKernel, number: str, sums: str = "key_sums") -> str:
    """The products of the gradients of logits and what was walked."""
    dtype, depth = kernel.attention.dtype, kernel.attention.head_dim
    return product_of_columns(sums, "slopes", dtype, depth, walked=_buffer("KEY", number), step_name="STEP")


def _value_sums(kernel: AttentionGradientKernel, sums: str = "value_sums") -> str:
    """The products of the probabilities and the gradients of results of a step."""
    dtype, width = kernel.attention.dtype, kernel.attention.value_size
    return product_of_columns(sums, "weights", dtype, width, walked=_buffer("VALUE", "number"), step_name="STEP")


def _probabilities(exponent: str, mask: str) -> str:
    """Probabilities of the pairs of a step in place of their logits."""
    logit = "logits[m][n][2 * i + j]"
    return f"{each_logit(f'{logit} = power_of_two(fmaf({logit}, SCALE, -{exponent}));')}\n{mask}"


def _slopes(difference: str, pair: str, used: str = "") -> str:
    """Gradients of logits in place of what is wanted of them, and as factors; ``used`` says what was read."""
    text = each_logit(f"wanted[m][n][2 * i + j] = logits[m][n][2 * i + j] * {difference};")
    return f"{text}\n{used}{factors_of('wanted', 'slopes', pair, 'STEP')}"


def _steps_of_queries(kernel: AttentionGradientKernel, schedule: GradientSchedule, pair: str) -> str:
    """Steps along keys: the products of the step before run while probabilities are taken."""
    step, width = schedule.step, padded(kernel.attention.head_dim)
    probabilities = _probabilities("exponents[m][i]", unseen_keys("STEP", "first_walked", "0.0f"))
    slopes = _slopes("(wanted[m][n][2 * i + j] - dots[m][i])", pair)
    return f"""\
    {_full("0")}
    warp_group_arrive();
{_dots(kernel, schedule, "logits", "0", ends=False)}
{_dots(kernel, schedule, "wanted", "0")}
    {done_name(0, step)}(logits[0][0]);
    {behind_name(step)}(wanted[0][0]);
    {{
      const int first_walked = first_step * STEP;
{probabilities}
    }}
{slopes}
#pragma unroll 1
    for (int number = 1; number < steps; ++number) {{
      const int first_walked = (first_step + number) * STEP;
      {_full("number")}
      warp_group_arrive();
{_dots(kernel, schedule, "logits", "number")}
{_dots(kernel, schedule, "wanted", "number")}
{_key_sums(kernel, "(number - 1u)")}
      {done_name(2, step)}(logits[0][0]);
{probabilities}
      {beside("logits", "STEP")}
      {done_name(0, step)}(wanted[0][0]);
      {behind_name(width)}(key_sums[0][0]);
      {_empty("lane == 0", "(number - 1u)")}
{slopes}
    }}
    warp_group_arrive();
{_key_sums(kernel, "(steps - 1)")}
    {done_name(0, width)}(key_sums[0][0]);"""


def _logits_of_keys(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> str:
    """The beginning of a step along queries, whose logits are issued."""
    return f"""\
      {FIRST_QUERY}
      const float* numbers = (const float*)(shared + NUMBERS) + number % STAGES * NUMBERS_OF_STEP;
      {_full("number")}
      warp_group_arrive();
{_dots(kernel, schedule, "logits", "number")}"""


def _wanted_of_keys(kernel: AttentionGradientKernel, schedule: GradientSchedule) -> str:
    """What is wanted of the logits of a step, begun with -D."""
    return f"""\
      const float4* begun = (const float4*)(numbers + STEP) + lane % 4;
#pragma unroll
      for (int n = 0; n < STEP / 8; ++n)
        *(float4*)wanted[0][n] = begun[n * 4];
      warp_group_arrive();
{_dots(kernel, schedule, "wanted", "number", begins=False)}"""


def _slopes_of_keys(kernel: AttentionGradientKernel, pair: str, sums: str = "key_sums") -> str:
    """Gradients of the logits of a step, and their products."""
    # The numbers have been read by all threads when the first one gives the buffer back.
    slopes = _slopes("wanted[m][n][2 * i + j]", pair, "    __syncwarp();\n")
    return f"""\
{slopes}
      warp_group_arrive();
{_key_sums(kernel, "number", sums)}
{slope_stores("slopes[n / 2][i]", "slopes[n / 2][2 + i]") if kernel.writes_slopes else ""}"""


def _probabilities_of_keys(schedule: GradientSchedule, pending: int) -> str:
    """Probabilities of the pairs of a step along queries, once their logits are there and all products but the last
    ``pending``; nothing needs the step before any more."""
    return f"""\
      {done_name(pending, schedule.step)}(logits[0][0]);
      {_empty("number > 0 && lane == 0", "(number - 1u)")}
      float exponents[STEP / 16][4];
#pragma unroll
      for (int n = 0; n < STEP / 16; ++n) *(float4*)exponents[n] = ((const float4*)numbers + lane % 4)[n * 4];
{_probabilities("exponents[n / 2][n % 2 * 2 + j]", mask_of_keys())}"""


def _steps_of_keys(kernel: AttentionGradientKernel, schedule: GradientSchedule, pair: str) -> str:
    """Steps along queries: products of values run while gradients of logits are worked out, those of the gradients
    while the next step's logits come."""
    attention, step = kernel.attention, schedule.step
    return f"""\
#pragma unroll 1
    for (int number = 0; number < steps; ++number) {{
{_logits_of_keys(kernel, schedule)}
{_wanted_of_keys(kernel, schedule)}
{_probabilities_of_keys(schedule, pending=1)}
{factors_of("logits", "weights", pair, "STEP")}
      warp_group_arrive();
{_value_sums(kernel)}
      {done_name(1, step)}(wanted[0][0]);
{_slopes_of_keys(kernel, pair)}
    }}
    {done_name(0, padded(attention.head_dim))}(key_sums[0][0]);
    {behind_name(padded(attention.value_size))}(value_sums[0][0]);"""


def _steps_of_shares(kernel: AttentionGradientKernel, schedule: GradientSchedule, pair: str) -> str:
    """Steps along queries of blocks that make dK, or dV: products of one step run while the next one's logits come."""
    attention, step = kernel.attention, schedule.step
    return f"""\
    if (share == 0) {{
#pragma unroll 1
    for (int number = 0; number < steps; ++number) {{
{_logits_of_keys(kernel, schedule)}
{_wanted_of_keys(kernel, schedule)}
{_probabilities_of_keys(schedule, pending=1)}
      {beside("logits", "STEP")}
      {done_name(0, step)}(wanted[0][0]);
{_slopes_of_keys(kernel, pair, "sums")}
    }}
    }} else {{
#pragma unroll 1
    for (int number = 0; number < steps; ++number) {{
{_logits_of_keys(kernel, schedule)}
{_probabilities_of_keys(schedule, pending=0)}
{factors_of("logits", "weights", pair, "STEP")}
      __syncwarp();
      warp_group_arrive();
{_value_sums(kernel, "sums")}
    }}
    }}
    {done_name(0, padded(max(attention.head_dim, attention.value_size)))}(sums[0][0]);"""
