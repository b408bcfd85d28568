"""Instructions of our best kernels: ``python -m bench.inspect`` (thesis 5.5.2; no GPU needed).

Rank 1 of every operator of a suite is built for each board and disassembled; a line of the table has its hottest loop,
and the density that RATIONAL assumed and the one found. Below stands what falls short of the bars that are set for
kernels that can keep up with a vendor's.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import click
from rich.console import Console
from rich.table import Table

from bench.suites import suite_names, suite_path
from hal.catalog import load_device
from hal.support.errors import InputError
from hal.support.tables import new_table
from roller.compile.pipeline import compile_operators
from roller.compile.workers import worker_pool
from roller.construct.program import RProgram
from roller.inspect.inspection import Inspection, inspect_built
from roller.inspect.page import json_line
from sokoban.language.expression import TensorExpr
from sokoban.language.operators import load_operators, operator_from_data

#: The boards whose code is looked at: sm_70 (read as sm_75), sm_80 and sm_90.
BOARDS = ("v100", "a100", "h200")

#: Suites of a few operators besides those of :mod:`bench.suites`.
GEMMS: tuple[dict[str, object], ...] = (
    {"name": "gemm_fp32", "op": "matmul", "m": 4096, "n": 4096, "k": 4096},
    {"name": "gemm_fp16", "op": "matmul", "m": 4096, "n": 4096, "k": 4096, "dtype": "float16"},
)
KINDS: tuple[dict[str, object], ...] = (
    *GEMMS,
    {"name": "conv_3x3", "op": "conv2d", "n": 32, "c": 64, "h": 56, "w": 56, "f": 64, "kh": 3, "kw": 3, "padding": 1},
    {
        "name": "depthwise",
        "op": "depthwise_conv2d",
        "n": 32,
        "c": 144,
        "h": 56,
        "w": 56,
        "kh": 3,
        "kw": 3,
        "padding": 1,
    },
    {"name": "avg_pool", "op": "avg_pool2d", "n": 32, "c": 64, "h": 56, "w": 56, "kh": 2, "kw": 2, "stride": 2},
    {"name": "row_sums", "op": "reduce", "function": "sum", "shape": [4096, 1024], "axes": [1]},
    {"name": "softmax", "op": "softmax", "shape": [4096, 1024]},
    {"name": "layer_norm", "op": "layer_norm", "shape": [4096, 1024]},
    {"name": "gelu", "op": "elementwise", "function": "gelu", "shape": [4096, 4096]},
)
FEW = {"gemm": GEMMS, "kinds": KINDS}

#: Least share of multiply-adds in the hottest loop of a large fp32 matrix product.
LEAST_SHARE = 0.85


@dataclass(frozen=True, eq=False)
class InspectedKernel:
    """Rank 1 of one operator on one board."""

    operator: str
    board: str
    found: Inspection

    @property
    def matrix(self) -> bool:
        """True if matrix instructions compute it."""
        return self.found.hot.mix.matrix > 0

    @property
    def spills(self) -> int:
        """Bytes that a thread spills, else its instructions on local memory; of the kernel as it is, where the code
        that was read is for a newer architecture."""
        inspection = self.found
        return (
            (inspection.as_built.spill_bytes or 0)
            if inspection.as_built
            else inspection.spill_bytes or inspection.local_accesses
        )


def rows_of(
    expressions: Sequence[TensorExpr], board: str, architecture: str | None, jobs: int, method: str
) -> Iterator[InspectedKernel]:
    """Build rank 1 of every operator for a board and disassemble it.

    Raises:
        InputError: a board generates no CUDA, or there is no disassembler.
    """
    device = load_device(board)
    if device.code_generator != "cuda":
        raise InputError("--device", f"{device.name} has no machine code that nvdisasm reads", "name an NVIDIA board")
    with worker_pool(jobs) as pool:
        # A row is a kernel: operators of several are left to `roller inspect`.
        results = compile_operators(
            expressions, device, top_k=1, verify=0, pool=pool, method=method, algorithms=("direct",)
        )
        for compiled in results:
            best = compiled.kernels[0]
            assert isinstance(best.program, RProgram)
            name = compiled.expr.name
            inspection = inspect_built(
                name, best.built.parts[0], compiled.form, device, best.program.schedule, architecture
            )
            yield InspectedKernel(name, board, inspection)


# What is asked of them


def shortfalls(row: InspectedKernel) -> Iterator[str]:
    """In what a kernel falls short of the bars."""
    inspection, mix = row.found, row.found.hot.mix
    if row.spills:
        yield f"{inspection.spill_bytes or 0} bytes spilled, {inspection.local_accesses} instructions on local memory"
    shared = mix.kinds.get("shared loads", {})
    if row.operator == "gemm_fp32":
        if mix.share("multiply-adds") < LEAST_SHARE:
            yield f"{100 * mix.share('multiply-adds'):.1f}% multiply-adds, at least {100 * LEAST_SHARE:.0f}% wanted"
        narrow = sum(count for kind, count in shared.items() if kind != "LDS.128")
        if narrow:
            yield f"{narrow} of {sum(shared.values())} shared loads are narrower than 128 bits"
    if row.operator == "gemm_fp16":
        yield from _matrix_shortfalls(row)
    for use in inspection.model.banks if inspection.model else ():
        if use.conflicts and row.operator.startswith("gemm"):
            yield f"{use.conflicts:.3g} passes too many per shared read of {use.tensor}"


def _matrix_shortfalls(row: InspectedKernel) -> Iterator[str]:
    mix = row.found.hot.mix
    if not row.matrix:
        yield "no matrix instructions"
    if int(row.found.architecture.removeprefix("sm_").rstrip("af")) < 80:
        return
    warp_groups = mix.kind("HGMMA", "UTCHMMA") > 0
    if not warp_groups and not mix.kind("LDSM.x4", "LDSM.x2", "LDSM.x1"):
        yield "operands are not read by ldmatrix"
    if mix.kind("LDS.32", "LDS.64", "LDS.128"):
        yield f"{mix.kind('LDS.32', 'LDS.64', 'LDS.128')} operand reads are not ldmatrix"
    if not mix.count("async copies"):
        yield f"no asynchronous copies, {mix.count('global loads')} loads through registers"


# Showing it


def table_of(rows: Sequence[InspectedKernel]) -> Table:
    """A line per kernel."""
    table = new_table(
        ("operator", "board", "code for"),
        ("loop", "bytes", "multiply-adds", "integer", "regs", "shared B", "spills"),
        ("shared loads", "global loads, async copies"),
        ("conflicts", "assumed", "found"),
    )
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: InspectedKernel) -> Iterator[str]:
    inspection, hot = row.found, row.found.hot
    mix, model = hot.mix, inspection.model
    yield row.operator
    yield row.board
    yield inspection.architecture + (f" for {inspection.in_place_of}" if inspection.in_place_of else "")
    yield str(mix.total) if hot.loop else f"{mix.total}, none"
    yield str(hot.code_bytes)
    yield f"{100 * mix.share('multiply-adds'):.1f}%"
    yield f"{100 * mix.share('integer'):.1f}%"
    yield str(inspection.registers)
    yield str(inspection.shared_bytes)
    yield str(row.spills)
    yield _kinds(mix.kinds.get("shared loads", {}))
    yield _kinds({**mix.kinds.get("global loads", {}), **mix.kinds.get("async copies", {})})
    yield "-" if model is None or not model.banks else f"{max(use.conflicts for use in model.banks):.2g}"
    yield "-" if model is None or model.assumed is None else f"{model.assumed.total:.2f}"
    yield "-" if model is None or model.found is None else f"{model.found.total:.2f}"


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in counts.items()) or "-"


def summary(rows: Sequence[InspectedKernel]) -> Iterator[str]:
    """Densities over all kernels, and every shortfall."""
    ratios = [
        row.found.model.assumed.total / row.found.model.found.total
        for row in rows
        if row.found.model is not None and row.found.model.assumed is not None and row.found.model.found is not None
    ]
    if ratios:
        off = statistics.geometric_mean(max(ratio, 1 / ratio) for ratio in ratios)
        yield (
            f"instructions per arithmetic one: assumed over found {statistics.geometric_mean(ratios):.2f} in the "
            f"geometric mean of {len(ratios)} kernels, apart by a factor of {off:.2f}"
        )
    yield f"{sum(bool(row.spills) for row in rows)} of {len(rows)} kernels use local memory"
    for row in rows:
        for reason in shortfalls(row):
            yield f"{row.operator} on {row.board}: {reason}"


@click.command()
@click.option("--suite", type=click.Choice((*FEW, *suite_names())), default="kinds", show_default=True)
@click.option("--device", "boards", multiple=True, metavar="NAME", help="Only for this board; may be repeated.")
@click.option("--arch", "architecture", default=None, metavar="sm_NN", help="Compile the sources for this one instead.")
@click.option("--name", "names", multiple=True, help="Only these operators; may be repeated.")
@click.option("--search", "method", type=click.Choice(["roller", "sokoban", "both"]), default="both", show_default=True)
@click.option("--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Processes that compile.")
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per kernel on stdout.")
def main(
    suite: str,
    boards: tuple[str, ...],
    architecture: str | None,
    names: tuple[str, ...],
    method: str,
    jobs: int,
    as_json: bool,
) -> None:
    """Disassemble rank 1 of a suite's operators and compare with what the model assumed."""
    rows: list[InspectedKernel] = []
    try:
        expressions = [operator_from_data(data) for data in FEW[suite]] if suite in FEW else _of_suite(suite)
        chosen = [expr for expr in expressions if not names or expr.name in names]
        if not chosen:
            raise InputError("--name", f"none of {', '.join(names)} is in {suite}", f"try {expressions[0].name}")
        for board in boards or BOARDS:
            for row in rows_of(chosen, board, architecture, jobs, method):
                rows.append(row)
                if as_json:
                    click.echo(json_line(row.found))
    except InputError as error:
        raise click.ClickException(str(error)) from error
    if not as_json:
        Console(width=230, highlight=False).print(table_of(rows))
        for line in summary(rows):
            click.echo(line)


def _of_suite(suite: str) -> list[TensorExpr]:
    return load_operators(suite_path(suite))


if __name__ == "__main__":
    main()
