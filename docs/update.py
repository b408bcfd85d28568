"""What the program prints, put into the documentation: ``python docs/update.py``.

A page marks a block of output with a comment and the script replaces what is between the fences::

    <!-- output: devices -->
    ```console
    ...
    ```

Every block is run, none is typed. With ``--check`` nothing is written; the exit code tells whether a page is out of
date, times and measured errors aside.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

#: Columns of the terminal in which everything is shown, and the variables by which programs know of it.
_COLUMNS = 100
TERMINAL = {"COLUMNS": str(_COLUMNS), "TERM": "dumb"}
#: Every page with a block, by its path.
PAGES = tuple(
    str(path.relative_to(ROOT))
    for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md")))
    if "<!-- output:" in path.read_text("utf-8")
)

#: The operator and the device of the walkthrough.
EXAMPLE, DEVICE = "examples/matmul.json", "v100"

_BLOCK = re.compile(r"(<!-- output: (?P<name>[\w-]+) -->\n```\w*\n)(?P<text>.*?)(?=^```$)", re.DOTALL | re.MULTILINE)

#: What differs from run to run, or from CPU to CPU.
_UNSTEADY = (
    (
        # Lines break elsewhere where a time has more digits.
        re.compile(
            r"in\s\d+\.\d\ss\s\((?:[\d.]+\sms\s(?:of\sit\s)?(?:construction|search|algorithms)(?:,\s)?)+\),\swritten\sto\s"
        ),
        "in # s (# ms of it finding), written to ",
    ),
    (re.compile(r"\byes, (\de-\d\d|exact)"), "yes"),
    (re.compile(r"off by at most \de-\d\d"), "off by at most #"),
    (re.compile(r"largest relative error \d\.\de-\d\d"), "largest relative error #"),
    (re.compile(r'"relative_error": [\d.e-]+'), '"relative_error": #'),
)


@cache
def _workplace() -> Path:
    """A directory with the examples, where commands run and leave their files."""
    directory = Path(tempfile.mkdtemp(prefix="roller-docs-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    shutil.copytree(ROOT / "examples", directory / "examples")
    return directory


def run(command: str) -> str:
    """The output of ``roller ...``, ``daydream ...`` or ``python ...`` as a terminal of 100 columns shows it."""
    program, *arguments = shlex.split(command)
    assert program in ("roller", "daydream", "python"), command
    done = subprocess.run(
        [sys.executable, *(() if program == "python" else ("-m", f"{program}.cli")), *arguments],
        cwd=_workplace(),
        env={**os.environ, **TERMINAL, "PYTHONPATH": str(ROOT), "ROLLER_CACHE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{command}: exit code {done.returncode}\n{done.stderr}")
    return trimmed(done.stdout)


def trimmed(output: str) -> str:
    """Output without spaces at the ends of its lines, and with one line break at its end."""
    return "\n".join(line.rstrip() for line in output.rstrip("\n").split("\n")) + "\n"


def sections_of(output: str) -> list[str]:
    """The sections of ``roller explain``: what stands between blank lines, indented lines with what is before them."""
    return re.split(r"\n\n(?=\S)", output.rstrip("\n"))


def console(
    command: str, *, shown: str = "", sections: Iterable[str] = (), lines: int | None = None, last: int = 0
) -> str:
    """A command and its output; of a long one the sections that start so, or first and last lines, with ``...``."""
    output = run(command)
    wanted = tuple(sections)
    if wanted:
        kept = [part for part in sections_of(output) if part.startswith(wanted)]
        output = "...\n\n" + "\n\n".join(kept) + "\n\n...\n"
    if lines is not None:
        every = output.splitlines()
        output = "".join(f"{line}\n" for line in (*every[:lines], "...", *(every[-last:] if last else ())))
    return f"$ {_broken(shown or command)}\n{output if output.strip() else ''}"


def consoles(*commands: str, lines: int | None = None) -> str:
    """Several commands, each with its output or its first lines."""
    return "".join(console(command, lines=lines) for command in commands)


def _broken(command: str) -> str:
    """A command of more columns than the output has, continued after backslashes before its options."""
    lines = [""]
    for part in re.split(r" (?=--)", command):
        if len(lines[-1]) + len(part) > _COLUMNS - len("$  \\"):
            lines.append("   ")
        lines[-1] += f" {part}" if lines[-1] else part
    return " \\\n".join(lines)


# The walkthrough: one operator, room by room


@cache
def _compiled() -> tuple[dict[str, Any], Path]:
    """The manifest of the example and the directory of its bundle."""
    run(f"roller compile {EXAMPLE} --device {DEVICE} --search roller --out walkthrough")
    (directory,) = (_workplace() / "walkthrough").iterdir()
    manifest: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    return manifest, directory


@cache
def _form() -> Any:
    from sokoban.kernel.form import kernel_form
    from sokoban.language.operators import load_operators

    return kernel_form(load_operators(ROOT / EXAMPLE)[0])


@cache
def _explained() -> dict[str, str]:
    """The sections of ``roller explain`` by their first words."""
    parts = sections_of(run(f"roller explain {EXAMPLE} --device {DEVICE} --search roller"))
    return {part.split(maxsplit=1)[0]: part + "\n" for part in parts}


def _device_numbers() -> str:
    from hal.catalog import load_device, provenance_of
    from hal.spec.numbers import leaves

    device = load_device(DEVICE)
    wanted = (
        "unit_count",
        "teu.lanes",
        "layers.shared.bandwidth_bytes_per_second",
        "layers.dram.bandwidth_bytes_per_second",
        "layers.dram.transaction_bytes",
        "limits.registers_per_thread_usable",
        "limits.shared_bytes_per_block",
        "throughput.float32.sustained_flops",
    )
    values = dict(leaves(device))
    out = []
    for key in wanted:
        value = values[key]
        source = provenance_of(device, key)
        number = f"{value:g}" if isinstance(value, float) else str(value)
        out.append(_cut(f"{key:42} {number:>11}  {source}"))
    return "\n".join(out) + "\n"


def _cut(line: str) -> str:
    """A line of at most as many columns as everything is shown in."""
    return line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 3].rstrip()}..."


def _statements() -> str:
    from sokoban.language.expression import statement_text

    expr = _form().source
    tensors = ", ".join(f"{t.name}{list(t.shape)} {t.dtype}" for t in expr.tensors)
    sizes = ", ".join(f"{axis.name}={axis.size}" for axis in expr.axes)
    text = "\n".join(statement_text(statement) for statement in expr.statements)
    return f"{text}\naxes        {sizes}\ntensors     {tensors}\naccumulate  {expr.accumulate}\n"


def _kernel_form() -> str:
    from sokoban.language.expression import statement_text

    form = _form()
    rows = {
        "kind": form.kind,
        "reductions": "; ".join(statement_text(statement) for statement in form.reductions),
        "final": statement_text(form.final),
        "spatial": ", ".join(form.spatial),
        "reduced": ", ".join(form.reduced),
        "body_loads": ", ".join(load.tensor for load in form.body_loads),
        "fused": ", ".join(name for name, _ in form.fused) or "none",
        "points": f"{form.points:,}",
        "flops": f"{form.flops:,.0f}",
    }
    return "".join(f"{name:11} {value}\n" for name, value in rows.items())


def _regions() -> str:
    from sokoban.kernel.regions import compute_workload, memory_footprint, subtensor_sizes

    manifest, _ = _compiled()
    tile = manifest["kernels"][0]["tiles"]["shared"]
    expr = _form().source
    return (
        f">>> tile = {tile}\n"
        f">>> subtensor_sizes(expr, tile)\n{subtensor_sizes(expr, tile)}\n"
        f">>> compute_workload(expr, tile), memory_footprint(expr, tile)\n"
        f"{compute_workload(expr, tile), memory_footprint(expr, tile)}\n"
    )


def _schedule() -> str:
    manifest, directory = _compiled()
    return _one_line_each(json.loads((directory / manifest["kernels"][0]["schedule"]).read_text()))


def _one_line_each(record: Mapping[str, Any]) -> str:
    """JSON with one line per key of the outermost object."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
    return "{\n" + "\n".join(_cut(f"{line},") for line in lines[:-1]) + f"\n{_cut(lines[-1])}\n}}\n"


