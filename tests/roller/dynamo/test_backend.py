"""`torch.compile` with the backend: results, training, changing parameters, wrong kernels, a GPU emulated."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from hal.microbench.cpu.topology import read_topology
from hal.support.errors import InputError

torch = pytest.importorskip("torch")

import roller  # noqa: E402
from roller.dynamo import packed, rewriting  # noqa: E402
from roller.dynamo.backend import MOST_SIZES  # noqa: E402
from roller.dynamo.explanation import explain_model  # noqa: E402
from roller.dynamo.frozen import ModuleSource  # noqa: E402

#: A shipped processor by the width of its vectors, in bits: this one, as far as kernels are concerned.
SPECS = {512: "xeon-platinum-8375c", 256: "epyc-7763"}
WIDTH = read_topology().simd_bits

on_this_processor = [
    pytest.mark.slow,
    pytest.mark.usefixtures("device_compiler", "c_compiler"),
    pytest.mark.skipif(WIDTH not in SPECS, reason=f"no shipped processor has vectors of {WIDTH} bits"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Small(torch.nn.Module):
    """A convolution with a batch norm, a residual, and a linear function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.second = torch.nn.Conv2d(16, 16, 1)
        self.last = torch.nn.Linear(16, 10)

    def forward(self, images: Any) -> Any:
        features = torch.relu(self.norm(self.first(images)))
        features = torch.relu(self.second(features) + features)
        return torch.nn.functional.gelu(self.last(features.mean((2, 3))))


