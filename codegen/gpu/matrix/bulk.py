"""Products of warp groups whose tiles are copied in bulk (TMA), as CUDA text: one group copies, the others multiply.

Shared memory holds ``stages`` buffers of both operands' tiles, in the panels of :mod:`codegen.gpu.matrix.panels`, and
two barriers each. The thread that copies waits until a buffer is empty and starts the copies of a step, whose bytes the
barrier *full* counts; warps that multiply wait for that, and arrive at *empty* once the products that read the buffer
are done, in all blocks of the cluster that copies came to. What lies outside of a tensor arrives as zeros.

A block computes the tiles ``launched`` apart, and the copies for the next one are under way while results leave: from
registers, of sixteen bytes a lane once the four lanes that hold a row have exchanged what they have of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from codegen.gpu.matrix import wgmma_functions as device
from codegen.gpu.matrix.base import outer_inner, warp_tile_problem
from codegen.gpu.matrix.copied import stage_bytes
from codegen.gpu.matrix.final_text import POINTERS, element_text, final_text, place_text, product_of, value_text
from codegen.gpu.matrix.panels import DEPTH_BYTES, PanelTile, tile_problem
from codegen.launch_shape import SIZE_PARAMETER, LaunchShape
from codegen.tensor_map import TensorMap
from codegen.tir.lowered import KERNEL_SUFFIX, Lowered, identifier
from codegen.tir.lowering import TileRequest
from codegen.tir.reads import padded_sizes
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.matrix import MATRIX_TYPES, MatrixRoles
from sokoban.language.expression import Load, Tensor
from sokoban.schedule.bulk_copies import BARRIER_BYTES, cluster_shape, dimension_axis, schedule_problem
from sokoban.schedule.tile import TileSchedule
from sokoban.schedule.warp_groups import GROUP_ROWS, MOVED_REGISTERS, PANEL_BYTES

#: Elements of the output that are words, as the text has them.
_WORDS = {"float32": "float", "int32": "int"}

#: Two floats rounded to the element type of the output.
_PAIRS = {"float16": "rounded_pair_f16", "bfloat16": "rounded_pair_bf16"}


def takes(request: TileRequest) -> bool:
    """Products by instruction ``wgmma_64xNx16``."""
    return request.schedule.instruction == Instruction.WGMMA


def bulk_problem(form: KernelForm, schedule: TileSchedule) -> str | None:
    """Why a schedule cannot be lowered with bulk copies; None when it can."""
    roles = form.roles
    if roles is None:
        return "is no product of matrices that an instruction multiplies"
    problem = warp_tile_problem(schedule, roles) or tile_problem(schedule, roles)
    return problem or schedule_problem(form, roles, schedule)


def lower(request: TileRequest) -> Lowered:
    """The kernel of a matrix product.

    Raises:
        ValueError: the operator or the schedule does not fit; :func:`bulk_problem` says why.
    """
    form, schedule, roles = request.problem, request.schedule, request.problem.roles
    problem = bulk_problem(form, schedule)
    if problem is not None or roles is None:
        raise ValueError(f"{form.expr.name}: {problem}")
    kernel = _BulkKernel(form, schedule, roles)
    text = kernel.text(request.entry)
    return Lowered.of_text(
        text,
        request.entry,
        blocks=kernel.launched,
        threads=schedule.threads_per_block,
        shared_bytes=kernel.shared_bytes,
        maps=tuple(kernel.tensor_map(tensor) for tensor in form.expr.inputs if tensor.name in kernel.loads),
        launch=kernel.launch_shape,
    )


@dataclass(frozen=True)
class _BulkKernel:
    """The text of one kernel."""

    form: KernelForm
    schedule: TileSchedule
    roles: MatrixRoles

    @cached_property
    def groups(self) -> int:
        """Warp groups that multiply."""
        return self.schedule.block_of[self.roles.m] // GROUP_ROWS

    @cached_property
    def width(self) -> int:
        """Columns of a tile."""
        return self.schedule.block_of[self.roles.n]

    @cached_property
    def loads(self) -> Mapping[str, Load]:
        """The operands by tensor."""
        return {load.tensor: load for load in (self.roles.a, self.roles.b)}

    @cached_property
    def tile(self) -> Mapping[str, int]:
        """Sizes of a block along the output's axes, and of a step along the others."""
        return {**self.schedule.block_of, **self.schedule.step_of}

    @cached_property
    def element_bytes(self) -> int:
        """Of both operands."""
        return MATRIX_TYPES[self.roles.dtype].element_bytes

    @cached_property
    def sum_type(self) -> str:
        """Type of the sums, as the text has it."""
        return _WORDS[MATRIX_TYPES[self.roles.dtype].accumulate]

    @cached_property
    def panel(self) -> int:
        """Elements of a panel's row."""
        return PANEL_BYTES // self.element_bytes

    @cached_property
    def stage_bytes(self) -> int:
        return stage_bytes(self.schedule, self.roles)

    @cached_property
    def shared_bytes(self) -> int:
        return self.schedule.stages * (self.stage_bytes + BARRIER_BYTES)

    @cached_property
    def panels(self) -> Mapping[Load, PanelTile]:
        """Where the operands lie in a buffer."""
        panels, start = {}, 0
        for load in (self.roles.a, self.roles.b):
            outer, inner = outer_inner(self.roles, load)
            panels[load] = PanelTile(self.roles.is_turned(load), self.tile[outer], start, self.element_bytes)
            start += self.tile[outer] * self.tile[inner] * self.element_bytes
        return panels

    @cached_property
    def tiles(self) -> Mapping[str, int]:
        """Tiles of the output along every axis, of a whole cluster where it lies along the axis."""
        along = self.along
        return {axis: -(-self.form.sizes[axis] // (size * along.get(axis, 1))) for axis, size in self.schedule.block}

    @cached_property
    def along(self) -> Mapping[str, int]:
        """Blocks of a cluster along m and across."""
        shape = cluster_shape(self.schedule.cluster, self.tile[self.roles.m], self.width)
        return dict(zip((self.roles.m, self.roles.across), shape, strict=True))

    def sharing(self, load: Load) -> int:
        """Blocks of a cluster that have an operand's tile in common."""
        return self.along[self.roles.across if load == self.roles.a else self.roles.m]

    @cached_property
    def all_tiles(self) -> int:
        """Tiles of the output, those that complete a cluster at an edge counted."""
        return math.prod(self.tiles.values()) * self.schedule.cluster

    @cached_property
    def launched(self) -> int:
        """Blocks of the launch."""
        return min(self.schedule.launched or self.all_tiles, self.all_tiles)

    @cached_property
    def launch_shape(self) -> LaunchShape | None:
        """Blocks of the launch by a size that is known then; None where their number is known."""
        axis = self.form.launch_axis
        if axis is None:
            return None
        tile = self.tile[axis.name] * self.along.get(axis.name, 1)
        blocks = self.all_tiles // self.tiles[axis.name]
        return LaunchShape(tile=tile, blocks=blocks, elements=axis.elements, most=self.schedule.launched or None)

    def _end(self, axis: str) -> str:
        """End of an axis, as the text has it."""
        launch = self.form.launch_axis
        if launch is None or axis != launch.name:
            return str(self.form.sizes[axis])
        return SIZE_PARAMETER if launch.elements == 1 else f"{SIZE_PARAMETER} * {launch.elements}"

    def _count(self, axis: str) -> str:
        """Tiles along an axis, as the text has it."""
        launch = self.form.launch_axis
        return str(self.tiles[axis]) if launch is None or axis != launch.name else f"tiles_{identifier(axis)}"

    @property
    def is_persistent(self) -> bool:
        """True if blocks compute several tiles."""
        return self.launched < self.all_tiles

    @property
    def reuses_buffers(self) -> bool:
        """True if copies come to buffers that products have read: otherwise no thread waits until one is empty."""
        return self.is_persistent or self._steps() > self.schedule.stages

    def copied_rows(self, load: Load) -> int:
        """Rows of an operand's tile that a block copies."""
        return self.tile[outer_inner(self.roles, load)[0]] // self.sharing(load)

    def tensor_map(self, tensor: Tensor) -> TensorMap:
        """Tensor map of an operand: panels, as many rows of them as a block copies."""
        load = self.loads[tensor.name]
        outer, inner = outer_inner(self.roles, load)
        box = {outer: self.copied_rows(load), inner: self.panel}
        return TensorMap(
            tensor=tensor.name,
            dtype=self.roles.dtype,
            shape=tensor.shape,
            launch_elements=launch_elements(self.form, load),
            box=tuple(box.get(dimension_axis(index, self.roles) or "", 1) for index in load.indices),
        )

    # ---- the text

    def text(self, entry: str) -> str:
        """All of it, from ``extern "C" __global__`` on."""
        schedule, cluster = self.schedule, self.schedule.cluster
        threads = schedule.threads_per_block
        bounds = f"__launch_bounds__({threads}, 1)" + f" __cluster_dims__({cluster}, 1, 1)" * (cluster > 1)
        moved = MOVED_REGISTERS.get(self.groups)
        more, fewer = (
            (f"    registers_more_{moved[0]}();\n", f"    registers_fewer_{moved[1]}();\n") if moved else ("", "")
        )
        meet = "cluster_sync();" if cluster > 1 else "__syncthreads();"
        # A block whose buffers are filled once ends when the last copy to it has come, and nothing arrives there later.
        part = "  cluster_sync();  // no arrival where a block has ended" if cluster > 1 and self.reuses_buffers else ""
        return f"""\
extern "C" __global__ void {bounds}
{entry}{KERNEL_SUFFIX}({self._parameters()}) {{
  constexpr int STAGES = {schedule.stages}, STEPS = {self._steps()}, STAGE_BYTES = {self.stage_bytes};
  constexpr int FULL = STAGES * STAGE_BYTES, EMPTY = FULL + 8;
  extern __shared__ __align__({device.ATOM_BYTES}) char shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
{self._ranks()}{self._launch_tiles()}
  if (thread == 0) {{
    for (int stage = 0; stage < STAGES; ++stage) {{
      barrier_make(shared, FULL + {BARRIER_BYTES} * stage, 1);
      barrier_make(shared, EMPTY + {BARRIER_BYTES} * stage, {self.groups * 4 * self._partners()});
    }}
    barrier_fence();
  }}
  {meet}
  int stage = 0, parity = 0;
  if (warp >= {self.groups * 4}) {{
{fewer}    if (thread == {self.groups * 128}) {{
{self._copy_tiles()}
    }}
  }} else {{
{more}    const int group = warp / 4;
    {self.sum_type} sums[{self.width // 2}]{f", products[{self.width // 2}]" if self.roles.scales else ""};
{self._multiply_tiles()}
  }}
{part}
}}
"""

    def _ranks(self) -> str:
        """Where a block is in its cluster, and to whom each lane says that a buffer is empty: those who copy to it."""
        if self.schedule.cluster < 2:
            return ""
        across = self.along[self.roles.across]
        return f"""\
  const int rank = cluster_rank(), rank_m = rank / {across}, rank_n = rank % {across};
  const int partner = lane < {across} ? rank_m * {across} + lane : (rank_m ^ 1) * {across} + rank_n;"""

    def _launch_tiles(self) -> str:
        """The number of tiles that follows from the size that is known at launch."""
        axis = self.form.launch_axis
        if axis is None:
            return ""
        tile = self.tile[axis.name] * self.along.get(axis.name, 1)
        end = self._end(axis.name)
        return f"\n  const int {self._count(axis.name)} = ({end} + {tile - 1}) / {tile};"

    def _partners(self) -> int:
        """Blocks of a cluster that copy to a block, itself among them."""
        return sum(self.along.values()) - 1

    def _parameters(self) -> str:
        texts = []
        for tensor in self.form.expr.inputs:
            name = identifier(tensor.name)
            if tensor.name in self.loads:
                texts.append(f"const __grid_constant__ TensorMap {name}_map")
            else:
                texts.append(f"const {POINTERS[tensor.dtype]}* __restrict__ {name}_ptr")
        output = self.form.expr.output
        texts.append(f"{POINTERS[output.dtype]}* __restrict__ {identifier(output.name)}_ptr")
        return ", ".join([*texts, *([f"int {SIZE_PARAMETER}"] if self.form.launch_axis else [])])

    def _steps(self) -> int:
        padded = padded_sizes(self.form, self.schedule)
        return math.prod(padded[axis] // self.schedule.step_of[axis] for axis in self.form.reduced)

    def _places(self) -> str:
        """The walk over the tiles of a block, and the first element of each by axis."""
        roles, cluster, order = self.roles, self.schedule.cluster, self.form.final.axes
        first, stride = (
            ("blockIdx.x", "gridDim.x") if cluster < 2 else (f"blockIdx.x / {cluster}", f"gridDim.x / {cluster}")
        )
        across = self.tiles[roles.across]
        lines = [f"for (int tile = {first}; tile < {self._product(self.tiles)}; tile += {stride}) {{"]
        # Bands count blocks, tiles of a walk are clusters.
        band = min(-(-self.schedule.raster // self.along[roles.across]), across)
        if band:
            lines += [
                f"  const int within = tile % {self._product((roles.m, roles.across))}, "
                f"band = within / {self._times(band, roles.m)} * {band};",
                f"  const int at = within - band * {self._count(roles.m)}, broad = {self._broad(band, across)};",
                "  const int down = at / broad, across = band + at % broad;",
            ]
        else:
            down = self._count(roles.m)
            lines.append(f"  const int down = tile / {across} % {down}, across = tile % {across};")
        number = {roles.m: "down", roles.across: "across"}
        quotient = f"tile / {self._product((roles.m, roles.across))}"
        for axis in reversed(order):
            if axis not in number:
                number[axis] = f"{quotient} % {self._count(axis)}"
                quotient = f"{quotient} / {self._count(axis)}"
        for axis in order:
            along = self.along.get(axis, 1)
            place = number[axis]
            if along > 1:
                place = f"({place} * {along} + {'rank_m' if axis == roles.m else 'rank_n'})"
            lines.append(f"  const int {_origin(axis)} = {place} * {self.tile[axis]};")
        return "\n".join(f"    {line}" for line in lines)

    def _times(self, count: int, axis: str) -> str:
        """Some times the tiles along an axis."""
        number = self._count(axis)
        return str(count * int(number)) if number.isdigit() else f"({count} * {number})"

    def _product(self, axes: Iterable[str]) -> str:
        """Tiles along several axes."""
        numbers = [self._count(axis) for axis in axes]
        known = math.prod(int(number) for number in numbers if number.isdigit())
        names = [number for number in numbers if not number.isdigit()]
        return f"({' * '.join([*names, str(known)])})" if names else str(known)

    @staticmethod
    def _broad(band: int, across: int) -> str:
        return str(band) if across % band == 0 else f"min({band}, {across} - band)"

    def _copy_tiles(self) -> str:
        lines = [f"          {line}" for line in self._step_places(self.form.reduced)]
        copies = "\n".join(f"          {line}" for load in (self.roles.a, self.roles.b) for line in self._copies(load))
        return f"""\
  {self._places().replace(chr(10), chr(10) + "  ")}
#pragma unroll 1
        for (int step = 0; step < STEPS; ++step) {{
{self._empty()}          barrier_expect(shared, FULL + {BARRIER_BYTES} * stage, STAGE_BYTES);
{chr(10).join(lines)}
{copies}
          if (++stage == STAGES) stage = 0, parity ^= 1;
        }}
      }}"""

    def _step_places(self, axes: Collection[str]) -> list[str]:
        """The first element of a step along some axes of the reduction."""
        lines = []
        step = "step"
        for axis in reversed(self.form.reduced):
            size = self.schedule.step_of[axis]
            count = -(-self.form.sizes[axis] // size)
            place = f"{step} % {count}" if axis != self.form.reduced[0] else step
            if axis in axes:
                lines.append(f"const int {_origin(axis)} = ({place}) * {size};")
            step = f"({step} / {count})"
        return lines

    def _copies(self, load: Load) -> list[str]:
        """The copies of one operand's tile, or of the block's share of it, panel by panel."""
        outer, inner = outer_inner(self.roles, load)
        panel, rows = self.panels[load], self.copied_rows(load)
        is_shared = rows < self.tile[outer]
        name = "copy_tile_to_all" if is_shared else "copy_tile"
        # Blocks side by side have their tile of A in common, those along m that of B.
        is_a, across = load == self.roles.a, self.along[self.roles.across]
        part = "rank_n" if is_a else "rank_m"
        blocks = f"{2**across - 1} << rank_m * {across}, " if is_a else f"{1 + 2**across} << rank_n, "
        blocks = blocks if is_shared else ""
        calls = []
        for first in range(0, self.tile[inner], self.panel):
            to = f"stage * STAGE_BYTES + {panel.start + first // self.panel * panel.panel_bytes}"
            offsets = {outer: f" + {part} * {rows}" if is_shared else "", inner: f" + {first}" if first else ""}
            places = {axis: f"{_origin(axis)}" for index in load.indices for axis in index.axes}
            at = [
                place_text(index, places, self.form.expr.tensor_by_name)
                + offsets.get(dimension_axis(index, self.roles) or "", "")
                for index in reversed(load.indices)
            ]
            to += f" + {part} * {rows * PANEL_BYTES}" if is_shared else ""
            barrier = f"FULL + {BARRIER_BYTES} * stage"
            calls.append(f"{name}(shared, {to}, &{identifier(load.tensor)}_map, {barrier}, {blocks}{', '.join(at)});")
        return calls

    def _multiply_tiles(self) -> str:
        return f"""\
{self._places()}
#pragma unroll
      for (int i = 0; i < {self.width // 2}; ++i) sums[i] = 0;
{self._scaled_steps() if self.roles.scales else self._all_steps()}{self._results()}
    }}"""

    def _all_steps(self) -> str:
        """The steps of a tile, the products of all of which are summed by the instruction."""
        return f"""\
{"      int before = 0;" + chr(10) if self.reuses_buffers else ""}#pragma unroll 1
      for (int step = 0; step < STEPS; ++step) {{
        barrier_wait(shared, FULL + {BARRIER_BYTES} * stage, parity);
        {device.ARRIVE}();
{self._products()}
        {device.COMMIT}();
{self._release_earlier()}        if (++stage == STAGES) stage = 0, parity ^= 1;
      }}
      {device.finish_name(self.width, self.sum_type)}(sums);
{self._release_last()}"""

    def _scaled_steps(self) -> str:
        """The steps of a tile, the products of each of which start anew and are scaled on their way to the sums.

        A lane has two rows, eight apart, whose scales it reads a step ahead.
        """
        release = f"        {self._release('stage')}\n" if self.reuses_buffers else ""
        return f"""\
{self._scale()}
      const int upper = {_origin(self.roles.m)} + warp * 16 + lane / 4;
      float next_upper = scale_of(upper, 0), next_lower = scale_of(upper + 8, 0);
#pragma unroll 1
      for (int step = 0; step < STEPS; ++step) {{
        const float scales[2] = {{next_upper, next_lower}};
        const int next = min(step + 1, STEPS - 1);
        next_upper = scale_of(upper, next), next_lower = scale_of(upper + 8, next);
        barrier_wait(shared, FULL + {BARRIER_BYTES} * stage, parity);
        {device.ARRIVE}();
{self._products("products", is_anew=True)}
        {device.COMMIT}();
        {device.finish_name(self.width)}(products);
{release}#pragma unroll
        for (int i = 0; i < {self.width // 2}; ++i) sums[i] = fmaf(scales[i / 2 % 2], products[i], sums[i]);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }}
"""

    def _scale(self) -> str:
        """The function that reads the product of a row's scales in a step."""
        form, roles = self.form, self.roles
        read = {axis for load in roles.scales for index in load.indices for axis in index.axes}
        axes = {axis: _origin(axis) for axis in (*form.final.axes, *form.reduced)} | {roles.m: "row"}
        value = value_text(product_of(roles.scales), form.expr.tensor_by_name, axes, {})
        guard = " && ".join(self._inside(axes, (roles.m, roles.across)))
        places = "".join(f"        {line}\n" for line in self._step_places(read))
        return f"""\
      auto scale_of = [&](int row, int step) -> float {{
{places}        return {f"{guard} ? {value} : 0.0f" if guard else value};
      }};"""

    def _inside(self, axes: Mapping[str, str], cut: Iterable[str]) -> list[str]:
        """Conditions of an element to be inside of the output along those axes of ``cut`` that tiles reach beyond."""
        return [f"{axes[axis]} < {self._end(axis)}" for axis in dict.fromkeys(cut) if self._is_cut(axis)]

    def _empty(self) -> str:
        """The wait of the thread that copies for a buffer that is not read any more."""
        wait = f"          barrier_wait(shared, EMPTY + {BARRIER_BYTES} * stage, parity ^ 1);\n"
        return wait if self.reuses_buffers else ""

    def _release_earlier(self) -> str:
        """The wait for the products of the step before, whose buffer is empty then."""
        if not self.reuses_buffers:
            return ""
        if self._steps() == 1:
            return "        before = stage;\n"
        return f"""\
        {device.WAIT_FOR_EARLIER}();
        if (step > 0) {self._release("before")}
        before = stage;
"""

    def _release_last(self) -> str:
        """The last step's buffer is empty: of use to the next tile."""
        return f"      {self._release('before')}\n" if self.is_persistent else ""

    def _release(self, stage: str) -> str:
        """The warp has no more use for a buffer."""
        cluster = self.schedule.cluster
        at = f"EMPTY + {BARRIER_BYTES} * {stage}"
        if cluster > 1:
            return f"{{\n          if (lane < {self._partners()}) barrier_arrive_in(shared, {at}, partner);\n        }}"
        return f"{{\n          if (lane == 0) barrier_arrive(shared, {at});\n        }}"

    def _products(self, sums: str = "sums", *, is_anew: bool = False) -> str:
        """The products of a step, added to ``sums`` or, where these start anew, in their place."""
        roles = self.roles
        turns = roles.is_turned(roles.a), roles.is_turned(roles.b)
        lines: list[str] = []
        for depth in range(0, self.schedule.step_of[roles.k], DEPTH_BYTES // self.element_bytes):
            a, b = (self.panels[load].described(0, 0, depth) for load in (roles.a, roles.b))
            group_bytes = self.panels[roles.a].described(0, GROUP_ROWS, depth)[0] - a[0]
            described = [f"{a[0]} + group * {group_bytes}, {a[1]}, {a[2]}", f"{b[0]}, {b[1]}, {b[2]}"]
            operands = [f"{device.DESCRIPTOR}(shared, stage * STAGE_BYTES + {text})" for text in described]
            name = device.product_name(roles.dtype, self.width, *turns, is_anew=is_anew and not lines)
            lines.append(f"        {name}({sums}, {operands[0]},\n            {operands[1]});")
        return "\n".join(lines)

    # ---- results

    def _results(self) -> str:
        """The sums of a tile through the final statement to the output.

        A lane has pairs of columns, eight apart, of two rows eight apart.
        """
        form, roles = self.form, self.roles
        m, n, output = _origin(roles.m), _origin(roles.n), form.expr.output
        axes = {axis: _origin(axis) for axis in form.final.axes} | {roles.m: "row", roles.n: "column"}
        inside = self._inside(axes, (roles.m, *([roles.blocks] if roles.blocks else [])))
        across = "".join(self._inside(axes, [roles.n]))
        guard = " && ".join([*inside, *([across] if across else [])])
        computed = "int" if form.expr.final_dtype == "int32" else "float"
        value = "sum" if computed == "int" else final_text(form, axes, "sum")
        is_across = form.final.axes[-1] == roles.n
        element = element_text(output, [axes[axis] for axis in form.final.axes])
        opening = f"""\
      auto final_value = [&]({computed} sum, int row, int column) -> {computed} {{
        return {f"{guard} ? {value} : 0.0f" if guard and form.final_loads else value};
      }};
      const int first_row = {m} + warp * 16 + lane / 4, first_column = {n} + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {{
        const int row = first_row + 8 * i;
"""
        if is_across and output.dtype in _PAIRS and output.shape[-1] % 8 == 0:
            body = self._sixteen_bytes(element, " && ".join([*inside, across] if across else inside))
        else:
            body = self._single(element, guard, is_across)
        return f"{opening}{body}\n      }}"

    def _sixteen_bytes(self, element: str, guard: str) -> str:
        """Eight columns a lane, after the four lanes of a row have exchanged theirs."""
        condition = f"if ({guard}) " if guard else ""
        return f"""\
#pragma unroll
        for (int j = 0; j < {self.width // 8}; j += 4) {{
          unsigned words[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {{
            const int at = (j + k) * 4 + 2 * i, column = first_column + 8 * (j + k);
            words[k] = {_PAIRS[self.form.expr.output.dtype]}(final_value(sums[at], row, column),
                                                             final_value(sums[at + 1], row, column + 1));
          }}
          turn_words(words, lane);
          const int column = {_origin(self.roles.n)} + 8 * (j + lane % 4);
          {condition}*(uint4*)&{element} = make_uint4(words[0], words[1], words[2], words[3]);
        }}"""

    def _single(self, element: str, guard: str, is_across: bool) -> str:
        """Each column by itself, or pairs of words where they lie side by side."""
        output = self.form.expr.output
        if is_across and output.dtype in _WORDS and output.shape[-1] % 2 == 0:
            two = f"{_WORDS[output.dtype]}2"
            store = f"""\
          const int at = j * 4 + 2 * i, column = first_column + 8 * j;
          {f"if ({guard}) " if guard else ""}*({two}*)&{element} =
              make_{two}(final_value(sums[at], row, column), final_value(sums[at + 1], row, column + 1));"""
        else:
            pair = _PAIRS.get(output.dtype)
            value = "final_value(sums[j * 4 + 2 * i + k], row, column)"
            value = f"(unsigned short){pair}({value}, 0.0f)" if pair else value
            store = f"""\
#pragma unroll
          for (int k = 0; k < 2; ++k) {{
            const int column = first_column + 8 * j + k;
            {f"if ({guard}) " if guard else ""}{element} = {value};
          }}"""
        return f"""\
#pragma unroll
        for (int j = 0; j < {self.width // 8}; ++j) {{
{store}
        }}"""

    def _is_cut(self, axis: str) -> bool:
        """True if tiles reach beyond the output along an axis."""
        return self.tiles[axis] * self.tile[axis] * self.along.get(axis, 1) > self.form.sizes[axis]


def launch_elements(form: KernelForm, load: Load) -> int:
    """Elements of a tensor's first dimension for each of the size that is known at launch; 0 where it has no part in
    it."""
    launch = form.launch_axis
    return launch.elements if launch is not None and load.indices[0].axes == (launch.name,) else 0


def _origin(axis: str) -> str:
    """The variable that holds the first element of a tile along an axis."""
    return f"origin_{identifier(axis)}"