def _cuda() -> str:
    """The kernel from its signature to the end of the main loop."""
    manifest, directory = _compiled()
    text = (directory / manifest["kernels"][0]["source"]).read_text()
    lines = [_cut(line) for line in text.splitlines()]
    start = max(i for i, line in enumerate(lines) if line.startswith('extern "C"'))
    loop = next(i for i, line in enumerate(lines) if line.startswith("  for (int step"))
    end = next(i for i in range(loop, len(lines)) if lines[i] == "  }")
    return "\n".join([*lines[start : start + 4], "  ...", *lines[loop : end + 1], "  ..."]) + "\n"


def _ptxas() -> str:
    from codegen.gpu.source.nvrtc import compile_cuda

    manifest, directory = _compiled()
    kernel = manifest["kernels"][0]
    source = (directory / kernel["source"]).read_text()
    compiled = compile_cuda(source, manifest["architecture"], name=manifest["name"])
    assert compiled.cubin == (directory / kernel["binary"]).read_bytes()
    return f"{compiled.log}\n{kernel['binary']}: {len(compiled.cubin)} bytes\n"


def _inspection() -> str:
    _, directory = _compiled()
    return console(f"roller inspect walkthrough/{directory.name}", shown=f"roller inspect out/{directory.name}")


def _verification() -> str:
    manifest, _ = _compiled()
    return _one_line_each(manifest["kernels"][0]["verification"])


