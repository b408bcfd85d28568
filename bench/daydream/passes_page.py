"""The page docs/passes.md: ``python -m bench.daydream.passes_page TRACES > docs/passes.md``.

What each pass assumes (its docstring), what it changed in recorded training steps (its notes) and what came out.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

import click

from daydream.graph.graph import TaskGraph
from daydream.graph.simulate import simulate
from daydream.memory.attached import with_memory
from daydream.passes import Parameter, WhatIf, registered
from daydream.tasks.build import read_graph
from hal.support.errors import InputError

TRACES = {
    "resnet50": "resnet50_v100_nw0.pt.trace.json.gz",
    "ns_resolution": "ns_resolution_v100.pt.trace.json.gz",
    "trace_diff": "trace_diff_control_a100.pt.trace.json.gz",
}
WIDTH = 120

HEAD = """\
# The passes of Daydream

Each pass turns the dependency graph of a recorded step into the one that an optimization would leave. This page says
for each what it assumes, what it changed in three recorded trainings, and what came out. It is made by
`python -m bench.daydream.passes_page TRACES`; `daydream passes NAME` prints the assumptions on the command line.

- **resnet50**: ResNet-50, batch 32, on a V100; data loaded in the main process, SGD kernel by kernel. The CPU holds it
  back: loading takes 60 ms of a step, then launches; the GPU works 101 of 176 ms.
- **ns_resolution**: a ResNet in DDP with one rank, on a V100; SGD over lists of tensors. The GPU holds it back; the CPU
  runs ahead until the launch queue of 1022 is full.
- **trace_diff**: a recommendation model, rank 3 of 8, on an A100 with TF32; embeddings, all-to-all, fused Adam. The CPU
  holds it back, which launches many small kernels.

