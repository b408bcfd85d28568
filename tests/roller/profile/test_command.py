"""``roller profile`` as a person meets it, over a pretended GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from codegen.bundle.manifest import read_manifest
from roller.cli import main
from roller.profile import clusters as job_engines
from roller.profile import profile
from roller.profile.gpu_worker import LocalRunner
from tests.codegen import fake_cupy
from tests.codegen.bundles import RIGHT, WRONG, write_bundle
from tests.codegen.runtime.test_gpu import BLOCKED

pytestmark = pytest.mark.usefixtures("emulator")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fake_cupy.Gpu:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)  # type: ignore[arg-type]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(profile.profile, "__defaults__", (LocalRunner,))
    monkeypatch.setattr(profile, "GpuRunner", LocalRunner)
    return fake_cupy.reset(seconds={"kernel_1.cu": 0.4, "kernel_2.cu": 0.1, "kernel_3.cu": 0.2})


def roller(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["profile", *map(str, arguments)], prog_name="roller")


def test_one_operator_shows_its_kernels(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "out", (RIGHT, RIGHT, WRONG), kernel={"seconds": 0.15})
    result = roller(folder, "--repeats", 3)
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.output.splitlines()]
    assert lines[0].split() == [
        "rank",
        "was",
        "measured",
        "spread",
        "predicted",
        "off",
        "by",
        "error",
        "loaded",
        "kernel",
    ]
    assert lines[1].split()[:3] == ["1", "2", "100000.00"] and "+50%" in lines[1] and "kernel_2.cu" in lines[1]
    # 62.5 % off, which rounds to either side.
    assert lines[2].split()[:3] == ["2", "1", "400000.00"] and re.search("-6[23]%", lines[2])
    assert lines[3].split()[:3] == ["3", "3", "-"]
    assert lines[4].startswith("struck out: twice kernel_3.cu: relative error")
    assert lines[5] == (
        "2 kernels of 1 operator timed on Pretended GPU, 1 struck out; predictions off by 56% (median); driver 13.0, "
        "runtime 12.9"
    )
    assert [kernel.source for kernel in read_manifest(folder).kernels] == ["kernel_2.cu", "kernel_1.cu", "kernel_3.cu"]


def test_several_operators_show_their_best_kernel(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_bundle(tmp_path / "out", (RIGHT, RIGHT), name=name)
    lines = roller(tmp_path / "out", "--repeats", 3).output.splitlines()
    assert lines[1].split()[:3] == ["a", "2", "100000.00"] and "400000.00 µs" in lines[1]
    assert lines[2].split()[0] == "b"


def test_json_is_an_object_per_operator(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "out", (RIGHT, RIGHT))
    first = json.loads(roller(folder, "--repeats", 3, "--json").output)
    assert (first["name"], first["board"], first["out"]) == ("twice", "Pretended GPU", str(folder))
    assert [(k["rank"], k["predicted_rank"], k["cached"]) for k in first["kernels"]] == [(1, 2, False), (2, 1, False)]
    assert first["kernels"][0]["profiled_seconds"] == pytest.approx(0.1)
    again = json.loads(roller(folder, "--repeats", 3, "--json").output)
    assert [kernel["cached"] for kernel in again["kernels"]] == [True, True]
    anew = json.loads(roller(folder, "--repeats", 3, "--json", "--no-cache", "--top-k", 1).output)
    assert [(kernel["source"], kernel["cached"]) for kernel in anew["kernels"]] == [("kernel_1.cu", False)]


def test_an_operator_without_a_right_kernel_fails_the_command(gpu: fake_cupy.Gpu, tmp_path: Path) -> None:
    result = roller(write_bundle(tmp_path, (WRONG,)), "--repeats", 3)
    assert result.exit_code == 1
    assert "0 kernels of 1 operator timed on Pretended GPU, 1 struck out" in result.output


def test_a_cluster_is_asked_by_url(gpu: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = []

    @contextmanager
    def cluster(url: str) -> Any:
        urls.append(url)
        with ThreadPoolExecutor(1) as executor:
            yield executor

    monkeypatch.setattr(job_engines, "cluster_executor", cluster)
    result = roller(write_bundle(tmp_path / "out"), "--repeats", 3, "--jobs", "tcp://host:8786", "--json")
    assert result.exit_code == 0 and urls == ["tcp://host:8786"]
    assert json.loads(result.output)["kernels"][0]["profiled_seconds"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "roller: nowhere: holds no manifest.json, nor does a folder in it; give a folder that roller "),
        (["out", "--device", "cpu"], "roller: --device: 'cpu' names no GPU; write cuda:0, cuda:0,cuda:1 or all"),
        (["out", "--device", "cuda:4"], "roller: --device: there is no cuda:4; there are 1 GPUs, from cuda:0 on"),
        (["out", "--jobs", "8"], "roller: --jobs: '8' is no cluster's URL; give tcp://host:8786 (Dask) or ray://"),
    ],
)
def test_mistakes_are_one_line(
    gpu: fake_cupy.Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_bundle(tmp_path / "out")
    result = roller(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


#: A machine with click and rich, but nothing of the compiler.
PROGRAM = """
import sys
blocked = sys.argv[1].split()
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in blocked:
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from tests.codegen import fake_cupy
sys.modules["cupy"] = fake_cupy
from roller.profile import profile
from roller.profile.gpu_worker import LocalRunner
profile.profile.__defaults__ = (LocalRunner,)
from roller.cli import main
main(["profile", *sys.argv[2:]])
"""


def test_the_command_needs_no_compiler(tmp_path: Path) -> None:
    blocked = " ".join(name for name in BLOCKED if name not in ("click", "rich"))
    command = [sys.executable, "-c", PROGRAM, blocked, str(write_bundle(tmp_path)), "--no-cache", "--repeats", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "1 kernel of 1 operator timed on Pretended GPU" in done.stdout
