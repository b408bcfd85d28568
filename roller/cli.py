"""The command line. The library raises InputError; :mod:`hal.support.command_line` prints it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from hal.support.command_line import CONTEXT, Program
from hal.support.errors import InputError
from roller.command.cache import cache_command
from roller.command.compare import compare_command
from roller.command.doctor import doctor_command
from roller.command.microbench import microbench_command
from roller.command.options import (
    algorithms_option,
    check_compilable,
    check_out,
    check_readable,
    device_option,
    kernel_pool,
    progress,
    search_option,
)
from roller.profile.command import profile_command


@click.group("roller", cls=Program, context_settings=CONTEXT)
def main() -> None:
    """Kernels constructed from a model of the hardware, and how long they take."""


@main.command("devices")
@click.argument("name", required=False)
@click.option("--json/--no-json", "as_json", default=False, help="The spec as JSON.")
def devices_command(name: str | None, as_json: bool) -> None:
    """List the known boards and nodes of several, or show one of them (a name, or a board's spec file)."""
    from hal.support.tables import print_line, print_table
    from roller.command.tables import LESS_OF_DEVICES, LESS_OF_NODES, device_list, device_page, node_list, node_page

    if name is None:
        print_table(device_list(), LESS_OF_DEVICES)
        print_line("")
        print_table(node_list(), LESS_OF_NODES)
        return
    from hal.catalog import load_device
    from hal.node_catalog import is_node, load_node

    node = load_node(name) if is_node(name) else None
    spec = node or load_device(name)
    if as_json:
        import msgspec

        click.echo(msgspec.json.format(msgspec.json.encode(spec), indent=2))
    elif node is not None:
        node_page(node)
    else:
        device_page(load_device(name))


@main.command("compile")
@click.argument("file", type=click.Path(path_type=Path))
@device_option
@click.option("--top-k", type=click.IntRange(1, 100), default=10, show_default=True, help="Kernels per operator.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out"), show_default=True, help="Where to write.")
@click.option("--jobs", type=click.IntRange(1, 256), default=None, help="Processes that compile.  [default: all cores]")
@click.option(
    "--verify",
    type=click.IntRange(0, 100),
    default=1,
    show_default=True,
    help="How many kernels, from rank 1 down, to run against the reference.",
)
@search_option
@algorithms_option
@click.option(
    "--cache/--no-cache",
    "cached",
    default=True,
    envvar="ROLLER_CACHE",
    show_default=True,
    show_envvar=True,
    help="Keep and reuse finished kernels (roller cache).",
)
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per operator on stdout.")
def compile_command(
    file: Path,
    device_name: str,
    *,
    top_k: int,
    out: Path,
    jobs: int | None,
    verify: int,
    method: str,
    algorithms: str | None,
    cached: bool,
    as_json: bool,
) -> None:
    """Compile the operators of FILE: ranked kernels, their sources, binaries and a manifest each.

    A kernel that fails its verification is struck out, and the next one takes its rank. Exit code 1 when an operator
    has no kernel left; nothing is written for it.
    """
    start = time.perf_counter()
    with kernel_pool(jobs) as pool:
        # The processes load TVM meanwhile.
        from hal.catalog import load_device
        from roller.command.compile import CompileRequest

        device = load_device(device_name)
        check_compilable(device)
        check_out(out)
        check_readable(file)
        request = CompileRequest(
            file=file, device=device, out=out, top_k=top_k, verify=verify, method=method, algorithms=algorithms,
            cached=cached, as_json=as_json, start=start,
        )  # fmt: skip
        if cached and request.show_stored():
            return
        finished, without = request.build(pool)
    if cached:
        request.keep(finished, is_whole=not without)
    from roller.command.tables import print_compiled, struck_out_lines

    if finished and not as_json:
        print_compiled(finished, device, time.perf_counter() - start)
    for line in struck_out_lines([compiled for compiled, _ in finished]):
        click.echo(f"roller compile: {line}", err=True)
    for compiled in without:
        click.echo(f"roller compile: {compiled.expr.name}: {compiled.error}; nothing was written for it", err=True)
    if without:
        sys.exit(1)


