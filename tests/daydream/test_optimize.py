"""``daydream optimize`` from the outside: a plan that DDP takes, and what is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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

#: Trains with a plan's list of buckets and prints the names in the buckets that DDP then has.
TRAINS = """
import json, sys
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[2])
from model import network

plan = json.load(open(sys.argv[1]))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, inputs = network()
names = [name for name, _ in model.named_parameters()]
parallel = torch.nn.parallel.DistributedDataParallel(
    model, bucket_cap_mb_list=plan["ddp"]["bucket_cap_mb_list"]
)
for _ in range(3):
    parallel(inputs[:8]).sum().backward()
listed = parallel._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
print(json.dumps([[names[int(place)] for place in bucket.split()] for bucket in listed.split(",")]))
dist.destroy_process_group()
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["optimize", *arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plan of the model among eight workers, and the model beside it."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model.py").write_text(MODEL)
    done = run(
        f"{folder / 'model.py'}:network", "--device", "h100", "--bandwidth", "3", "--out", str(folder / "plan.json")
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


def parameters(plan: dict[str, Any]) -> int:
    sides = [64, 128, 64, 256, 128, 512, 16]
    assert sorted(name for bucket in plan["ddp"]["buckets"] for name in bucket) == sorted(
        f"{layer}.{part}" for layer in range(6) for part in ("weight", "bias")
    )
    return sum(first * second + second for first, second in pairwise(sides))


def test_ddp_makes_the_buckets_of_the_plan(planned: Path) -> None:
    script = planned.parent / "train.py"
    script.write_text(TRAINS)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(planned), str(planned.parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout.splitlines()[-1])
    assert [sorted(bucket) for bucket in made] == [
        sorted(bucket) for bucket in json.loads(planned.read_text())["ddp"]["buckets"]
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["timm:resnet18"], "--device: timm:resnet18 is a model, and no board is named; write --device h100"),
        (["none.json"], "none.json: no such file"),
        (["none.json", "--out", "plan.txt"], "--out: plan.txt has no ending that is known; use .json"),
        (["none.json", "--bandwidth", "0"], "daydream optimize: bandwidth: 0.0 is not above 0; write a number > 0"),
        (["none.json", "--memory-gb", "-1"], "--memory-gb: -1 is not above 0; write a number > 0"),
        (["none.json", "--try", "fuse"], "--try: no pass is called 'fuse'"),
        (["none.json", "--node", "hgx-h100", "--workers", "9"], "daydream optimize: workers: 9"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_cannot_be_optimized_is_said_in_one_line(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