class Interrupted(torch.nn.Module):
    """A linear function, within which Dynamo begins another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, tokens: Any) -> Any:
        tokens = tokens + self.outer(torch.nn.functional.gelu(self.inner(tokens)))
        torch._dynamo.graph_break()
        return 2 * tokens


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"device": SPECS[WIDTH], "cache": folder, "jobs": 1, "fallback": "eager", "competes": False, **more}


def difference(one: Any, other: Any) -> float:
    """Largest difference, relative to the largest number."""
    return float((one - other).abs().max() / other.abs().max())


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels of ours run on PyTorch's threads, of which tests have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class TestOnThisProcessor:
    pytestmark = on_this_processor

    @pytest.mark.usefixtures("two_threads")
    def test_results_are_pytorchs_and_follow_parameters_that_change(self, tmp_path: Path) -> None:
        model, images = Small().eval(), torch.randn(2, 3, 12, 12)
        decisions: list[Any] = []
        chosen = roller.backend(**options(tmp_path))
        chosen.listeners.append(decisions.extend)
        compiled = torch.compile(model, backend=chosen)
        with torch.no_grad():
            assert difference(compiled(images), model(images)) < 1e-5
            assert [decision.functions for decision in decisions] == [
                "convolution relu", "convolution add relu", "addmm mul mul erf add mul",
            ]  # fmt: skip
            assert all(decision.is_taken for decision in decisions)
            model.last.bias.add_(1.0)
            assert difference(compiled(images), model(images)) < 1e-5
            model.second = torch.nn.Conv2d(16, 16, 1)
            assert difference(compiled(images), model(images)) < 1e-5
            more = torch.randn(3, 3, 12, 12)
            assert difference(compiled(more), model(more)) < 1e-5

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_blocks_of_graphs_that_end_within_them_are_made_once_each(
        self, tmp_path: Path, dynamic: bool | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made: list[int] = []
        compiled_code = ModuleSource.code

        def counted(source: ModuleSource, parameters: Any, inputs: Any) -> Any:
            made.append(len(parameters))
            return compiled_code(source, parameters, inputs)

        monkeypatch.setattr(ModuleSource, "code", counted)
        model = torch.nn.Sequential(*(Interrupted() for _ in range(3))).eval()
        decisions: list[Any] = []
        chosen = roller.backend(**options(tmp_path))
        chosen.listeners.append(decisions.extend)
        compiled = torch.compile(model, backend=chosen, dynamic=dynamic)
        with torch.no_grad():
            for _ in range(3):
                tokens = torch.randn(2, 9, 32)
                assert difference(compiled(tokens), model(tokens)) < 1e-5
        assert sum(count > 0 for count in made) == 3
        assert decisions and all(decision.is_taken for decision in decisions)

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_numbers_that_no_kernel_takes_stay_with_pytorch(
        self, tmp_path: Path, dtype: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = Small().eval().to(dtype)
        images = torch.randn(2, 3, 12, 12, dtype=dtype)
        chosen = roller.backend(**options(tmp_path, fallback="inductor"))
        with torch.no_grad(), caplog.at_level(logging.WARNING, logger="roller.backend"):
            assert difference(torch.compile(model, backend=chosen)(images), model(images)) < 1e-2
        assert not caplog.messages

    @pytest.mark.parametrize("fallback", ["eager", "inductor"])
    def test_a_graph_may_have_branches_that_are_graphs(self, tmp_path: Path, fallback: str) -> None:
        first, second = torch.nn.Linear(32, 64).eval(), torch.nn.Linear(32, 64).eval()

        def choose(tokens: Any) -> Any:
            tokens = torch.relu(tokens @ tokens.new_ones(32, 32))
            return torch.cond(tokens.sum() > 0, first, second, (tokens,))

        compiled = torch.compile(choose, backend=roller.backend(**options(tmp_path, fallback=fallback)))
        with torch.no_grad():
            for tokens in (torch.ones(4, 32), -torch.ones(4, 32)):
                assert difference(compiled(tokens), choose(tokens)) < 1e-5

    def test_a_graph_that_cannot_be_frozen_keeps_its_parameters_as_inputs(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("constants cannot be folded\nmore of it")

        monkeypatch.setattr(torch._inductor.constant_folding, "constant_fold", fail)
        model, images = Small().eval(), torch.randn(2, 3, 12, 12)
        compiled = torch.compile(model, backend=roller.backend(**options(tmp_path, fallback="inductor")))
        with torch.no_grad(), caplog.at_level(logging.WARNING, logger="roller.backend"):
            assert difference(compiled(images), model(images)) < 1e-5
        assert caplog.messages == ["a graph's parameters stay its inputs: RuntimeError: constants cannot be folded"]

    def test_sizes_that_keep_changing_stay_open(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU()).eval()
        graphs: list[Any] = []
        chosen = roller.backend(**options(tmp_path))
        chosen.listeners.append(graphs.append)
        compiled = torch.compile(model, backend=chosen)
        with torch.no_grad():
            for rows in range(4, 16):
                tokens = torch.randn(rows, 32)
                assert difference(compiled(tokens), model(tokens)) < 1e-5
        assert [decision.is_taken for (decision,) in graphs] == [True] * MOST_SIZES + [False]
        assert graphs[-1][0].reason == "its sizes change from call to call"

    def test_sizes_that_are_marked_to_change_stay_open(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU()).eval()
        compiled = torch.compile(model, backend=roller.backend(**options(tmp_path)), fullgraph=True)
        with torch.no_grad():
            tokens = torch.randn(6, 32)
            torch._dynamo.mark_dynamic(tokens, 0)
            assert difference(compiled(tokens), model(tokens)) < 1e-5
            more = torch.randn(9, 32)
            assert difference(compiled(more), model(more)) < 1e-5

    def test_statistics_that_the_graph_writes_are_no_constants(self, tmp_path: Path) -> None:
        model, images = Small(), torch.randn(2, 3, 12, 12)
        other = Small()
        compiled = torch.compile(model, backend=roller.backend(**options(tmp_path)))
        with torch.no_grad():
            for _ in range(3):
                assert difference(compiled(images), other(images)) < 1e-5
        assert difference(model.norm.running_mean, other.norm.running_mean) < 1e-5
        assert model.norm.num_batches_tracked == 3

    @pytest.mark.parametrize("fallback", ["eager", "inductor"])
    def test_images_leave_the_graph_in_the_order_that_pytorch_gives_them(self, tmp_path: Path, fallback: str) -> None:
        class Shuffled(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = torch.nn.Conv2d(4, 8, 3, groups=2), torch.nn.Conv2d(8, 8, 1)
                self.grouped = torch.nn.Conv2d(8, 8, 3, padding=1, groups=8)

            def forward(self, images: Any) -> Any:
                features = torch.relu(self.first(images))
                features = features.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2)
                features = self.second(torch.nn.functional.max_pool2d(features, 2))
                return features, self.grouped(features).flatten(1), features.mean((2, 3), keepdim=True) * features

        model, images = Shuffled().eval(), torch.randn(2, 4, 12, 10)
        with torch.no_grad():
            expected = model(images)
            compiled = torch.compile(model, backend=roller.backend(**options(tmp_path) | {"fallback": fallback}))
            for result, right in zip(compiled(images), expected, strict=True):
                assert difference(result, right) < 1e-5
                assert result.stride() == right.stride()

    def test_weights_that_inductor_would_pack_are_ours_first(self, tmp_path: Path) -> None:
        model, rows = torch.nn.Linear(64, 96).eval(), torch.randn(32, 64)
        decisions: list[Any] = []
        chosen = roller.backend(**options(tmp_path))
        chosen.listeners.append(decisions.extend)
        with torch.no_grad():
            with torch._inductor.config.patch(freezing=True):
                torch.compile(model)(rows)
            torch.compile(model, backend=chosen)(rows)
        assert [decision.is_taken for decision in decisions] == [True]

    def test_the_library_keeps_what_it_does_faster(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("roller.dynamo.kernels.KernelShelf._compile", None)
        monkeypatch.setitem(packed.PACKED_SHARES, "matmul", 1e3)
        model, rows = torch.nn.Linear(512, 512).eval(), torch.randn(256, 512)
        decisions: list[Any] = []
        chosen = roller.backend(**options(tmp_path, competes=True))
        chosen.listeners.append(decisions.extend)
        with torch.no_grad():
            assert difference(torch.compile(model, backend=chosen)(rows), model(rows)) < 1e-5
        assert decisions[0].reason.startswith("oneDNN on packed weights is expected to take ")

    @pytest.mark.parametrize(("ours", "library"), [(1e-3, 2e-3), (2e-3, 1e-3)])
    def test_what_is_in_doubt_is_timed_here_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: float, library: float
    ) -> None:
        monkeypatch.setattr(packed, "DOUBTFUL", 1e9)
        rounds: list[int] = []

        def in_turns(pairs: Any) -> list[tuple[float, float]]:
            outputs = [tuple(call.run() for call in pair) for pair in pairs]
            assert all(difference(kernel, product + 1.0) < 1e-5 for kernel, product in outputs)
            rounds.append(len(pairs))
            return [(ours, library)] * len(pairs)

        monkeypatch.setattr(packed, "_in_turns", in_turns)
        model = torch.nn.Sequential(torch.nn.Linear(96, 96), torch.nn.Linear(96, 96)).eval()
        for layer in model:
            torch.nn.init.ones_(layer.bias)
        decisions: list[Any] = []
        for _ in range(2):
            torch.compiler.reset()
            chosen = roller.backend(**options(tmp_path, competes=True))
            chosen.listeners.append(decisions.extend)
            rows = torch.randn(64, 96)
            with torch.no_grad():
                assert difference(torch.compile(model, backend=chosen)(rows), model(rows)) < 1e-5
        assert {decision.is_taken for decision in decisions} == {ours < library} and len(decisions) == 4
        assert ours < library or "by times of its longest products here" in decisions[0].reason
        assert rounds == [1]

    def test_what_cannot_be_timed_is_expected(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuses(*_: Any) -> Any:
            raise OSError("no such operator")

        monkeypatch.setattr(packed, "DOUBTFUL", 1e9)
        monkeypatch.setattr(packed, "library_call", refuses)
        model, rows = torch.nn.Linear(96, 96).eval(), torch.randn(64, 96)
        with torch.no_grad():
            compiled = torch.compile(model, backend=roller.backend(**options(tmp_path, competes=True)))
            assert difference(compiled(rows), model(rows)) < 1e-5
        assert not (tmp_path / packed.TRIALS).exists()

    def test_a_kernel_is_compiled_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, rows = torch.nn.Linear(8, 24).eval(), torch.randn(4, 8)
        with torch.no_grad():
            torch.compile(model, backend=roller.backend(**options(tmp_path)))(rows)
            torch.compiler.reset()
            monkeypatch.setattr("roller.dynamo.kernels.KernelShelf._compile", None)
            compiled = torch.compile(model, backend=roller.backend(**options(tmp_path)))
            assert difference(compiled(rows), model(rows)) < 1e-5

    def test_gradients_are_pytorchs(self, tmp_path: Path) -> None:
        model, images = Small(), torch.randn(2, 3, 8, 8)
        model(images).sum().backward()
        expected = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        torch.compile(model, backend=roller.backend(**options(tmp_path)))(images).sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert (parameter.grad - gradient).abs().max() <= 1e-3 * max(1e-3, float(gradient.abs().max()))

    def test_a_wrong_kernel_stays_out_with_a_line_of_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        right = rewriting.region_operator

        def wrong(*arguments: Any, **keywords: Any) -> Any:
            op = right(*arguments, **keywords)
            return lambda *tensors: op(*tensors) + 1.0

        monkeypatch.setattr(rewriting, "region_operator", wrong)
        model, rows = torch.nn.Linear(8, 24).eval(), torch.randn(4, 8)
        with torch.no_grad(), caplog.at_level(logging.WARNING, "roller.backend"):
            compiled = torch.compile(model, backend=roller.backend(**options(tmp_path)))
            assert difference(compiled(rows), model(rows)) < 1e-6
        (warning,) = caplog.records
        assert " stays with PyTorch: its results are off by " in warning.message

    def test_a_kernel_that_does_not_run_stays_out(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def refuses(*_: Any) -> Any:
            raise InputError("kernel", "needs what this machine lacks", "take another")

        monkeypatch.setattr(rewriting, "region_operator", lambda *_, **__: refuses)
        model, rows = torch.nn.Linear(8, 24).eval(), torch.randn(4, 8)
        with torch.no_grad(), caplog.at_level(logging.WARNING, "roller.backend"):
            compiled = torch.compile(model, backend=roller.backend(**options(tmp_path)))
            assert difference(compiled(rows), model(rows)) < 1e-6
        assert "it does not run here: InputError: kernel: needs what" in caplog.records[0].message

    @pytest.mark.parametrize("step", ["plan", "_Rewriting.put", "_Rewriting.settle"])
    def test_a_graph_that_cannot_be_rewritten_stays_as_it_was(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, step: str
    ) -> None:
        def fails(*_: Any, **__: Any) -> Any:
            raise InputError("device.layers.dram.bandwidth_bytes_per_second", "got 2, expected 1", "measure it anew")

        monkeypatch.setattr(f"{rewriting.__name__}.{step}", fails)
        model, images = Small().eval(), torch.randn(2, 3, 12, 12)
        with torch.no_grad(), caplog.at_level(logging.WARNING, "roller.backend"):
            compiled = torch.compile(model, backend=roller.backend(**options(tmp_path)))
            assert difference(compiled(images), model(images)) < 1e-6
        (warning,) = caplog.records
        assert warning.message.startswith("a graph stays with PyTorch: InputError: device.layers.dram")

    def test_an_explanation_has_a_row_for_what_is_alike(self, tmp_path: Path) -> None:
        class Twice(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

            def forward(self, rows: Any) -> Any:
                for layer in self.layers:
                    rows = torch.relu(layer(rows))
                return rows

        explanation = explain_model(Twice().eval(), torch.randn(4, 8), **options(tmp_path))
        assert all(decision.is_taken for decision in explanation.decisions)
        assert len(explanation.decisions) == 2
        assert len(explanation.table().rows) == 1
        assert str(explanation).splitlines()[-1].startswith("2 of 2 sums of products in 1 graphs, ")


class Feedforward(torch.nn.Module):
    """A normalised feed-forward layer with a gate and a residual, as transformers have."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = torch.nn.LayerNorm(24)
        self.up, self.gate, self.down = torch.nn.Linear(24, 40), torch.nn.Linear(24, 40), torch.nn.Linear(40, 24)

    def forward(self, tokens: Any) -> Any:
        rows = self.norm(tokens)
        return tokens + self.down(torch.nn.functional.silu(self.gate(rows)) * self.up(rows))