Times are of a step, in ms: the mean time between the completions of steps. *GPU* is what the tasks on streams take
together. The simulated baseline reproduces every recorded step within 0.1 %. The truth after these
optimizations was not recorded, so the tables show what the models say, not how right they are; **Checked** says for
each pass whether its answers were compared with a measurement elsewhere. Bytes are those of resnet50, whose recording
has allocations.
"""

COMMENTS: dict[str, str] = {
    "accumulate": "Four launches of everything are worse than smaller kernels are good where the CPU holds a step back."
    " resnet50 would hold 1.0 GB in place of 3.1.",
    "offload": "The states of resnet50's SGD go and come within the time that the step waits for data anyway. Maps over"
    " a PCIe 3.0 take longer than the GPU works on them, as with vDNN below. ns_resolution was recorded without sizes.",
    "rebucket": "It is for ranks that exchange by gloo, which these do not: see"
    " [many ranks](ranks.md#real-ranks-on-gloo).",
    "recompute": "A forward pass more but for its last eighth, launches included: resnet50 would hold 1.1 GB in place"
    " of 3.1, and take a third longer.",
    "amp": "Both CPU-bound traces gain nothing: their GPU time falls to less than half, and the step still waits"
    " for the CPU, which now launches casts, too, and waits for the scaler. That is the thesis's own "
    "finding for BERT (figure 4.6), and why its predictions were below 2x throughout. On ns_resolution "
    "the step falls until its launches become the limit.",
    "backend": "Such prices stand layer by layer in [repricing.md](repricing.md): `implementation=best` next to"
    " `library`. Networks that ran with the backend are in [torch-compile.md](torch-compile.md).",
    "bandwidth": "Only trace_diff communicates: its exchanges at twice the rate take 5 % off the step, as far as"
    " nothing else holds it up.",
    "blueconnect": "After `ddp` with 32 workers at 1.25 GB/s, where a flat ring is the limit, 8 workers a machine"
    " with 150 GB/s between them take nearly all of the exchange off the network.",
    "cuda-graphs": "What remains of resnet50 is its GPU time: without launches there is nothing else, for data"
    " loading overlaps the replay. ns_resolution is bound by the GPU already. trace_diff waits for the host inside"
    " its step, so that it takes a dozen graphs.",
    "dataloader": "The prediction that can be checked: the same training with four workers was run, and its recording"
    " was not at hand when this was written. See below.",
    "ddp": "Wait-free backpropagation hides 8 workers at 12.5 GB/s on resnet50 and nearly so on ns_resolution."
    " On trace_diff the recorded all-reduces get the formula's time.",
    "dgc": "After `ddp` at 1.25 GB/s among 32 workers: a hundredth of the elements from each, with their indices,"
    " gathered from all: a third of the time; and kernels to find them.",
    "fp8": "It is for steps in mixed precision on boards of sm_89 or newer, which these are not. Prices of products and"
    " of what quantises for them are those of [accuracy.md](accuracy.md#eight-and-four-bits-and-experts).",
    "fsdp": "It is for ranks that exchange by gloo, which these do not: see [many ranks](ranks.md#real-ranks-on-gloo).",
    "fused-optimizer": "483 kernels a step of SGD on resnet50 keep the CPU busy for 19 ms and the GPU for 1.3 ms; one"
    " kernel ends that. The other two optimizers work on lists of tensors already.",
    "gist": "An overhead: encoding and decoding behind ReLUs. resnet50's CPU-bound step hides most of it.",
    "gpu-scale": "A GPU twice as fast halves only the GPU-bound trace.",
    "metaflow": "The policy halves convolutions and removes ReLUs, to show the mechanism; it is not a real policy."
    " trace_diff has no such layers, which is an error, not a silent nothing.",
    "p3": "Against the plain parameter server (`slice-mb=0,priority=no`), not against one worker: slices and"
    " priorities bring the step close to what the link alone needs.",
    "pointwise-fusion": "Two thirds of trace_diff's and four fifths of resnet50's launches go. The default counts"
    " on recomputing what the backward pass needs; `keep-intermediates=yes` writes it as today.",
    "port": "The CPU holds back resnet50 and trace_diff, so that a faster board gains nothing there. ns_resolution was"
    " recorded without sizes, so that all its kernels follow wave scaling by their names. How right ported times are is"
    " measured in [accuracy.md](accuracy.md#ported-to-another-board): from a V100, whole steps are 6.2 % off on a P100"
    " and 7.4 % on an A100, single calls 7.6 and 14.9 % (10.3 % where the A100 had raised its clock).",
    "remove": "Every ReLU kernel gone with its launch, then with its operator's host time as well: the latter is the"
    " upper bound of what fusing them could bring.",
    "replace-kernel": "See [repricing.md](repricing.md) for the prices layer by layer. Most of the gain in resnet50's"
    " CPU-bound step is from launches: one kernel where cuDNN took up to five.",
    "replace-operator": "It is for steps that run on the CPU, which these are not: see"
    " [kernels on a CPU](daydream.md#kernels-of-ours-on-a-cpu).",
    "restructure-batchnorm": "ns_resolution gains 12.6 %; the thesis predicted 12.7 % for DenseNet-121 and measured"
    " 7 %, because it knew nothing of the slower convolutions that take the work over. Neither does this pass.",
    "scale": "Convolutions at half their time, a question in the style of COZ (4.7).",
    "unprofiled": "Traces of `daydream record --timed` hold what it needs, and these do not: see"
    " [kernels on a CPU](daydream.md#kernels-of-ours-on-a-cpu).",
    "vdnn": "Maps of 1365 MB a step at 12 GB/s take 114 ms each way: longer than the GPU works on them. vDNN trades"
    " time for memory, and this says how much.",
}


#: Passes whose answers were compared with measurements: with which, and what came out.
CHECKED: dict[str, str] = {
    "accumulate": "Yes, on a CPU: three networks trained on one core, predicted from plain recordings"
    ": times within 5.7 %, peaks within 1.4 %. Without a measurement:"
    " what kernels take at a quarter of the batch is within 0.6 % of two models captured at that batch.",
    "amp": "On a T4, a perceptron recorded before and after: 5.88 ms of GPU a step, predicted 2.85, measured "
    "2.83; products 3.95, predicted 0.62, measured 0.76. Bytes at the peak are within 1.2 % of ResNet-50 "
    "and a vision transformer captured under autocast.",
    "ddp": "Not here. The thesis found whole steps within 10 % (4.6.5) where `interference` is what its figure 4.9"
    " measured, 34 %; that is the default.",
    "fsdp": "Yes, with two and four ranks on gloo, from a recording of DDP on two: within 4.5 %"
    " ([many ranks](ranks.md#real-ranks-on-gloo)).",
    "port": "Yes: see [accuracy.md](accuracy.md#ported-to-another-board).",
    "rebucket": "Yes, with other buckets and two and four ranks on gloo, from a recording of two: within 3.7 %"
    " ([many ranks](ranks.md#real-ranks-on-gloo)).",
    "recompute": "Yes, on a CPU: three networks trained on one core with `torch.utils.checkpoint`, predicted from plain"
    " recordings: times within 4.7 %, peaks within 2.5 %. Without a measurement:"
    " to the byte at the peak what ResNet-50, a vision transformer and a mixer hold when captured with checkpoints.",
    "replace-kernel": "Its prices, yes: see [repricing.md](repricing.md). Whole steps with other kernels, no.",
    "replace-operator": "Yes, on a CPU: steps of two networks within 6 %"
    " ([kernels on a CPU](daydream.md#kernels-of-ours-on-a-cpu)).",
    "restructure-batchnorm": "Not here. The thesis predicted 12.7 % and measured 7 % (4.6.4).",
    "unprofiled": "Its result is what was timed, by definition.",
}

UNCHECKED = "Not against a measurement."


@dataclass(frozen=True)
class Case:
    """A call of a pass, with the passes before it: names and parameters as on the command line."""

    text: str
    calls: tuple[tuple[str, dict[str, Any]], ...]


SLOW = {"workers": 32, "bandwidth": 1.25}
CASES: dict[str, tuple[Case, ...]] = {
    "amp": (Case("amp", (("amp", {}),)), Case("amp:update=yes", (("amp", {"update": True}),))),
    "bandwidth": (Case("bandwidth:factor=2", (("bandwidth", {}),)),),
    "blueconnect": (
        Case("ddp:workers=32,bandwidth=1.25", (("ddp", SLOW),)),
        Case(
            "... then blueconnect:factors=8x4,bandwidths=150x1.25",
            (("ddp", SLOW), ("blueconnect", {"factors": "8x4", "bandwidths": "150x1.25"})),
        ),
    ),
    "cuda-graphs": (Case("cuda-graphs", (("cuda-graphs", {}),)),),
    "dataloader": (
        Case("dataloader:workers=4", (("dataloader", {}),)),
        Case("dataloader:workers=1", (("dataloader", {"workers": 1}),)),
    ),
    "ddp": (
        Case("ddp:workers=8,bandwidth=12.5", (("ddp", {}),)),
        Case("ddp:workers=8,bandwidth=1.25", (("ddp", {"bandwidth": 1.25}),)),
        Case("ddp:workers=8,bandwidth=1.25,overlap=no", (("ddp", {"bandwidth": 1.25, "overlap": False}),)),
    ),
    "dgc": (
        Case("ddp:workers=32,bandwidth=1.25", (("ddp", SLOW),)),
        Case("... then dgc", (("ddp", SLOW), ("dgc", {}))),
    ),
    "fused-optimizer": (
        Case("fused-optimizer", (("fused-optimizer", {}),)),
        Case("fused-optimizer:duration=traffic", (("fused-optimizer", {"duration": "traffic"}),)),
    ),
    "gist": (Case("gist", (("gist", {}),)), Case("gist:lossy=yes", (("gist", {"lossy": True}),))),
    "gpu-scale": (Case("gpu-scale:factor=2", (("gpu-scale", {"factor": 2.0}),)),),
    "p3": (
        Case("p3:slice-mb=0,priority=no", (("p3", {"slice_mb": 0.0, "priority": False}),)),
        Case("p3", (("p3", {}),)),
    ),
    "pointwise-fusion": (
        Case("pointwise-fusion", (("pointwise-fusion", {}),)),
        Case("pointwise-fusion:keep-intermediates=yes", (("pointwise-fusion", {"keep_intermediates": True}),)),
    ),
    "port": (
        Case("port:device=v100", (("port", {"device": "v100"}),)),
        Case("port:device=h100-sxm", (("port", {"device": "h100-sxm"}),)),
        Case("port:device=t4", (("port", {"device": "t4"}),)),
        Case("port:device=a100-sxm", (("port", {"device": "a100-sxm"}),)),
    ),
    "accumulate": (
        Case("accumulate:steps=4,grow=yes", (("accumulate", {"grow": True}),)),
        Case("accumulate:steps=4", (("accumulate", {}),)),
    ),
    "offload": (
        Case("offload", (("offload", {}),)),
        Case("offload:what=feature-maps", (("offload", {"what": "feature-maps"}),)),
    ),
    "recompute": (Case("recompute:segments=8", (("recompute", {"segments": 8}),)),),
    "remove": (
        Case("remove:layer=relu", (("remove", {"layer": "relu"}),)),
        Case("remove:layer=relu,host=operator", (("remove", {"layer": "relu", "host": "operator"}),)),
    ),
    "replace-kernel": (
        Case("replace-kernel:op=auto,implementation=library", (("replace-kernel", {"implementation": "library"}),)),
        Case("replace-kernel:op=auto,implementation=best", (("replace-kernel", {"implementation": "best"}),)),
    ),
    "restructure-batchnorm": (Case("restructure-batchnorm", (("restructure-batchnorm", {}),)),),
    "scale": (Case("scale:layer=conv,factor=0.5", (("scale", {"layer": "conv", "factor": 0.5}),)),),
    "vdnn": (
        Case("vdnn", (("vdnn", {}),)),
        Case("vdnn:pcie-gbps=50", (("vdnn", {"pcie_gbps": 50.0}),)),
    ),
}


def step_ms(graph: TaskGraph) -> float:
    """Mean time between the completions of steps, ms."""
    return simulate(graph).sustained_us / 1000


def gpu_ms(graph: TaskGraph) -> float:
    """Time of all tasks on streams, ms a step."""
    return float(graph.duration_us[graph.on_gpu].sum()) / 1000 / len(graph.steps)


def page(folder: Path) -> Iterator[str]:
    """The lines of the page."""
    graphs = {name: with_memory(read_graph(folder / file)) for name, file in TRACES.items()}
    yield HEAD
    yield "| | " + " | ".join(graphs) + " |"
    yield "|---|" + "--:|" * len(graphs)
    yield "| step | " + " | ".join(f"{step_ms(graph):.1f}" for graph in graphs.values()) + " |"
    yield "| GPU | " + " | ".join(f"{gpu_ms(graph):.1f}" for graph in graphs.values()) + " |"
    # The page names the file as a user would, from the folder it lies in.
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        policy = Path("policy.json")
        policy.write_text(json.dumps([{"scale": "conv", "factor": 0.5}, {"remove": "relu"}]))
        cases = dict(CASES)
        cases["metaflow"] = (Case("metaflow:policy=policy.json", (("metaflow", {"policy": str(policy)}),)),)
        for name, what in registered().items():
            yield from _section(what, cases.get(name, ()), graphs)


def _section(what: WhatIf, cases: tuple[Case, ...], graphs: dict[str, TaskGraph]) -> Iterator[str]:
    summary, _, description = (inspect.getdoc(what.function) or "").partition("\n")
    yield f"\n## {what.name}\n\n{summary}\n"
    yield "**Assumed.**"
    yield _markdown(description.partition("Raises:")[0])
    if what.parameters:
        listed = ", ".join(_described(each) for each in what.parameters)
        yield "\n" + "\n".join(wrap(f"Parameters: {listed}.", WIDTH, break_on_hyphens=False))
    yield "\n" + "\n".join(wrap(f"**Checked.** {CHECKED.get(what.name, UNCHECKED)}", WIDTH, break_on_hyphens=False))
    if not cases:
        yield "\n" + "\n".join(wrap(COMMENTS[what.name], WIDTH, break_on_hyphens=False))
        return
    yield "\n| | " + " | ".join(f"{name} | GPU" for name in graphs) + " |"
    yield "|---|" + "--:|" * (2 * len(graphs))
    changed: list[str] = []
    for case in cases:
        cells = []
        for name, graph in graphs.items():
            step, gpu, notes = _run(case, graph)
            cells.append(f"{step} | {gpu}")
            if case is cases[-1] and notes:
                changed.append(f"- {name}: " + "; ".join(notes))
        yield f"| `{case.text}` | " + " | ".join(cells) + " |"
    yield f"\n**Changed** (`{cases[-1].text}`).\n"
    for line in changed:
        yield "\n".join(wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    if what.name in COMMENTS:
        yield "\n" + "\n".join(wrap(f"**Came out.** {COMMENTS[what.name]}", WIDTH, break_on_hyphens=False))


def _run(case: Case, graph: TaskGraph) -> tuple[str, str, tuple[str, ...]]:
    notes: tuple[str, ...] = ()
    try:
        for name, parameters in case.calls:
            graph, notes = (outcome := registered()[name](graph, **parameters)).graph, outcome.notes
    except InputError as error:
        return "error", "", (f"{error.field}: {error.problem}",)
    return f"{step_ms(graph):.1f}", f"{gpu_ms(graph):.1f}", notes


def _markdown(docstring: str) -> str:
    """A docstring's text as Markdown: arguments as a list, doubled quotes as single ones."""
    text = (
        docstring.replace("``", "`")
        .strip()
        .replace("Args:\n", "Parameters:\n\n")
        .replace("Attributes:\n", "Parameters:\n\n")
    )
    text = re.sub(r"^    (\w+?)_?: ", lambda match: f"- `{match[1].replace('_', '-')}`: ", text, flags=re.MULTILINE)
    return re.sub(r"^        ", "  ", text, flags=re.MULTILINE)


def _described(parameter: Parameter) -> str:
    return f"`{parameter.name}`" + (" (required)" if parameter.required else f"={_shown(parameter.default)}")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value) if value != "" else '""'


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Print the page about the passes, from the traces in FOLDER."""
    for line in page(folder):
        click.echo(line)
    click.echo("\n" + (Path(__file__).parent / "dataloader.md").read_text().rstrip())


if __name__ == "__main__":
    main()
