"""Recording real training steps on the CPU, and reading them back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daydream.record.model import bucketed
from daydream.record.record import Recorded, record, record_script
from daydream.trace.files import read_trace
from daydream.trace.trace import Category, Trace
from hal.support.errors import InputError

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 4, 3)
        self.head = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5, bias=False))

    def forward(self, images: Any) -> Any:
        return self.head(self.stem(images))


def train(recorder: Any, model: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.nn.CrossEntropyLoss()
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(torch.ones(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()
        optimizer.step()
        recorder.step()


def names(trace: Trace, category: Category) -> list[str]:
    return [trace.text(row) for row in np.flatnonzero(trace.category == category)]


def steps(trace: Trace) -> list[str]:
    return [name for name in names(trace, Category.ANNOTATION) if name.startswith("ProfilerStep#")]


class TestRecord:
    @pytest.fixture(scope="class")
    @staticmethod
    def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
        path = tmp_path_factory.mktemp("record") / "net.json.gz"
        model = Net()
        with record(path, steps=3, warmup=2, model=model) as recorder:
            train(recorder, model, 7)
        assert (recorder.written, recorder.recorded) == (path, 3)
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]
        return read_trace(path)

    def test_steps_after_the_warm_up(self, trace: Trace) -> None:
        assert steps(trace) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
        assert trace.warnings == ()

    def test_shapes(self, trace: Trace) -> None:
        (row, *others) = (row for row in range(len(trace)) if trace.text(row) == "aten::conv2d")
        assert trace.arguments[row]["Input Dims"][:3] == [[2, 3, 8, 8], [4, 3, 3, 3], [4]]
        assert len(others) == 2

    def test_arrows_join_forward_and_backward(self, trace: Trace) -> None:
        forward, backward = trace.forward_backward.T
        assert (trace.sequence[forward] == trace.sequence[backward]).all()
        joined = {(trace.text(a), trace.text(b)) for a, b in trace.forward_backward}
        assert ("aten::convolution", "ConvolutionBackward0") in joined
        assert len(forward) >= 3 * 4

    def test_gradients_in_the_order_of_the_backward_pass(self, trace: Trace) -> None:
        gradients = trace.metadata["gradients"]
        assert {gradient["name"] for gradient in gradients[1:]} == {"stem.weight", "stem.bias"}
        assert gradients[0] == {
            "name": "head.2.weight",
            "module": "head.2",
            "bytes": 2880,
            "elements": 720,
            "dtype": "float32",
            "order": 0,
        }
        assert [gradient["order"] for gradient in gradients] == [0, 1, 2]

    def test_the_rest_of_what_is_added(self, trace: Trace) -> None:
        added = {key: value for key, value in trace.metadata.items() if key != "gradients"}
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        machine = {"torch": torch.__version__, "device": device, "cores": os.cpu_count()}
        assert added == {"version": 1, **machine, "buckets": [], "batch": 2}

    def test_modules_are_ranges_around_their_operators(self, trace: Trace) -> None:
        ranges = [name for name in names(trace, Category.ANNOTATION) if name.startswith("nn.Module: ")]
        paths = ["Net", "stem", "head", "head.0", "head.1", "head.2"]
        assert ranges[:6] == [f"nn.Module: {path}" for path in paths]
        assert ranges.count("nn.Module: stem") == 3
        row = next(row for row in range(len(trace)) if trace.text(row) == "nn.Module: stem")
        inner = next(row for row in range(len(trace)) if trace.text(row) == "aten::conv2d")
        assert trace.start_us[row] <= trace.start_us[inner]
        ends = trace.start_us + trace.duration_us
        assert ends[inner] <= ends[row]

    def test_plain_json_without_ranges_and_with_stacks(self, tmp_path: Path) -> None:
        model = Net()
        with record(tmp_path / "t.json", steps=1, warmup=0, with_modules=False, with_stack=True, batch=64) as recorder:
            train(recorder, model, 2)
        document = json.loads((tmp_path / "t.json").read_text())
        assert document["daydream"]["batch"] == 64
        assert len(document["daydream"]["gradients"]) == 3
        trace = read_trace(tmp_path / "t.json")
        assert not [name for name in names(trace, Category.ANNOTATION) if name.startswith("nn.Module")]
        assert any(name.startswith("nn.Module: Conv2d") for name in names(trace, Category.PYTHON))

    def test_fewer_steps_than_asked_for(self, tmp_path: Path) -> None:
        with record(tmp_path / "t.json", steps=5, warmup=1) as recorder:
            train(recorder, Net(), 3)
        assert recorder.recorded == 2
        assert len(read_trace(tmp_path / "t.json")) > 0

    def test_no_step_at_all_writes_nothing(self, tmp_path: Path) -> None:
        with record(tmp_path / "t.json") as recorder:
            pass
        assert recorder.written is None
        assert list(tmp_path.iterdir()) == []

    def test_failure_writes_nothing_and_leaves_no_hook(self, tmp_path: Path) -> None:
        model = Net()
        with pytest.raises(ZeroDivisionError), record(tmp_path / "t.json", warmup=0, model=model) as recorder:
            train(recorder, model, 1)
            raise ZeroDivisionError
        assert list(tmp_path.iterdir()) == []
        assert not torch.nn.modules.module._global_forward_pre_hooks
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())

    def test_a_file_that_is_there_stays_until_the_new_one_is_complete(self, tmp_path: Path) -> None:
        (tmp_path / "t.json").write_text("old")
        with record(tmp_path / "t.json", steps=1, warmup=0) as recorder:
            assert (tmp_path / "t.json").read_text() == "old"
            train(recorder, Net(), 1)
        assert len(read_trace(tmp_path / "t.json")) > 0

    def test_two_models_and_shared_parameters(self, tmp_path: Path) -> None:
        first, second = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        second.weight = first.weight
        with record(tmp_path / "t.json", steps=1, warmup=1) as recorder:
            for _ in range(2):
                second(first(torch.ones(2, 3))).sum().backward()
                recorder.step()
        gradients = read_trace(tmp_path / "t.json").metadata["gradients"]
        assert {gradient["name"] for gradient in gradients} == {"weight", "bias", "Linear.bias"}

    def test_a_forward_pass_that_fails_closes_its_ranges(self, tmp_path: Path) -> None:
        model = Net()
        with record(tmp_path / "t.json", steps=1, warmup=0) as recorder:
            with pytest.raises(RuntimeError):
                model(torch.ones(2, 7, 8, 8))
            train(recorder, model, 1)
        trace = read_trace(tmp_path / "t.json")
        first, second = (row for row in range(len(trace)) if trace.text(row) == "nn.Module: Net")
        assert trace.start_us[first] + trace.duration_us[first] <= trace.start_us[second]

    def test_compiled_models(self, tmp_path: Path) -> None:
        model = Net()
        compiled = torch.compile(model, backend="eager")
        with record(tmp_path / "t.json", steps=1, warmup=1) as recorder:
            train(recorder, compiled, 2)
        gradients = read_trace(tmp_path / "t.json").metadata["gradients"]
        assert {gradient["name"] for gradient in gradients} == {"head.2.weight", "stem.weight", "stem.bias"}

    @pytest.mark.parametrize(
        ("path", "options", "problem"),
        [
            ("t.txt", {}, "no suffix"),
            ("missing/t.json", {}, "missing"),
            ("t.json", {"steps": 0}, "at least 1"),
            ("t.json", {"warmup": -1}, "0 or more"),
        ],
    )
    def test_wrong_input(self, path: str, options: dict[str, Any], problem: str, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=problem), record(tmp_path / path, **options):
            pass

    def test_without_pytorch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(InputError, match=r"pip install 'roller\[record\]'"), record(tmp_path / "t.json"):
            pass

    def test_each_rank_writes_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("RANK", "3")
        with record(tmp_path / "t.json.gz", steps=1, warmup=0) as recorder:
            train(recorder, Net(), 1)
        assert [entry.name for entry in tmp_path.iterdir()] == ["t.rank3.json.gz"]


class TestBuckets:
    @pytest.fixture
    @staticmethod
    def group(tmp_path: Path) -> Iterator[None]:
        if not torch.distributed.is_available():
            pytest.skip("PyTorch without distributed")
        store = f"file://{tmp_path / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()

    def test_of_distributed_data_parallel(self, group: None, tmp_path: Path) -> None:
        layers = [torch.nn.Linear(600, 600) for _ in range(3)]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=2)
        with record(tmp_path / "t.json", steps=1, warmup=3, model=model) as recorder:
            for _ in range(4):
                model(torch.ones(4, 600)).sum().backward()
                recorder.step()
        trace = read_trace(tmp_path / "t.json")
        buckets, gradients = trace.metadata["buckets"], trace.metadata["gradients"]
        assert sorted(chain.from_iterable(buckets)) == sorted(
            f"{layer}.{kind}" for layer in range(3) for kind in ("bias", "weight")
        )
        assert {gradient["name"] for gradient in gradients} == set(chain.from_iterable(buckets))
        assert any(name.startswith("2.") for name in buckets[0])
        assert len(buckets) > 1
        assert trace.distributed["world_size"] == 1

    def test_before_the_reducer_has_made_its_own(self, group: None, tmp_path: Path) -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2)))
        with record(tmp_path / "t.json", steps=1, warmup=0) as recorder:
            model(torch.ones(1, 2)).sum().backward()
            recorder.step()
        assert [sorted(bucket) for bucket in read_trace(tmp_path / "t.json").metadata["buckets"]] == [
            ["0.bias", "0.weight"]
        ]

    def test_by_the_rule(self) -> None:
        sizes = {"e": 100_000, "d": 200_000, "c": 5_000_000, "b": 2_000_000, "a": 10}
        ready = [(name, torch.empty(size), "cpu") for name, size in sizes.items()]
        half = ("h", torch.empty(10, dtype=torch.float16), "cpu")
        assert bucketed([*ready[:1], half, *ready[1:]]) == [["e", "d"], ["c", "b"], ["h"], ["a"]]


SCRIPT = """
import sys, torch
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    scheduler.step()
    print("step", step)