class Separable(torch.nn.Module):
    """A depthwise and a point-wise convolution, and a product of every two rows of their result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.deep = torch.nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=8)
        self.point = torch.nn.Conv2d(8, 16, 1)

    def forward(self, images: Any) -> Any:
        rows = torch.nn.functional.hardswish(self.point(torch.relu(self.deep(images)))).flatten(2)
        return (rows @ rows.transpose(1, 2)) * 0.25


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler", "emulator")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("network", "shape", "products"),
    [(Small, (2, 3, 8, 8), 3), (Feedforward, (2, 6, 24), 3), (Separable, (2, 8, 8, 8), 3)],
)
def test_kernels_of_a_gpu_run_emulated(
    tmp_path: Path, network: Any, shape: tuple[int, ...], products: int, dtype: Any
) -> None:
    model, inputs = network().eval().to(dtype), torch.randn(shape, dtype=dtype)
    chosen = roller.backend(device="v100", cache=tmp_path, jobs=1, fallback="eager", competes=False, emulate=True)
    decisions: list[Any] = []
    chosen.listeners.append(decisions.extend)
    with torch.no_grad():
        assert difference(torch.compile(model, backend=chosen)(inputs), model(inputs)) < 1e-2
    assert [decision.reason for decision in decisions] == [""] * products


def test_the_backend_is_registered_by_its_name() -> None:
    (entry,) = [each for each in entry_points(group="torch_dynamo_backends") if each.name == "roller"]
    assert entry.load() is roller.dynamo.backend.roller


@pytest.mark.parametrize(
    ("given", "field"),
    [({"fallback": "jit"}, "fallback"), ({"device": "h900"}, "device")],
)
def test_options_that_mean_nothing_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as error:
        roller.backend(**given)
    assert error.value.field == field


def test_options_of_torch_compile_are_the_backends() -> None:
    chosen = roller.backend()
    with pytest.raises(InputError, match="is no option of the backend"):
        chosen(None, [], options={"max_autotune": True})
    with pytest.raises(InputError, match="Inductor's"):
        chosen(None, [], mode="max-autotune")
