"""The command line as a person meets it: whole messages, exit codes, and what is left on the disk."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from codegen.bundle import writer
from hal import catalog
from hal.support import atomic
from roller.cli import main

MATMUL = {"op": "matmul", "m": 65, "n": 33, "k": 17}
ROOT = Path(__file__).resolve().parents[2]


def roller(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="roller")


def tree(directory: Path) -> dict[str, str]:
    """Every file below a directory with the hash of its bytes."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, data: Any) -> str:
    Path(name).write_text(data if isinstance(data, str) else json.dumps(data))
    return name


# Bad input: one line, exit code 2, nothing left


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"op": "matmul", "m": 8, "n": 8}, 'op.json.k: is missing; add "k"'),
        ({"op": "matmul", "m": -8, "n": 8, "k": 8}, "op.json.m: expected int >= 1"),
        (
            {"op": "matmull", "m": 8, "n": 8, "k": 8},
            "op.json.op: unknown operator 'matmull'; did you mean 'matmul'? known: matmul, batch_matmul, conv2d, "
            "depthwise_conv2d, avg_pool2d, max_pool2d, reduce, scan, topk, scatter_add, elementwise, softmax, "
            "layer_norm, transpose, attention, attention_gradient",
        ),
        (
            {"expr": "C[i] = sum(k, A[i*k])", "sizes": {"i": 4, "k": 4}},
            "op.json.expr: statement C: index 'i*k' of A is not affine; an index is a sum of integer*axis terms plus "
            "an integer, or one element of an integer tensor",
        ),
        (
            {"op": "matmul", "m": 8, "n": 8, "k": 8, "dtype": "int4"},
            "op.json.dtype: unknown dtype 'int4'; use one of float16, bfloat16, float32, float64, "
            "int8, float8_e4m3fn, float8_e5m2",
        ),
        ('{"op": "matmul",', "op.json: broken JSON at line 1, column 17: it ends too early"),
        ("[" * 10_000_000, "op.json: brackets nested too deep; an operator is an object, a suite a list of them"),
        (
            "[" * 5_000_000 + "]" * 5_000_000,
            "op.json: brackets nested too deep; an operator is an object, a suite a list of them",
        ),
        (
            {"expr": "__import__('os').system('id')"},
            "op.json.expr: syntax error at column 11: unexpected '('; expected '['",
        ),
        ([], "op.json: an empty list; write at least one operator"),
        (
            [MATMUL, {"op": "matmul", "m": 16, "n": 16, "k": 32, "dtype": "float8_e4m3fn"}],
            "matmul_16x16x32_float8_e4m3fn: dtype float8_e4m3fn of A is multiplied by matrix instructions alone, and "
            "v100-sxm2-16gb has none for it; use float16, or a board like l4 or h200",
        ),
    ],
    ids=[
        "missing size", "negative size", "unknown operator", "not affine", "unknown dtype", "broken JSON",
        "deeply nested", "deeply nested and closed", "code", "empty list", "second operator is not for the board",
    ],
)  # fmt: skip
def test_a_bad_operator_file_is_one_line(here: Path, data: Any, message: str) -> None:
    result = roller("compile", write("op.json", data), "--device", "v100", "--out", "out")
    assert (result.exit_code, result.stderr, result.stdout) == (2, f"roller: {message}\n", "")
    assert os.listdir(here) == ["op.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nofile.json", "--device", "v100"),
            "nofile.json: no such file; give a JSON file with one operator or a list of them",
        ),
        (
            ("folder", "--device", "v100"),
            "folder: is a directory; give a JSON file with one operator or a list of them",
        ),
        (
            ("op.json", "--device", "v1000"),
            "device: no device is called 'v1000'; did you mean v100, p100 or h100?",
        ),
        (
            ("op.json", "--device", "mine.toml"),
            "mine.toml: there is no such file; `roller devices` lists the devices that need no file",
        ),
        (
            ("op.json", "--device", "ipu"),
            "--device: ipu-mk1 has no code generator: Graphcore's compiler is not part of this project: schedules are "
            "constructed and estimated, no kernel is written; roller explain and roller devices answer for it",
        ),
        (("op.json", "--device", "v100", "--out", "op.json"),
         "--out: op.json exists and is no directory; name another one"),
        (("op.json", "--device", "v100", "--out", "op.json/below"),
         "--out: op.json exists and is no directory; name another one"),
        (("op.json", "--device", "v100", "--top-k", "0"),
         "Invalid value for '--top-k': 0 is not in the range 1<=x<=100; see roller compile --help"),
        (("op.json", "--device", "v100", "--top-k", "x"),
         "Invalid value for '--top-k': 'x' is not a valid integer range; see roller compile --help"),
        (("op.json",), "Missing option '--device'; see roller compile --help"),
        (("--device", "v100"), "Missing argument 'FILE'; see roller compile --help"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line(here: Path, arguments: tuple[str, ...], message: str) -> None:
    write("op.json", MATMUL)
    Path("folder").mkdir()
    before = sorted(os.listdir(here))
    result = roller("compile", *arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"roller: {message}")
    assert result.stdout == ""
    assert sorted(os.listdir(here)) == before


def test_an_unknown_option_or_command_is_one_line(here: Path) -> None:
    for arguments, start in (
        (("compile", "op.json", "--device", "v100", "--bogus"), "roller: No such option '--bogus'"),
        (("build",), "roller: No such command 'build'"),
        (("schema", "kernel"), "roller: Invalid value for '{operator|device|manifest|schedule}': 'kernel' is not"),
    ):
        result = roller(*arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert result.stderr.startswith(start)


def test_every_command_names_a_file_that_is_not_there(here: Path) -> None:
    for command in ("compile", "verify", "explain"):
        result = roller(command, "nofile.json", "--device", "v100")
        assert result.exit_code == 2
        assert (
            result.stderr == "roller: nofile.json: no such file; give a JSON file with one operator or a list of them\n"
        )


def test_a_name_that_is_not_in_the_list_is_answered_with_one_that_is(here: Path) -> None:
    write("op.json", MATMUL)
    result = roller("explain", "op.json", "--device", "v100", "--name", "conv")
    assert result.exit_code == 2
    assert result.stderr == "roller: --name: 'conv' is not in op.json; try matmul_65x33x17\n"


# A disk that fills up, an interrupt


@pytest.mark.usefixtures("device_compiler")
def test_a_full_disk_leaves_nothing_half_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write("op.json", MATMUL)
    write_bytes = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "manifest.json":
            write_bytes(path, data[:100])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    result = roller("compile", "op.json", "--device", "v100", "--top-k", "1", "--verify", "0", "--out", "out")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("roller: out/") and result.stderr.endswith("No space left on device\n")
    assert os.listdir("out") == []


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize("moment", ["write_bundle", "staged_directory"])
def test_an_interrupt_leaves_what_is_complete(here: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    write("ops.json", [MATMUL, {**MATMUL, "m": 9}])
    arguments = ("compile", "ops.json", "--device", "v100", "--top-k", "1", "--verify", "0", "--out", "out", "--json")
    calls: list[Path] = []
    if moment == "write_bundle":
        original = atomic._replace_directory

        def replace(staging: Path, target: Path) -> None:
            calls.append(target)
            if len(calls) == 2:
                raise KeyboardInterrupt
            original(staging, target)

        monkeypatch.setattr(atomic, "_replace_directory", replace)
    else:
        to_json = writer.to_json

        def interrupted(value: object) -> bytes:
            calls.append(Path())
            if len(calls) == 3:  # the second operator's schedule: its source lies there already
                raise KeyboardInterrupt
            return to_json(value)

        monkeypatch.setattr(writer, "to_json", interrupted)
    result = roller(*arguments)
    assert result.exit_code == 130
    assert result.stderr.strip() == "roller: interrupted"
    assert os.listdir("out") == ["matmul_65x33x17"]
    assert json.loads(Path("out/matmul_65x33x17/manifest.json").read_text())["name"] == "matmul_65x33x17"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for processes in /proc")
@pytest.mark.parametrize(("number", "code", "delay"), [(signal.SIGINT, 130, 0.3), (signal.SIGTERM, 143, 2.0)])
@pytest.mark.slow
def test_a_signal_ends_all_processes_and_leaves_whole_bundles(
    here: Path, number: signal.Signals, code: int, delay: float
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "roller.cli", "compile", ROOT / "bench/suites/modern.json", "--device", "v100",
         "--out", "out", "--jobs", "2"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    # From the first worker on: before it, Python itself is starting, which takes long on a busy machine.
    for _ in range(6000):
        if len(alive_in_session(process.pid)) > 1:
            break
        time.sleep(0.1)
    time.sleep(delay)
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == code, stderr
    assert stderr.strip() in ("roller: interrupted", "")
    for _ in range(6000):
        if not alive_in_session(process.pid):
            break
        time.sleep(0.1)
    assert alive_in_session(process.pid) == []
    for name in os.listdir("out") if Path("out").exists() else []:
        assert not name.startswith(".")
        assert json.loads(Path("out", name, "manifest.json").read_text())["name"] == name


def alive_in_session(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue
        state, _, _, its_session = text.rsplit(")", 1)[1].split()[:4]
        if int(its_session) == session and state != "Z":
            found.append(text)
    return found


# What a compilation gives


KERNEL_KEYS = {
    "rank": int, "entry": str, "source": str, "binary": str, "schedule": str, "grid": list, "block": list,
    "shared_bytes": int, "dynamic_shared_bytes": int, "registers": int, "spill_bytes": int, "seconds": float,
    "bound": str, "stage_seconds": dict, "tiles": dict, "policy": str, "verified": bool, "verification": dict,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("opencl")
def test_json_has_every_documented_key(here: Path) -> None:
    write("ops.json", [MATMUL, {"op": "softmax", "shape": [33, 17]}])
    result = roller("compile", "ops.json", "--device", "v100", "--top-k", "2", "--verify", "2", "--out", "o", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["name"] for record in records] == ["matmul_65x33x17", "softmax_33x17_axis1"]
    for record in records:
        assert record["device"] == "v100-sxm2-16gb"
        assert 0 < record["construct_seconds"] <= record["total_seconds"]
        assert record["failures"] == []
        assert [kernel["rank"] for kernel in record["kernels"]] == [1, 2]
        for kernel in record["kernels"]:
            assert {key: type(value) for key, value in kernel.items()} == KERNEL_KEYS
            assert kernel["verified"] is True
            assert kernel["spill_bytes"] == 0
            assert kernel["entry"] in Path(kernel["source"]).read_text()
            assert Path(kernel["binary"]).read_bytes()[:4] == b"\x7fELF"
            assert json.loads(Path(kernel["schedule"]).read_text())["block"]
            threads = kernel["block"][0] * kernel["block"][1] * kernel["block"][2]
            assert f"__launch_bounds__({threads})" in Path(kernel["source"]).read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler", "no_kept_kernels")
def test_two_runs_give_the_same_bytes_whatever_the_number_of_processes(here: Path) -> None:
    write("ops.json", [MATMUL, {"op": "reduce", "function": "sum", "shape": [33, 170], "axes": [1]}])
    for out, jobs in (("first", 1), ("second", 1), ("third", 3)):
        result = roller("compile", "ops.json", "--device", "v100", "--top-k", "3", "--jobs", jobs, "--out", out)
        assert result.exit_code == 0, result.stderr
    first = tree(here / "first")
    assert len(first) == 2 * (2 + 3 * 3)
    assert first == tree(here / "second") == tree(here / "third")


@pytest.mark.usefixtures("device_compiler")
@pytest.mark.parametrize(
    ("device", "suffix", "has_binary", "note"),
    [
        ("v100", "cu", True, None),
        ("a100", "cu", True, None),
        ("k80", "cu", False, "no longer compiles for sm_37"),
        ("mi50", "cl", False, "OpenCL"),
    ],
)
def test_every_board_with_a_generator_gives_a_bundle_as_published(
    here: Path, device: str, suffix: str, has_binary: bool, note: str | None
) -> None:
    write("op.json", {**MATMUL, "name": "mine", "epilogue": ["relu"]})
    result = roller("compile", "op.json", "--device", device, "--top-k", "2", "--verify", "0", "--out", "out")
    assert (result.exit_code, result.stderr) == (0, "")
    folder = here / "out" / "mine"
    manifest = json.loads((folder / "manifest.json").read_text())
    jsonschema.validate(manifest, json.loads(roller("schema", "manifest").stdout))
    assert [argument["role"] for argument in manifest["arguments"]] == ["input", "input", "output"]
    assert manifest["arguments"][0] == {"name": "A", "role": "input", "dtype": "float32", "shape": [65, 17]}
    expected = {"manifest.json", "reference.cu"} if suffix == "cu" else {"manifest.json"}
    for rank in (1, 2):
        expected |= {f"kernel_{rank}.{suffix}", f"kernel_{rank}.schedule.json"}
        expected |= {f"kernel_{rank}.cubin"} if has_binary else set()
    assert set(os.listdir(folder)) == expected
    for kernel in manifest["kernels"]:
        assert (kernel["binary"] is not None) == has_binary == (kernel["registers"] is not None)
        assert kernel["verified"] is None
    if note is None:
        assert manifest["notes"] == ["unverified: no kernel was run against the reference"]
    else:
        assert note in manifest["notes"][0]
        # The reason is on the terminal too, which may fold the line.
        assert manifest["notes"][0].split()[0] in result.stdout


@pytest.mark.usefixtures("device_compiler")
def test_a_spec_file_is_a_device(here: Path) -> None:
    spec = Path(catalog.__file__).parent / "devices" / "v100-sxm2-16gb.toml"
    write("op.json", MATMUL)
    write("mine.toml", spec.read_text())
    arguments = ("--device", "mine.toml", "--top-k", "1", "--verify", "0", "--out", "out", "--json")
    result = roller("compile", "op.json", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout)["device"] == "v100-sxm2-16gb"


@pytest.mark.usefixtures("device_compiler")
def test_an_operator_compiled_again_replaces_its_bundle(here: Path) -> None:
    write("op.json", MATMUL)
    for top_k in (2, 1):
        assert roller("compile", "op.json", "--device", "v100", "--top-k", top_k, "--verify", 0).exit_code == 0
    assert sorted(os.listdir("out/matmul_65x33x17")) == [
        "kernel_1.cu", "kernel_1.cubin", "kernel_1.schedule.json", "manifest.json", "reference.cu"
    ]  # fmt: skip


@pytest.mark.slow
def test_operator_files_of_the_repository_follow_the_published_schema() -> None:
    schema = json.loads(roller("schema", "operator").stdout)
    files = [*(ROOT / "examples").glob("*.json"), *(ROOT / "bench/suites").glob("*.json")]
    assert len(files) >= 6
    for file in files:
        jsonschema.validate(json.loads(file.read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"op": "matmul", "m": 8, "n": 8}, schema)


# verify and explain


@pytest.mark.usefixtures("emulator")
def test_verify_counts_what_agrees(here: Path) -> None:
    write("ops.json", [MATMUL, {"op": "softmax", "shape": [33, 17]}])
    result = roller("verify", "ops.json", "--device", "v100", "--top-k", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1].startswith("4 of 4 schedules of 2 operators agree with the reference")
    assert result.stdout.endswith("run by cuda, emulated in 3 orders of threads)\n")
    write("op.json", MATMUL)
    result = roller("verify", "op.json", "--device", "ipu", "--top-k", "1", "--seeds", 2, "--json")
    assert result.exit_code == 0
    (check,) = json.loads(result.stdout)["checks"]
    assert (check["passed"], check["engine"], check["seeds"]) == (True, "emulator", [0, 1])
    assert "races" in check["checks"]


@pytest.mark.usefixtures("opencl")
def test_without_a_compiler_verify_says_what_it_does_instead(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("codegen.verify.engines.emulator_available", lambda: "there is no g++")
    write("op.json", MATMUL)
    result = roller("verify", "op.json", "--device", "v100", "--top-k", 1)
    assert result.exit_code == 0
    assert (
        result.stderr
        == "roller verify: there is no g++: OpenCL runs the kernels, which shows no races; install g++ 12\n"
    )
    assert result.stdout.endswith("run by opencl)\n")


def test_explain_answers_for_a_board_without_kernels(here: Path) -> None:
    write("op.json", MATMUL)
    for device in ("v100", "ipu"):
        result = roller("explain", "op.json", "--device", device)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "How rank 1 was" in result.stdout
    result = roller("devices", "v100", "--json")
    assert json.loads(result.stdout)["name"] == "v100-sxm2-16gb"


def test_no_command_shows_the_help_as_it_is() -> None:
    result = roller()
    assert result.exit_code == 2
    assert result.stdout.startswith("Usage: ")
    assert "  compile " in result.stdout