@main.command("verify")
@click.argument("file", type=click.Path(path_type=Path))
@device_option
@click.option("--top-k", type=click.IntRange(1, 100), default=3, show_default=True, help="Schedules per operator.")
@click.option(
    "--engine",
    type=click.Choice(["emulator", "opencl", "native"]),
    default=None,
    help="Run the CUDA text itself, thread by thread, every access checked (needs g++), or the schedule's OpenCL twin; "
    "kernels for processors run as they are.  [default: emulator, without g++ opencl; native]",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Orders of threads, warps and blocks in which the emulator runs a kernel.",
)
@search_option
@algorithms_option
@click.option("--jobs", type=click.IntRange(1, 256), default=None, help="Processes that verify.  [default: all cores]")
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per operator on stdout.")
def verify_command(
    file: Path,
    device_name: str,
    *,
    top_k: int,
    engine: str | None,
    seeds: int,
    method: str,
    algorithms: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Run the best programs of every operator in FILE, cut down to a few tiles, against a float64 reference.

    Exit code 1 when one disagrees or could not run.
    """
    from hal.catalog import load_device

    device = load_device(device_name)
    check_readable(file)
    with kernel_pool(jobs) as pool:
        from codegen.target import Target
        from codegen.verify.engines import fallback_reason
        from roller.algorithms import parse_algorithms
        from roller.command.tables import print_verified, verified_json
        from roller.compile.pipeline import verify_operators
        from sokoban.language.operators import load_operators

        missing = fallback_reason(Target.of(device).generator) if engine is None else ""
        if missing:
            click.echo(
                f"roller verify: {missing}: OpenCL runs the kernels, which shows no races; install g++ 12", err=True
            )
        expressions = load_operators(file)
        results = []
        with progress(len(expressions), show=not as_json, what="verifying") as advance:
            checked = verify_operators(
                expressions,
                device,
                top_k=top_k,
                pool=pool,
                engine=engine,
                order_seeds=range(seeds),
                method=method,
                algorithms=parse_algorithms(algorithms),
            )
            for name, checks in checked:
                results.append((name, checks))
                if as_json:
                    click.echo(verified_json(name, device, checks))
                advance(name)
    if not as_json:
        print_verified(results)
    if not all(check.passed for _, checks in results for check in checks):
        sys.exit(1)


@main.command("explain")
@click.argument("file", type=click.Path(path_type=Path))
@device_option
@click.option("--name", "operator", default=None, help="One operator of the list.")
@click.option("--rank", type=click.IntRange(1, 100), default=1, show_default=True, help="Which program.")
@click.option(
    "--top-k", type=click.IntRange(1, 100), default=10, show_default=True, help="How many to compare it with."
)
@search_option
@algorithms_option
@click.option(
    "--plot",
    "picture",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Also draw stage times and roofline of one operator into this file (png, svg or pdf; needs matplotlib).",
)
def explain_command(
    file: Path,
    device_name: str,
    operator: str | None,
    rank: int,
    top_k: int,
    method: str,
    algorithms: str | None,
    picture: Path | None,
) -> None:
    """Tell how the programs of FILE's operators were found and what limits them."""
    from hal.catalog import load_device
    from hal.support.tables import print_line
    from roller.algorithms import DIRECT, parse_algorithms
    from roller.explain.page import explain
    from roller.programs import find_programs, form_on
    from sokoban.language.operators import load_operators

    device, kinds = load_device(device_name), parse_algorithms(algorithms)
    check_readable(file)
    expressions = load_operators(file)
    if operator is not None:
        named = [expr for expr in expressions if expr.name == operator]
        if not named:
            raise InputError("--name", f"{operator!r} is not in {file}", f"try {expressions[0].name}")
        expressions = named
    if picture is not None:
        from roller.explain.picture import check_plot

        check_plot(picture)
        if expressions[0].launch_size is not None:
            raise InputError("--plot", "draws operators whose sizes are all numbers", "give all sizes numbers")
        if len(expressions) > 1:
            raise InputError("--plot", f"draws one operator, {file} has {len(expressions)}", "pick one with --name")
    for expr in expressions:
        if expr.launch_size is not None:
            from roller.explain.launch_sizes import explained
            from roller.sizes import SizedPrograms

            sized = SizedPrograms.of(expr, device, method, kinds)
            for line in explained(sized, sized.rule()):
                print_line(line)
            continue
        programs = find_programs(form_on(expr, device), device, max(top_k, rank), method, kinds)
        ranked = programs.ranked(max(top_k, rank), kinds)
        if rank > len(ranked):
            raise InputError("--rank", f"{expr.name} has {len(ranked)} programs", "ask for one of those")
        chosen = ranked[rank - 1]
        if picture is not None and chosen.algorithm != DIRECT:
            problem = f"rank {rank} of {expr.name} is {chosen.policy}; the picture shows single kernels of tiles"
            raise InputError("--plot", problem, "add --algorithms direct, or leave --plot out")
        for line in explain(programs, rank, ranked).split("\n"):
            print_line(line)
        if picture is not None:
            from roller.explain.picture import plot

            plot(programs, picture, 1 + [*map(id, programs.direct)].index(id(chosen)))


@main.command("score")
@click.argument("file", type=click.Path(path_type=Path))
@device_option
@click.option(
    "--schedules",
    required=True,
    type=click.Path(path_type=Path),
    help="One schedule a line, or a list (JSON); or configurations of CLBlast, Triton, CUTLASS or Kernel Tuner.",
)
@click.option("--name", "operator", default=None, help="One operator of the list.")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Lines of the table.")
@click.option("--ranked/--no-ranked", default=False, help="The fastest first, instead of the order of the file.")
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per schedule on stdout.")
def score_command(
    file: Path, device_name: str, schedules: Path, operator: str | None, limit: int, ranked: bool, as_json: bool
) -> None:
    """Predict the times of schedules that you made for the operator of FILE, or another tuner did, in their order."""
    from hal.catalog import load_device
    from roller.estimate.schedules import file_order, json_lines, one_operator, score_file, score_table, summary
    from sokoban.language.operators import load_operators

    device = load_device(device_name)
    check_readable(file)
    expr = one_operator(load_operators(file), operator, str(file))
    scores = score_file(schedules, expr, device)
    order = file_order(scores, ranked=ranked)
    if as_json:
        click.echo(json_lines(scores, order), nl=False)
        return
    from hal.support.tables import print_line, print_table

    print_table(score_table(scores, limit, order), drop=("shared B", "scratch B", "waves", "regs", "blocks/unit"))
    print_line(summary(scores, expr, limit))


@main.command("estimate")
@click.argument("file", type=click.Path(path_type=Path))
@device_option
@click.option(
    "--implementation",
    type=click.Choice(["best", "library"]),
    default="best",
    show_default=True,
    help="Our best kernel, or what cuBLAS, cuDNN and PyTorch launch.",
)
@click.option(
    "--direction",
    type=click.Choice(["forward", "backward"]),
    default="forward",
    show_default=True,
    help='Of operators without a "direction" of their own.',
)
@click.option(
    "--search",
    "method",
    type=click.Choice(["roller", "sokoban", "both"]),
    default="both",
    show_default=True,
    help="Who finds the best kernel: construction (some ms per operator), exhaustive search (some 100 ms), or both.",
)
@algorithms_option
@click.option("--node", default=None, metavar="NAME|FILE", help="Where collectives run.  [default: the board's usual]")
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per operator on stdout.")
def estimate_command(
    file: Path,
    device_name: str,
    *,
    implementation: Any,
    direction: Any,
    method: str,
    algorithms: str | None,
    node: str | None,
    as_json: bool,
) -> None:
    """Predict how long the operators of FILE take: one a line, a JSON list, or a single one."""
    from hal.catalog import load_device
    from roller.algorithms import parse_algorithms
    from roller.estimate.operators import estimate_items, estimate_table, json_lines, load_items, summary

    device, kinds = load_device(device_name), parse_algorithms(algorithms)
    check_readable(file)
    results = estimate_items(load_items(file, direction), device, implementation, method, kinds, node)
    if as_json:
        click.echo(json_lines(results), nl=False)
        return
    from hal.support.tables import print_line, print_table

    print_table(estimate_table(results, device.teu.lane), drop=("found by", "direction", "schedule"))
    print_line(summary(results, device, implementation))


@main.command("inspect")
@click.argument("kernel", type=click.Path(path_type=Path))
@click.option("--rank", type=click.IntRange(1, 100), default=None, help="Which kernel of a bundle.  [default: 1]")
@click.option("--arch", "architecture", default=None, metavar="sm_NN", help="Compile the source again for this one.")
@click.option("--listing/--no-listing", default=False, help="Also print the machine code of the hottest loop.")
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per kernel on stdout.")
def inspect_command(kernel: Path, rank: int | None, architecture: str | None, listing: bool, as_json: bool) -> None:
    """Disassemble KERNEL, a bundle's folder, a .cu or a .cubin: what its hottest loop consists of. Of a bundle for
    processors the assembly is read."""
    from roller.inspect.cpu import cpu_json, cpu_text, inspect_cpu, is_cpu_bundle

    if is_cpu_bundle(kernel):
        if architecture is not None or listing:
            option = "--listing" if listing else "--arch"
            raise InputError(option, "is for GPU kernels", "leave it out; the whole assembly lies in the bundle")
        assembly = inspect_cpu(kernel, rank)
        click.echo(cpu_json(assembly) if as_json else cpu_text(assembly))
        return
    from roller.inspect.inspection import inspect_path
    from roller.inspect.page import inspection_text, json_line

    for inspection in inspect_path(kernel, rank, architecture):
        click.echo(json_line(inspection) if as_json else inspection_text(inspection, listing=listing), nl=as_json)


@main.command("schema")
@click.argument("kind", type=click.Choice(["operator", "device", "manifest", "schedule"]))
def schema_command(kind: str) -> None:
    """Print the JSON Schema of operator files, device files, manifests or schedules."""
    from roller.command.schemas import schema_text

    click.echo(schema_text(kind), nl=False)


main.add_command(cache_command)
main.add_command(compare_command)
main.add_command(doctor_command)
main.add_command(microbench_command)
main.add_command(profile_command)


__all__ = ["main"]

if __name__ == "__main__":
    main()
