"""What a harvest carries: bundles of every suite, below a size, worst kernels left out first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.gpu import prepare
from bench.gpu.adapters import carried
from hal.support.errors import InputError


def bundle(root: Path, name: str, sizes: Sequence[int]) -> Path:
    folder = root / "h200" / "suite" / name
    folder.mkdir(parents=True)
    kernels = []
    for rank, size in enumerate(sizes, 1):
        files = {
            key: f"kernel_{rank}.{end}" for key, end in (("source", "cu"), ("binary", "cubin"), ("schedule", "json"))
        }
        for file in files.values():
            (folder / file).write_bytes(b"x" * size)
        kernels.append({"rank": rank, **files})
    (folder / "manifest.json").write_text(json.dumps({"kernels": kernels}))
    return folder


def ranks(folder: Path) -> list[int]:
    return [kernel["rank"] for kernel in json.loads((folder / "manifest.json").read_text())["kernels"]]


def test_the_last_kernels_of_all_bundles_go_first(tmp_path: Path) -> None:
    deep, flat = bundle(tmp_path, "deep", [1000, 1000, 1000]), bundle(tmp_path, "flat", [1000])
    assert prepare.shrink(tmp_path, 20_000) == 0 and ranks(deep) == [1, 2, 3]
    assert prepare.shrink(tmp_path, 11_000) == 1
    assert (ranks(deep), ranks(flat)) == ([1, 2], [1])
    assert sorted(path.name for path in deep.iterdir()) == [
        "kernel_1.cu", "kernel_1.cubin", "kernel_1.json", "kernel_2.cu", "kernel_2.cubin", "kernel_2.json",
        "manifest.json",
    ]  # fmt: skip
    assert prepare.directory_bytes(tmp_path) <= 11_000


def test_one_kernel_of_each_operator_has_to_fit(tmp_path: Path) -> None:
    bundle(tmp_path, "only", [1000])
    with pytest.raises(InputError, match="0 MiB do not hold one kernel of each operator; allow more"):
        prepare.shrink(tmp_path, 100)


def test_every_suite_is_compiled_into_its_own_folder(tmp_path: Path) -> None:
    commands: list[list[str]] = []
    prepare.compile_suites("h200", tmp_path, 3, None, (), lambda command: commands.append(list(command)))
    assert [Path(one[4]).stem for one in commands] == [
        "gradients",
        "groups",
        "along",
        "roller119",
        "modern",
        "attention",
    ]
    first = commands[0]
    assert first[1:4] == ["-m", "roller.cli", "compile"]
    out = Path(first[first.index("--out") + 1])
    assert out.parts[-1] == "gradients" and out.parent.parent == tmp_path
    assert first[first.index("--top-k") + 1] == "3"


@pytest.mark.parametrize(("device", "names"), [("a100", 3), ("l4", 6), ("v100", 0)])
def test_groups_are_carried_in_types_that_a_board_multiplies(tmp_path: Path, device: str, names: int) -> None:
    found: list[str] = []

    def run(command: Sequence[str]) -> None:
        found.extend(spec["name"] for spec in json.loads(Path(command[4]).read_bytes()))

    prepare.compile_suites(device, tmp_path, 3, None, ("groups",), run)
    assert len(found) == names


def test_packages_are_carried_for_every_python(tmp_path: Path) -> None:
    commands: list[list[str]] = []
    prepare.carry_packages(tmp_path, lambda command: commands.append(list(command)))
    targets = [Path(one[one.index("--target") + 1]).name for one in commands]
    assert targets == ["cp311", "cp312", "cp313"]
    assert all(one[-1] == "msgspec" for one in commands)


def test_carried_packages_are_found_after_installed_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = ["installed"]
    monkeypatch.setattr("sys.path", path)
    monkeypatch.setattr("sys.version_info", (3, 12, 1))
    carried(tmp_path)
    assert path == ["installed"], "nothing was carried"
    (tmp_path / "site" / "cp312").mkdir(parents=True)
    carried(tmp_path)
    carried(tmp_path)
    carried(None)
    assert path == ["installed", str(tmp_path / "site" / "cp312")]


def test_an_unknown_board_is_refused_in_one_line(tmp_path: Path) -> None:
    done = CliRunner().invoke(prepare.main, ["--device", "nonesuch", "--out", str(tmp_path), "--no-packages"])
    assert done.exit_code == 2
    assert done.stderr.startswith("prepare: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_one_file_harvests_without_this_checkout(tmp_path: Path) -> None:
    bundles = tmp_path / "bundles"
    bundle(bundles, "only", [1000])
    target = tmp_path / "there" / "harvest.pyz"
    prepare.write_one_file(target, bundles)
    command = [sys.executable, target.name, "--out", "results", "--dry-run", "--sections", "microbench"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=target.parent, env=environment, capture_output=True, text=True, timeout=600
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results = json.loads((target.parent / "results" / "results.json").read_text())
    assert results["dry_run"] is True and len(results["microbench"]) == 1
    assert sorted(path.name for path in target.parent.iterdir()) == ["harvest.pyz", "results"]
