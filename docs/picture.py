"""The pictures at the top of the README, of what its commands print: ``python docs/picture.py``."""

from __future__ import annotations

import json
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from update import ROOT, run

FORWARD, BACKWARD, UPDATE, OTHER = "#3b7dc4", "#d98324", "#2f9e77", "#98a2b3"
_STEP = "examples/cuda-graphs/resnet18_h100.json.gz"
_MODEL = "hf:examples/models/llama-1b.json --sequence 4096 --batch 2 --dtype bfloat16 --optimizer adamw"
_BOARDS = {"a100-sxm-80gb": "A100", "h100-sxm": "H100", "b200": "B200"}


def kernel(panel: Any) -> None:
    """The stages of the best product by ``roller explain``."""
    text = run("roller explain examples/matmul.json --device a100")
    rows = re.findall(r"^  (\w+) +([\d.]+) (µs|ns) +[█▏▎▍▌▋▊▉]+ +(.*)$", text, re.MULTILINE)
    times = [float(value) / (1 if unit == "µs" else 1e3) for _, value, unit, _ in rows]
    panel.barh([name.replace("_", " ") for name, *_ in rows], times, color=[FORWARD, *[OTHER] * (len(rows) - 1)])
    _labelled(panel, times, "{:.0f} µs")
    _titled(panel, "A kernel: what sets its pace\na product of matrices on an A100")


def change(panel: Any) -> None:
    """A step after changes by ``daydream whatif``."""
    passes = {"on a B200": ["port:device=b200"], "as CUDA graph": ["cuda-graphs"]}
    passes["both"] = [*passes["as CUDA graph"], *passes["on a B200"]]
    answers = {
        name: json.loads(run(f"daydream whatif {_STEP} --json " + " ".join(f"--pass {each}" for each in applied)))
        for name, applied in passes.items()
    }
    (first, *_) = answers.values()
    times = [first["baseline_seconds"] * 1e3, *(answer["predicted_seconds"] * 1e3 for answer in answers.values())]
    panel.barh(["as it is", *answers], times, color=[OTHER, FORWARD, FORWARD, FORWARD])
    _labelled(panel, times, "{:.2f} ms")
    _titled(panel, "A step: what would change it\nResNet-18 on an H100")


def boards(panel: Any) -> None:
    """A model on three boards by ``daydream predict``."""
    lines = run(f"daydream predict {_MODEL} --device {','.join(_BOARDS)} --json").splitlines()
    answers = [json.loads(line) for line in lines]
    start = [0.0] * len(answers)
    for phase, colour in (("forward", FORWARD), ("backward", BACKWARD), ("optimizer", UPDATE)):
        times = [answer[f"{phase}_seconds"] * 1e3 for answer in answers]
        label = "update" if phase == "optimizer" else phase
        panel.barh(list(_BOARDS.values()), times, left=start, color=colour, label=label)
        start = [a + b for a, b in zip(start, times, strict=True)]
    _labelled(panel, start, "{:.0f} ms")
    panel.legend(loc="lower right", frameon=False)
    _titled(panel, "A model: how long on which board\na Llama of a billion weights")


def _titled(panel: Any, title: str) -> None:
    panel.set_title(title, loc="left", fontsize=8.5)


def _labelled(panel: Any, ends: list[float], form: str) -> None:
    for row, end in enumerate(ends):
        panel.text(end + max(ends) * 0.02, row, form.format(end), va="center")
    panel.set_xlim(0, max(ends) * 1.25)
    panel.set_xticks([])
    panel.invert_yaxis()
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.tick_params(axis="y", length=0)


def main() -> None:
    # Three of them fit next to each other, and one a phone; text is drawn, so that no font is missing.
    with matplotlib.rc_context({"font.size": 7.5, "svg.hashsalt": "roller"}):
        for draw in (kernel, change, boards):
            figure = Figure(figsize=(2.9, 2.2), facecolor="white")
            figure.set_layout_engine("constrained")
            draw(figure.subplots())
            path = ROOT / "docs" / "pictures" / f"readme-{draw.__name__}.svg"
            figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