def _kernel_record() -> str:
    manifest, _ = _compiled()
    return _one_line_each({**manifest["kernels"][0], "verification": "..."}).replace('"..."', "{ ... }")


def _manifest() -> str:
    manifest, _ = _compiled()
    return _one_line_each({**manifest, "kernels": "..."}).replace('"..."', "[ ... ]")


#: Files of RATIONAL that hold constants, below ``sokoban``: where lanes are threads, and where they are elements.
_GPU_MODEL = (
    "model/gpu/breakdown", "model/gpu/stages", "model/gpu/issue", "model/gpu/work", "model/gpu/row_work",
    "schedule/rows", "schedule/windows", "model/gpu/kinds/patches", "model/gpu/loops", "model/gpu/operands",
    "model/gpu/fetch", "model/gpu/occupancy", "model/gpu/transactions", "search/bands", "schedule/accesses",
)  # fmt: skip
_CPU_MODEL = ("model/cpu/stages", "model/cpu/traffic", "model/cpu/work", "model/cpu/rows", "schedule/cpu_tiles")

#: Comments and the constants below them; private ones are sizes that every NVIDIA board has.
_CONSTANT = re.compile(r"((?:^#: .*\n)+)((?:^[A-Z]\w* = .*\n)+)", re.MULTILINE)


