"""PyTorch's estimators with our prices: modules, memory, what is run as on a board, what is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from daydream.capture.captured import Capture, CapturedOperator  # noqa: E402
from daydream.capture.pytorch.step import Subject, capture  # noqa: E402
from daydream.graph.graph import Phase  # noqa: E402
from daydream.operators.calls import operator_prices  # noqa: E402
from daydream.planners import RollerRuntimeEstimator, RollerSACEstimator, board_operators, times  # noqa: E402
from hal.catalog import load_device  # noqa: E402
from hal.support.errors import InputError  # noqa: E402

MODE = "operator-level-cost-model"


def network() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 128))


def encoder(dtype: Any = torch.float32) -> Any:
    return torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.1, dtype=dtype)


def step_estimated(device: str = "cpu", estimator: Any = None) -> Any:
    estimator = estimator or RollerRuntimeEstimator("h100")
    with FakeTensorMode(), torch.device(device):
        model, batch = network(), torch.randn(512, 64)
        with estimator(MODE):
            model(batch).sum().backward()
    return estimator


@pytest.fixture(scope="module")
def captured() -> Capture:
    with torch.device("meta"):
        subject = Subject(
            title="network", model=network(), args=(torch.randn(512, 64),), loss=torch.sum, optimizer="none"
        )
    return capture(subject, training=True)


def milliseconds(operators: list[CapturedOperator]) -> float:
    calls = [(each.name, each.inputs, each.outputs) for each in operators if each.launches]
    return sum(price.seconds for price in operator_prices(calls, load_device("h100"))) * 1e3


def test_a_modules_time_is_the_sum_of_its_operators_prices(captured: Capture) -> None:
    estimator = step_estimated()
    for number, module in enumerate(captured.modules):
        if not module.path:
            continue
        of_module = [each for each in captured.operators if each.module == number]
        forward = milliseconds([each for each in of_module if each.phase == Phase.FORWARD])
        backward = milliseconds([each for each in of_module if each.phase == Phase.BACKWARD])
        runtimes = estimator.mod_runtimes[f"Sequential.{module.path}"]
        assert forward > 0 and backward > 0
        assert runtimes["fw"] == pytest.approx(forward, rel=1e-9)
        assert runtimes["bw"] == pytest.approx(backward, rel=1e-9)


def test_a_steps_time_is_the_sum_of_all_prices(captured: Capture) -> None:
    assert step_estimated().total_runtime == pytest.approx(milliseconds(list(captured.operators)), rel=1e-9)


def test_tensors_on_meta_give_the_same_times() -> None:
    assert step_estimated("meta").mod_runtimes == step_estimated("cpu").mod_runtimes


def test_a_slower_board_takes_longer() -> None:
    assert step_estimated(estimator=RollerRuntimeEstimator("v100")).total_runtime > step_estimated().total_runtime


def test_every_distinct_call_is_priced_once_and_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Counter[Any] = Counter()
    batches = []

    def counted(calls: list[Any], device: Any) -> Any:
        asked.update(calls)
        batches.append(len(calls))
        return operator_prices(calls, device)

    monkeypatch.setattr(times, "operator_prices", counted)
    estimator = step_estimated()
    before = estimator.total_runtime
    step_estimated(estimator=estimator)
    assert set(asked.values()) == {1}
    assert batches == [len(asked)]
    assert estimator.total_runtime == before


@pytest.mark.parametrize(("dtype", "attention"), ((torch.float32, "efficient"), (torch.bfloat16, "flash")))
@pytest.mark.parametrize("device", ("cpu", "meta"))
def test_attention_and_dropout_are_the_boards_operators(device: str, dtype: Any, attention: str) -> None:
    estimator = RollerRuntimeEstimator("h100")
    with FakeTensorMode(), torch.device(device):
        model, batch = encoder(dtype), torch.randn(4, 64, 128, dtype=dtype)
        with estimator(MODE):
            model(batch)
    names = {name for name, _, _ in estimator.times.priced}
    assert {f"aten::_scaled_dot_product_{attention}_attention", "aten::native_dropout", "aten::addmm"} <= names
    assert not names & {"aten::bernoulli_", "aten::_softmax", "prim::device"}


def test_afterwards_a_processor_has_its_own_operators_again() -> None:
    step_estimated()
    torch.manual_seed(0)
    dropped = torch.nn.functional.dropout(torch.ones(64), 0.5)
    assert sorted(set(dropped.tolist())) == [0.0, 2.0]
    with pytest.raises(AssertionError, match="FakeTensorMode"), RollerRuntimeEstimator("h100")(MODE):
        pass
    with pytest.raises(RuntimeError), board_operators():
        raise RuntimeError
    assert torch.nn.functional.dropout(torch.ones(8), 0.0).tolist() == [1.0] * 8


def test_what_is_asked_wrongly_is_reported_in_a_line() -> None:
    with pytest.raises(InputError, match="device"):
        RollerRuntimeEstimator("h1000")
    with pytest.raises(InputError, match="name an NVIDIA board"):
        RollerSACEstimator("epyc-9654")
    for estimator in (RollerRuntimeEstimator("h100"), RollerSACEstimator("h100")):
        with pytest.raises(InputError, match="operator-level-cost-model"):
            estimator("operator-level-benchmark")


# Selective activation checkpointing


def stats(device: str = "h100") -> Any:
    estimator = RollerSACEstimator(device)
    with FakeTensorMode():
        model, batch = torch.nn.Sequential(encoder(), encoder()), torch.randn(16, 128, 128)
        with estimator(MODE):
            model(batch)
    return estimator


def test_stats_of_what_can_be_recomputed_have_our_times() -> None:
    estimator = stats()
    runtime = RollerRuntimeEstimator("h100")
    with FakeTensorMode():
        model, batch = torch.nn.Sequential(encoder(), encoder()), torch.randn(16, 128, 128)
        with runtime(MODE):
            model(batch)
    of_layer = estimator.sac_mod_stats["Sequential.0"]
    skipped = runtime.mod_runtimes["Sequential.0"]["fw"] - sum(of_layer.runtimes)
    # PyTorch leaves copies out, which recomputing never repeats.
    copies = [call for call in runtime.times.priced if call[0] == "aten::clone"]
    assert 0 <= skipped <= sum(runtime.times.milliseconds(call) for call in copies) + 1e-9
    assert all(time > 0 for name, time in zip(of_layer.func_names, of_layer.runtimes, strict=True) if "mm" in name)
    assert all(of_layer.runtimes[view] == 0 for view in of_layer.view_like_ops)
    order = estimator.sac_mod_greedy_order_meta["Sequential.0"].msps_meta
    assert [each.msps for each in order] == sorted((each.msps for each in order), reverse=True)


def test_pytorchs_solver_takes_the_estimates() -> None:
    pytest.importorskip("pulp")
    pytest.importorskip("pwlf")
    from torch.distributed._tools.ilp_utils import aggregate_stats, get_peak_memory_runtime_baseline, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.sac_ilp import sac_milp

    with FakeTensorMode():
        model = torch.nn.Sequential(encoder(), encoder())
        batch = torch.randn(64, 256, 128)
        memory = MemTracker()
        memory.track_external(model, batch)
        with board_operators(), memory:
            for number in range(2):
                model(batch).sum().backward()
                if not number:
                    memory.reset_mod_stats()
        runtime, recomputed = RollerRuntimeEstimator("h100"), RollerSACEstimator("h100")
        with runtime(MODE):
            model(batch).sum().backward()
        with recomputed(MODE):
            model(batch)
    graph = parse_module_info(aggregate_stats(model, memory, runtime, recomputed, torch.device("cpu")))
    peak, compute = get_peak_memory_runtime_baseline(graph)
    assert compute == pytest.approx(sum(runtime.mod_runtimes["Sequential"].values()))
    chosen, milliseconds_more, bound = sac_milp(graph, memory_budget=0.8 * peak / 2**30)
    assert chosen and 0 < milliseconds_more < compute and 0 < bound <= 0.8 * peak
