"""The command line of Daydream; :mod:`hal.support.command_line` prints its errors and chooses exit codes."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from daydream.command.diff import diff_command, schema_command
from daydream.command.merge import merge_command
from daydream.command.optimize import optimize_command
from daydream.command.outputs import print_json, warn, write_html, write_timeline_file
from daydream.command.place import place_command
from daydream.command.plan import plan_command
from daydream.command.predict import predict_command
from daydream.command.recording import Recording, recording_options, rows_option
from daydream.command.serve import serve_command
from daydream.command.sweep import sweep_command
from hal.support.command_line import CONTEXT, Program
from hal.support.errors import InputError

if TYPE_CHECKING:
    from daydream.answers import Replay
    from daydream.graph.simulate import Timeline
    from daydream.memory.recorded import RecordedMemory
    from daydream.report.analysis import Analysis
    from daydream.report.timeline import Counter
    from daydream.whatif import AppliedPass


@click.group("daydream", cls=Program, context_settings=CONTEXT)
def main() -> None:
    """What-if questions on a training step, answered from one PyTorch-profiler trace."""


@main.command("report")
@partial(recording_options, required=False)
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path),
    default=None,
    help="In place of TRACE: a line for every trace in a folder and those below it.",
)
@rows_option()
@click.option(
    "--device",
    default="auto",
    show_default=True,
    help="The board whose peaks FLOPs are compared with; auto: that recorded on.",
)
@click.option(
    "--batch", type=click.IntRange(1), default=None, help="Samples per step; by default, what the trace says."
)
def report_command(
    recording: Recording, *, folder: Path | None, as_json: bool, rows: int, device: str, batch: int | None
) -> None:
    """Tell where the time of TRACE goes: CPU and GPU, critical path, phases, layers, kernels, idle, utilisation.

    TRACE is a file of PyTorch's profiler, of nsys export --type sqlite, of rocprofv3 (JSON, rocpd) or of RPD.
    """
    if recording.trace is None or folder is not None:
        from daydream.command.survey import survey_folder

        survey_folder(recording, folder, as_json=as_json)
        return
    before = recording.replay().analysis(rows=rows, recorded=True, device=device, batch=batch)
    memories = _memories(before.timeline)
    if as_json:
        from daydream.memory.report import memory_record
        from daydream.report.analysis import report_record

        memory = [memory_record(each, before.steps, rows) for each in memories]
        warnings = list(before.timeline.graph.warnings)
        print_json({"trace": str(recording.trace), **report_record(before), "memory": memory, "warnings": warnings})
    else:
        from daydream.memory.report import print_memory
        from daydream.report.tables import print_report, print_steps
        from hal.support.tables import print_line

        print_steps(before, _partial(before))
        print_line()
        print_report(before, rows)
        for each in memories:
            print_line()
            print_memory(each, before.steps, rows)
        warn(before.timeline.graph)
    write_timeline_file(recording.out, before.timeline, "simulated", lambda: _counters(before.timeline))
    if recording.html is not None:
        from daydream.memory.report import memory_section

        write_html(recording.html, before, more=memory_section(memories, before.steps))


@main.command("simulate")
@recording_options
def simulate_command(recording: Recording, *, as_json: bool) -> None:
    """Replay TRACE as it was recorded, and compare each step with what was measured."""
    answer, html = recording.replay(), recording.html
    if as_json:
        print_json({"trace": str(recording.trace), **_replay_record(answer)})
    analysis = answer.analysis(recorded=True) if html is not None or not as_json else None
    if analysis is not None and not as_json:
        from daydream.report.tables import print_steps
        from hal.support.tables import print_line

        print_steps(analysis, _partial(analysis))
        edges = len(answer.graph.edge_source)
        print_line(f"{len(answer.graph)} tasks, {edges} dependenc{'y' if edges == 1 else 'ies'} between threads")
        warn(answer.graph)
    write_timeline_file(recording.out, answer.timeline, "simulated", lambda: _counters(answer.timeline))
    if html is not None and analysis is not None:
        write_html(html, analysis)


def _replay_record(answer: Replay) -> dict[str, Any]:
    """The answer of ``simulate --json``: errors are shares of the measured time, over the full steps."""
    from daydream.report.analysis import seconds

    graph, timeline, steps = answer.graph, answer.timeline, answer.steps

    def record(index: int) -> dict[str, Any]:
        step, simulated = graph.steps[index], float(timeline.step_us[index])
        lengths = {"measured_seconds": seconds(step.measured_us), "simulated_seconds": seconds(simulated)}
        return {"name": step.name, **lengths}

    measured = {index: graph.steps[index].measured_us for index in steps}
    errors = [
        abs(float(timeline.step_us[index]) / length - 1)
        for index, length in measured.items()
        if length and math.isfinite(length)
    ]
    partial = [index for index, step in enumerate(graph.steps) if not step.full and index not in steps]
    return {
        "steps": [record(index) for index in steps],
        "partial_steps": [record(index) for index in partial],
        "mean_error": round(sum(errors) / len(errors), 6) if errors else None,
        "worst_error": round(max(errors), 6) if errors else None,
        "tasks": len(graph),
        "warnings": list(graph.warnings),
    }


@main.command("whatif")
@recording_options
@click.option(
    "--pass",
    "passes",
    multiple=True,
    required=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="A pass (daydream passes), or FILE.py[:FUNCTION][:KEY=VALUE,...]; repeat it to apply several in order.",
)
@rows_option()
def whatif_command(recording: Recording, *, passes: tuple[str, ...], as_json: bool, rows: int) -> None:
    """Predict the step time of TRACE after changes."""
    from daydream.whatif import parse_pass

    requests = [parse_pass(text) for text in passes]
    baseline = recording.replay()
    from daydream.answers import predict

    prediction = predict(baseline, requests)
    before, after = baseline.analysis(rows=rows), prediction.after.analysis(rows=rows)
    if as_json:
        warnings = list(dict.fromkeys([*baseline.graph.warnings, *prediction.after.graph.warnings]))
        record = {"trace": str(recording.trace), **_prediction_record(before, after)}
        print_json({**record, "passes": _pass_records(prediction.applied), "warnings": warnings})
    else:
        from daydream.report.tables import print_whatif

        print_whatif(before, after, prediction.applied)
        warn(prediction.after.graph)
    write_timeline_file(recording.out, after.timeline, "predicted")
    if recording.html is not None:
        write_html(recording.html, before, after, prediction.applied)


def _prediction_record(before: Analysis, after: Analysis) -> dict[str, Any]:
    """The answer of ``whatif --json``: means over the steps, then each of them."""
    from daydream.report.analysis import compared, critical_record, ratio, seconds

    graph = before.timeline.graph

    def record(measured: float, old: Any, new: Any, old_us: float, new_us: float) -> dict[str, Any]:
        return {
            "measured_seconds": seconds(measured),
            "baseline_seconds": seconds(old_us),
            "predicted_seconds": seconds(new_us),
            "speedup": round(ratio(old_us, new_us), 6) if new_us else None,
            "bottleneck": new.bottleneck.label,
            "baseline_bottleneck": old.bottleneck.label,
            "critical_path_seconds": critical_record(new.critical_us),
        }

    comparison = compared(before, after)
    lengths = zip(comparison.before_us.tolist(), comparison.after_us.tolist(), strict=True)
    pairs = list(zip(before.step_times, after.step_times, lengths, strict=True))
    return {
        **record(before.measured_us, before, after, *comparison.means_us),
        "baseline_sustained_seconds": seconds(before.timeline.sustained_us),
        "predicted_sustained_seconds": seconds(after.timeline.sustained_us),
        "steps": [
            {
                "name": old.name,
                **record(graph.steps[old.index].measured_us, old, new, *each),
            }
            for old, new, each in pairs
        ],
    }


def _pass_records(applied: Sequence[AppliedPass]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "parameters": each.parameters,
            "notes": list(each.notes),
            **({} if each.memory_bytes is None else {"memory_bytes": dict(each.memory_bytes)}),
        }
        for each in applied
    ]


@main.command("passes")
@click.argument("name", required=False)
@click.option("--json/--no-json", "as_json", default=False, help="One JSON object per pass on stdout.")
def passes_command(name: str | None, as_json: bool) -> None:
    """List the what-if passes with their parameters, or explain one of them."""
    from daydream.passes import registered
    from daydream.whatif import describe, find_pass

    chosen = list(registered().values()) if name is None else [find_pass("NAME", name)]
    if as_json:
        for each in chosen:
            print_json(describe(each))
    elif name is not None:
        from daydream.report.tables import print_pass

        print_pass(chosen[0])
    else:
        from daydream.report.tables import print_passes

        print_passes(chosen)


@main.command("operators")
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write (.json), as roller compile takes it.",
)
@click.option("--fuse/--no-fuse", default=True, show_default=True, help="Runs of calls as one operator, or each alone.")
@click.argument("trace", type=click.Path(path_type=Path))
def operators_command(out: Path, fuse: bool, trace: Path) -> None:
    """Write the operators of TRACE that compiled kernels can replace, equal ones once.

    Of a recording of the CPU, runs of calls that one kernel can compute; of a GPU's, or of a prediction (daydream
    predict --out), every call by itself.
    """
    import msgspec

    from daydream.operators.pricing import device_operators
    from daydream.passes.kernels.replace_operator import replaceable
    from daydream.tasks.build import read_graph
    from hal.support.atomic import write_atomic

    graph = read_graph(trace)
    operators = device_operators(graph) if graph.on_gpu.any() else replaceable(graph, fuse=fuse)
    if not operators:
        raise InputError(str(trace), "holds no such operator with its input sizes", "record with shapes")
    try:
        write_atomic(out, msgspec.json.format(msgspec.json.encode(operators), indent=1) + b"\n")
    except OSError as error:
        raise InputError(str(out), f"cannot be written: {error.strerror or error}") from None
    click.echo(f"{len(operators)} operators written to {out}", err=True)


for _command in (
    predict_command, sweep_command, plan_command, serve_command, optimize_command, merge_command, place_command,
    diff_command, schema_command,
):  # fmt: skip
    main.add_command(_command)


@main.command("record", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The trace to write.")
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Training steps to record.")
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True, help="Steps to let pass before.")
@click.option(
    "--timed", type=click.IntRange(0), default=0, show_default=True, help="Steps to time behind them, unrecorded."
)
@click.option("--batch", type=click.IntRange(1), default=None, help="Batch size, kept with the trace.")
@click.option("--stack/--no-stack", default=False, help="Also record Python's call stacks.")
@click.option("--modules/--no-modules", default=True, show_default=True, help="Also record which module runs.")
@click.option("--memory/--no-memory", default=False, help="Also record what is allocated and freed.")
@click.option("--stop/--no-stop", default=True, show_default=True, help="End the script after the last recorded step.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def record_command(
    *,
    out: Path,
    steps: int,
    warmup: int,
    timed: int,
    batch: int | None,
    stack: bool,
    modules: bool,
    memory: bool,
    stop: bool,
    script: Path,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT with its ARGUMENTS under the profiler, and write a trace of some of its training steps.

    The exit code is the script's own.
    """
    from daydream.record.record import record_script

    done = record_script(
        out,
        script,
        arguments,
        steps=steps,
        warmup=warmup,
        timed=timed,
        batch=batch,
        with_stack=stack,
        with_modules=modules,
        memory=memory,
        stop=stop,
    )
    if done.note:
        click.echo(f"daydream: {done.note}", err=True)
    if done.path is not None:
        click.echo(f"{done.steps} step{'' if done.steps == 1 else 's'} recorded in {done.path}", err=True)
    sys.exit(done.exit_code or (0 if done.path is not None else 1))


# What the commands share


def _memories(timeline: Timeline) -> Sequence[RecordedMemory]:
    """Memory events of the recording; as a rule there are none."""
    trace = timeline.graph.trace
    if trace is None or trace.memory is None:
        return ()
    from daydream.memory.recorded import recorded_memory

    return recorded_memory(trace)


def _counters(timeline: Timeline) -> Sequence[Counter]:
    from daydream.memory.report import memory_counters

    return memory_counters(_memories(timeline), timeline)


def _partial(analysis: Analysis) -> list[str]:
    steps = analysis.timeline.graph.steps
    return [step.name for i, step in enumerate(steps) if not step.full and i not in analysis.steps]


__all__ = ["main"]

if __name__ == "__main__":
    main()