def _constants(files: Iterable[str] = _GPU_MODEL) -> str:
    """Every constant of the cost model with its comment."""
    lines = []
    for file in files:
        found = [
            (comment, assigned)
            for comment, assigned in _CONSTANT.findall((ROOT / "sokoban" / f"{file}.py").read_text("utf-8"))
            if re.search(r" = \(?[\d.]", assigned)
        ]
        lines += [f"sokoban/{file}.py"] if found else []
        for comment, assigned in found:
            lines.append("  " + ", ".join(assigned.splitlines()))
            text = " ".join(comment.replace("#: ", "").split())
            lines += textwrap.wrap(text, _COLUMNS, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


#: A device file that is made of another one.
LAPTOP, SERVER = "examples/my-laptop.toml", "hal/devices/epyc-7763.toml"


def _laptop() -> str:
    """What is different in the laptop's file, as ``diff`` prints it."""
    old, new = ((ROOT / name).read_text("utf-8").splitlines() for name in (SERVER, LAPTOP))
    changes = difflib.unified_diff(old, new, SERVER, LAPTOP, n=0, lineterm="")
    return f"$ diff -U0 {SERVER} {LAPTOP}\n" + "".join(f"{line}\n" for line in changes)


#: A job of many boards.
_PLAN = (
    "daydream plan hf:examples/models/llama-70b.json --sequence 8192 --optimizer adamw --optimizer-kernels fused"
    " --compile --device h100-sxm {}"
)

#: Jobs of models of experts.
_EXPERTS = (
    "daydream plan hf:examples/models/{}.json --sequence 4096 --optimizer adamw --optimizer-kernels fused --compile"
    " --attention cudnn --expert-kernels cublas --dispatch deepep --device h100-sxm"
)
_QWEN = f"{_EXPERTS.format('qwen3-235b')} --nodes 32 --global-batch 2048 --checkpoint full"
_DEEPSEEK = f"{_EXPERTS.format('deepseek-v3')} --nodes 128 --global-batch 8192"
_THEIRS = (
    f"{_DEEPSEEK} --pipeline 16 --expert 64 --shard zero1 --schedule interleaved --checkpoint selective"
    " --precision fp8-block"
)

#: A training step of the example model, on these boards.
_THREE = "a100-sxm-80gb,h100-sxm,b200"
_PREDICTION = (
    "daydream predict hf:examples/models/llama-1b.json --sequence 4096 --batch 2 --dtype bfloat16 --optimizer adamw"
    " --device {}"
)

#: A job of 64 boards.
_PLAN_64 = (
    "daydream plan hf:examples/models/llama-1b.json --sequence 4096 --optimizer adamw --device h100-sxm --nodes 8"
    " --global-batch 256"
)

#: A chat service: its model, requests and the numbers of its weights and cache.
_SERVE = (
    "daydream serve hf:examples/models/llama-70b.json --precision fp8-tensorwise --cache fp8 --prompt 500..1500"
    " --output 100..400 --rate 10 {}"
)

#: Batches of the example model.
_LARGEST = (
    "daydream predict hf:examples/models/llama-1b.json --sequence 4096 --dtype bfloat16 --optimizer adamw"
    " --largest-batch --device l40s,h100-sxm"
)

#: Changes of a recorded step.
_WHATIF = "daydream whatif examples/cuda-graphs/resnet18_h100.json.gz"

#: A recording of others, which is not part of the repository; blocks of it stay as they are where it is missing.
RECORDING = "resnet50_v100_nw0.pt.trace.json.gz"


def _recordings() -> Path:
    from bench.accuracy.data import default_directory

    return default_directory() / "traces"


def recorded(arguments: str, **shown: Any) -> str:
    """A command of ``daydream`` with the recording, and the pass that the page about it has."""
    shutil.copy(_recordings() / RECORDING, _workplace())
    page = (ROOT / "docs" / "daydream.md").read_text("utf-8")
    (own,) = re.findall(r'^```text\n("""A faster backward.*?)^```$', page, re.DOTALL | re.MULTILINE)
    (_workplace() / "faster.py").write_text(own, "utf-8")
    command, _, options = arguments.partition(" ")
    return console(f"daydream {command} {RECORDING} {options}".rstrip(), **shown)


RECORDED: Mapping[str, Callable[[], str]] = {
    "recorded-simulate": lambda: recorded("simulate"),
    "recorded-report": lambda: recorded("report --rows 4 --batch 32"),
    "recorded-whatif": lambda: recorded("whatif --pass dataloader:workers=4 --pass amp"),
    "recorded-dataloader": lambda: recorded("whatif --pass dataloader:workers=4", lines=11),
    "recorded-own": lambda: recorded("whatif --pass dataloader --pass faster.py:factor=4", lines=9, last=2),
}

BLOCKS: Mapping[str, Callable[[], str]] = {
    **RECORDED,
    "inspect": _inspection,
    "compile": lambda: console("roller compile examples/conv2d.json --device v100 --top-k 3"),
    "whatif": lambda: console(f"{_WHATIF} --pass cuda-graphs", lines=3),
    "compile-list": lambda: console("roller compile examples/ops.json --device a100 --out kernels"),
    "verify": lambda: console("roller verify examples/ops.json --device v100 --top-k 3"),
    "explain": lambda: console(
        "roller explain examples/matmul.json --device v100 --search roller",
        sections=("The program", "Predicted", "Why"),
    ),
    "score": lambda: console("roller score examples/matmul.json --device v100 --schedules examples/schedules.jsonl"),
    "score-triton": lambda: console(
        "roller score examples/triton-configurations/operator.json --device a100"
        " --schedules examples/triton-configurations/configurations.jsonl --ranked --limit 5"
    ),
    "estimate": lambda: console("roller estimate examples/layers.jsonl --device v100"),
    "estimate-library": lambda: console("roller estimate examples/layers.jsonl --device v100 --implementation library"),
    "estimate-llama": lambda: console(
        "roller estimate examples/llama-layer.jsonl --device h100-sxm --implementation library"
    ),
    "predict": lambda: console(_PREDICTION.format(_THREE)),
    "boards": lambda: "$ pip install '.[models]'\n" + console(_PREDICTION.format(_THREE), lines=5),
    "predict-one": lambda: console(_PREDICTION.format("h100-sxm")),
    "sweep": lambda: console(
        "daydream sweep timm:resnet50 --device v100,h100 --batch 128..512 --dtype float32,amp"
        " --checkpoint 'none,layer*.*'"
    ),
    "plan": lambda: console(
        _PLAN.format("--nodes 128 --tensor 8 --pipeline 4 --global-batch 1024 --shard zero1 --checkpoint full")
    ),
    "plan-search": lambda: console(
        _PLAN.format("--nodes 8 --tensor 8 --global-batch 256 --checkpoint full --search --rows 5")
    ),
    "serve": lambda: console(
        "daydream serve hf:examples/models/llama-1b.json --device l40s --rate 20 --prompt 500..1500 --output 200"
    ),
    "serve-search": lambda: console(
        "daydream serve hf:examples/models/llama-1b.json --device l4,l40s,h100-sxm --rate 40 --prompt 500..1500"
        " --output 200 --search --ttft 300 --tpot 15 --price l4=0.8,l40s=1.5,h100-sxm=2.5 --rows 6"
    ),
    "predict-cached": lambda: console(
        "daydream predict hf:examples/models/llama-1b.json --mode inference --cached 4096 --batch 16 --dtype bfloat16"
        " --device a100-sxm-80gb,h100-sxm,b200"
    ),
    "serve-draft": lambda: console(
        "daydream serve hf:examples/models/llama-1b.json --device l40s --rate 20 --prompt 500..1500 --output 200"
        " --draft 3 --accept 0.7"
    ),
    "tutorial-serve": lambda: console(_SERVE.format("--device h100-sxm --tensor 4")),
    "tutorial-serve-separate": lambda: console(
        _SERVE.format("--device h100-sxm,h200 --search --ttft 500 --tpot 20 --separate --rows 6")
    ),
    "tutorial-serve-search": lambda: console(
        _SERVE.format("--device h100-sxm,h200 --search --ttft 500 --tpot 30 --rows 8")
    ),
    "optimize": lambda: console("daydream optimize timm:resnet50 --device h100 --batch 64"),
    "optimize-fsdp": lambda: console("daydream optimize timm:resnet50 --device h100 --batch 64 --shard fsdp"),
    "place": lambda: console("daydream place examples/models/jobs.json --boards rtx-2080-ti,rtx-3090"),
    "devices": lambda: console("roller devices", lines=5),
    "schema": lambda: console("roller schema manifest", lines=5),
    "constants": _constants,
    "vector-constants": lambda: _constants(_CPU_MODEL),
    "vector-prediction": lambda: console(
        "roller explain examples/matmul.json --device epyc-9654", sections=("The program", "Predicted", "Why")
    ),
    "laptop": _laptop,
    "compile-sizes": lambda: console("roller compile examples/matmul-sizes.json --device h100 --search roller"),
    "laptop-compile": lambda: console(f"roller compile examples/matmul.json --device ./{LAPTOP} --top-k 3"),
    "laptop-explain": lambda: console(
        f"roller explain examples/matmul.json --device ./{LAPTOP}", sections=("The program", "Predicted")
    ),
    "device-numbers": _device_numbers,
    "statements": _statements,
    "kernel-form": _kernel_form,
    "regions": _regions,
    "construction": lambda: _explained()["How"],
    "program": lambda: _explained()["The"],
    "prediction": lambda: _explained()["Predicted"],
    "reasons": lambda: _explained()["Why"],
    "stages": lambda: _explained()["Times"],
    "rivals": lambda: _explained()["Its"],
    "schedule": _schedule,
    "cuda": _cuda,
    "ptxas": _ptxas,
    "verification": _verification,
    "kernel-record": _kernel_record,
    "manifest": _manifest,
    "doctor": lambda: console("roller doctor"),
    "tutorial-compile": lambda: console("roller compile examples/matmul.json --device a100 --top-k 3"),
    "tutorial-why": lambda: console(
        "roller explain examples/matmul.json --device a100", sections=("The program", "Predicted")
    ),
    "tutorial-verify": lambda: console("roller verify examples/matmul.json --device a100"),
    "tutorial-rival": lambda: console("roller estimate examples/matmul.json --device a100 --implementation library"),
    "tutorial-step": lambda: console(
        "daydream predict timm:resnet18 --device v100 --batch 8 --out step.json.gz", lines=16
    ),
    "tutorial-whatif": lambda: console("daydream whatif step.json.gz --pass amp --pass cuda-graphs", lines=24),
    "tutorial-boards": lambda: console(
        "daydream predict hf:examples/models/llama-1b.json --sequence 2048 --batch 1,4 --dtype bfloat16"
        " --device a100-sxm-80gb,h100-sxm,l40s"
    ),
    "tutorial-largest": lambda: console(
        "daydream predict hf:examples/models/llama-1b.json --sequence 2048 --largest-batch --dtype bfloat16"
        " --device l40s,h100-sxm"
    ),
    "tutorial-experts-plan": lambda: console(
        f"{_QWEN} --tensor 4 --sequence-parallel --pipeline 8 --expert 8 --shard zero1"
    ),
    "tutorial-experts-search": lambda: console(f"{_QWEN} --search --try-precision fp8-tensorwise --rows 5"),
    "tutorial-experts-deepseek": lambda: console(f"{_DEEPSEEK} --search --try-precision fp8-tensorwise --rows 5"),
    "tutorial-experts-theirs": lambda: consoles(_THEIRS, f"{_THEIRS} --overlap-batches", lines=3),
    "example-compile": lambda: console("roller compile examples/launch/operator.json --device h100 --top-k 1"),
    "example-processor": lambda: consoles(
        f"roller compile examples/launch/operator.json --device ./{LAPTOP} --top-k 1 --out laptop",
        "python examples/launch/with_pytorch.py laptop/feed_forward cpu",
    ),
    "example-boards": lambda: console(
        "daydream predict examples/five-boards/encoder.py:encoder --dtype bfloat16 --device t4,v100,a100,l40s,h100"
    ),
    "example-largest": lambda: console(_LARGEST),
    "example-largest-recomputed": lambda: console(f"{_LARGEST} --checkpoint full"),
    "example-plan": lambda: console(f"{_PLAN_64} --shard zero1 --batch 2", lines=7),
    "example-plan-search": lambda: console(f"{_PLAN_64} --search --rows 5"),
    "example-graphs": lambda: console(f"{_WHATIF} --pass cuda-graphs"),
    "example-graphs-b200": lambda: consoles(
        f"{_WHATIF} --pass port:device=b200", f"{_WHATIF} --pass cuda-graphs --pass port:device=b200", lines=3
    ),
    "example-board": lambda: consoles(
        "python examples/own-board/more_bandwidth.py",
        "daydream predict examples/five-boards/encoder.py:encoder --dtype bfloat16 --device l40s,./l40s-fast.toml",
    ),
}


def blocks_of(page: str) -> dict[str, str]:
    """The marked blocks of a page, by name."""
    return {match["name"]: match["text"] for match in _BLOCK.finditer(page)}


def steady(text: str) -> str:
    """A block without what differs between two good runs."""
    for pattern, replacement in _UNSTEADY:
        text = pattern.sub(replacement, text)
    return text


def updated(page: str) -> str:
    """The page with every block run again. One that differs in times or measured errors only is left as it is."""

    def fresh(match: re.Match[str]) -> str:
        if match["name"] in RECORDED and not (_recordings() / RECORDING).is_file():
            return match[0]
        text = BLOCKS[match["name"]]()
        return match[1] + (match["text"] if steady(text) == steady(match["text"]) else text)

    return _BLOCK.sub(fresh, page)


def main() -> None:
    parser = argparse.ArgumentParser(description="Run every block of output in the documentation again.")
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"all unless named: {', '.join(PAGES)}")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a page is out of date")
    arguments = parser.parse_args()
    check = arguments.check
    if unknown := set(arguments.pages) - set(PAGES):
        parser.error(f"{', '.join(sorted(unknown))}: no page with a block")
    sys.path.insert(0, str(ROOT))
    stale = []
    for name in arguments.pages or PAGES:
        path = ROOT / name
        page = path.read_text("utf-8")
        fresh = updated(page)
        if fresh != page:
            stale.append(name)
            if not check:
                path.write_text(fresh, "utf-8")
    for name in stale:
        print(f"{name}: {'out of date; run python docs/update.py' if check else 'updated'}")
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