sys.exit(int(sys.argv[2]))
"""


class TestScript:
    def run(self, tmp_path: Path, text: str, *args: str, **options: Any) -> Recorded:
        (tmp_path / "train.py").write_text(text)
        return record_script(tmp_path / "t.json.gz", tmp_path / "train.py", args, **options)

    def test_steps_between_optimizer_steps(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        recorded = self.run(tmp_path, SCRIPT, "100", "0", steps=2, warmup=3)
        assert recorded == Recorded(tmp_path / "t.json.gz", 2, 0)
        trace = read_trace(tmp_path / "t.json.gz")
        assert len(steps(trace)) == 2
        ranges = names(trace, Category.ANNOTATION)
        assert ranges.count("Optimizer.step#SGD.step") == 2
        assert ranges.count("nn.Module: 0") == 2
        assert [gradient["module"] for gradient in trace.metadata["gradients"]] == ["1", "1", "0", "0"]
        assert trace.metadata["batch"] == 8
        # The script was ended by the last of 1 + 3 + 2 steps.
        assert capfd.readouterr().out.split()[-1] == "4"

    def test_whole_steps_are_within_their_range(self, tmp_path: Path) -> None:
        self.run(tmp_path, SCRIPT, "100", "0", steps=2, warmup=1)
        trace = read_trace(tmp_path / "t.json.gz")
        ends = trace.start_us + trace.duration_us
        rows = [row for row in range(len(trace)) if trace.text(row) == "Optimizer.step#SGD.step"]
        marks = [row for row in range(len(trace)) if trace.text(row).startswith("ProfilerStep#")]
        for row, mark in zip(rows, marks, strict=True):
            assert trace.start_us[mark] <= trace.start_us[row]
            assert ends[row] <= ends[mark]

    def test_script_runs_on_and_keeps_its_exit_code(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        recorded = self.run(tmp_path, SCRIPT, "9", "7", steps=1, warmup=1, stop=False)
        assert (recorded.exit_code, recorded.steps, recorded.note) == (7, 1, "")
        assert capfd.readouterr().out.split()[-1] == "8"

    def test_no_optimizer_is_one_step(self, tmp_path: Path) -> None:
        recorded = self.run(tmp_path, "import torch\ntorch.nn.Linear(3, 3)(torch.ones(2, 3))\n")
        assert (recorded.steps, recorded.exit_code) == (1, 0)
        assert recorded.note == "no optimizer step was seen: the whole run is recorded, as one step"
        trace = read_trace(tmp_path / "t.json.gz")
        assert len(steps(trace)) == 1
        assert "aten::linear" in names(trace, Category.OPERATOR)

    def test_too_few_steps(self, tmp_path: Path) -> None:
        recorded = self.run(tmp_path, SCRIPT, "2", "0", steps=2, warmup=3)
        assert recorded.path is None
        assert "ended after 2 optimizer steps" in recorded.note
        assert [entry.name for entry in tmp_path.iterdir()] == ["train.py"]

    def test_some_of_the_steps(self, tmp_path: Path) -> None:
        recorded = self.run(tmp_path, SCRIPT, "4", "0", steps=9, warmup=1)
        assert (recorded.steps, recorded.note) == (2, "the script ended before 9 steps were recorded")

    @pytest.mark.parametrize(
        ("text", "code", "message"),
        [
            ("raise ValueError('broken')", 1, "ValueError: broken"),
            ("import sys; sys.exit('no data')", 1, "no data"),
            ("import sys; sys.exit(3)", 3, ""),
            ("1 +", 1, "SyntaxError"),
        ],
    )
    def test_failing_scripts(
        self, text: str, code: int, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        recorded = self.run(tmp_path, text)
        assert (recorded.path, recorded.exit_code) == (None, code)
        assert recorded.note == "no trace was written: the script failed"
        assert message in capfd.readouterr().err

    def test_arguments_and_neighbouring_modules(self, tmp_path: Path) -> None:
        (tmp_path / "neighbour.py").write_text("ANSWER = 42")
        before = (list(sys.argv), list(sys.path))
        recorded = self.run(tmp_path, "import sys, neighbour\nsys.exit(len(sys.argv) + neighbour.ANSWER)", "--a", "b")
        assert recorded.exit_code == 45
        assert (sys.argv, sys.path) == before

    def test_no_script(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no such file"):
            record_script(tmp_path / "t.json", tmp_path / "train.py")
