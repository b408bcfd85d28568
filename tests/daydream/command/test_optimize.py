"""``daydream optimize`` from the outside: a plan that DDP takes, and what is refused in one line."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from daydream.cli import main

pytestmark = pytest.mark.usefixtures("pytorch")

#: Six layers, the later ones larger.
MODEL = """
import torch

def network():
    sides = [64, 128, 64, 256, 128, 512, 16]
    layers = [torch.nn.Linear(first, second) for first, second in zip(sides, sides[1:])]
    return torch.nn.Sequential(*layers), torch.zeros(4096, 64)
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["optimize", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of the model among eight workers, and the model beside it."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model.py").write_text(MODEL)
    done = run(
        f"{folder / 'model.py'}:network",
        "--device",
        "h100",
        "--bandwidth",
        "3",
        "--out",
        str(folder / "plan.json"),
        "--plot",
        str(folder / "plan.png"),
    )
    assert done.exit_code == 0, done.output
    assert "best list of buckets" in done.stdout and "all-reduces a step in place of" in done.stdout
    return folder / "plan.json"


def test_the_plan_saves_what_it_says(planned: Path) -> None:
    plan = json.loads(planned.read_text())
    lengths = plan["step_seconds"]
    assert lengths["after"] <= lengths["best_limit"] <= lengths["before"] * 1.0001
    assert lengths["after"] < lengths["before"]
    assert sum(plan["ddp"]["bucket_cap_mb_list"]) * 2**20 == pytest.approx(4 * parameters(plan))


def test_the_plan_is_drawn(planned: Path) -> None:
    assert planned.with_name("plan.png").read_bytes().startswith(b"\x89PNG")


def parameters(plan: dict[str, Any]) -> int:
    sides = [64, 128, 64, 256, 128, 512, 16]
    assert sorted(name for bucket in plan["ddp"]["buckets"] for name in bucket) == sorted(
        f"{layer}.{part}" for layer in range(6) for part in ("weight", "bias")
    )
    return sum(first * second + second for first, second in pairwise(sides))


def test_ddp_makes_the_buckets_of_the_plan(planned: Path) -> None:
    import torch
    import torch.distributed as dist

    plan = json.loads(planned.read_text())
    names = [name for bucket in plan["ddp"]["buckets"] for name in bucket]
    sides = [64, 128, 64, 256, 128, 512, 16]
    shapes = {f"{layer}.weight": (second, first) for layer, (first, second) in enumerate(pairwise(sides))}
    shapes |= {f"{layer}.bias": (side,) for layer, side in enumerate(sides[1:])}
    limits = [int(limit * 2**20) for limit in plan["ddp"]["bucket_cap_mb_list"]]
    # What DDP's reducer calls when it has seen in which order gradients become ready.
    made, _ = dist._compute_bucket_assignment_by_size([torch.empty(shapes[name]) for name in names], limits)
    assert [[names[place] for place in bucket] for bucket in made] == plan["ddp"]["buckets"]


#: Blocks that FSDP can wrap and `torch.utils.checkpoint` go around.
BLOCKS = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(64, 512), torch.nn.Linear(512, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)
        self.h = torch.nn.Sequential(*[Block() for _ in range(3)])

    def forward(self, x):
        return self.last(self.h(self.first(x)))

def network():
    return Network(), torch.zeros(8192, 64)
"""


def plan_of_blocks(folder: Path, *arguments: str) -> Any:
    (folder / "model.py").write_text(BLOCKS)
    done = run(f"{folder / 'model.py'}:network", "--device", "h100", "--bandwidth", "3", "--json", *arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_wrapping_names_every_block_once(tmp_path: Path) -> None:
    plan = plan_of_blocks(tmp_path, "--shard", "fsdp")
    for wrapped in (plan["usual"], plan["fsdp"]):
        assert [name for names in wrapped["wrap"] for name in names] == ["h.0", "h.1", "h.2"]
    assert plan["step_seconds"]["after"] <= plan["step_seconds"]["before"]


def test_a_step_that_is_too_large_is_computed_again_where_that_is_fastest(tmp_path: Path) -> None:
    plain = plan_of_blocks(tmp_path)
    assert (plain["checkpoint"], plain["tried"]) == ([], [])
    half = plain["peak_bytes"] / 2
    plan = plan_of_blocks(tmp_path, "--memory-gb", str(half / 1e9))
    assert plan["checkpoint"] == ["h.0", "h.1", "h.2"] and plan["peak_bytes"] <= half
    fitting = {tuple(each["passes"]): each["step_seconds"] for each in plan["tried"] if "not" not in each["why"]}
    assert min(fitting, key=lambda passes: fitting[passes]) == ("recompute",) and len(fitting) > 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timm:resnet18"], "--device: timm:resnet18 is a model, and no board is named; write --device h100"),
        (["none.json"], "none.json: no such file"),
        (["none.json", "--out", "plan.txt"], "--out: plan.txt has no ending that is known; use .json"),
        (["none.json", "--bandwidth", "0"], "daydream optimize: bandwidth: 0.0 is not above 0; write a number > 0"),
        (["none.json", "--memory-gb", "-1"], "--memory-gb: -1 is not above 0; write a number > 0"),
        (["none.json", "--shard", "fsdp", "--memory-gb", "1"], "--memory-gb: is for ddp alone"),
        (["none.json", "--try", "fuse"], "--try: no pass is called 'fuse'"),
        (["none.json", "--node", "hgx-h100", "--workers", "9"], "daydream optimize: workers: 9"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_optimized_is_said_in_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
