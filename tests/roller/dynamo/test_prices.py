"""Time of a model with the backend on a processor, before anything is compiled."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from hal.catalog import load_device
from hal.microbench import toml_text
from hal.support.errors import InputError

torch = pytest.importorskip("torch")

import roller  # noqa: E402  (behind the skip without PyTorch)
from roller.dynamo import prices  # noqa: E402
from roller.dynamo.prices import (  # noqa: E402
    CALL_SECONDS,
    GRAPH_SECONDS,
    PARAMETER_SECONDS,
    PRODUCT_SHARE,
    product_share,
)


class Block(torch.nn.Module):
    """A norm, attention and a residual."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            torch.nn.LayerNorm(width),
            torch.nn.Linear(width, 3 * width),
            torch.nn.Linear(width, width),
        )

    def forward(self, tokens: Any) -> Any:
        query, key, value = self.inner(self.norm(tokens)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        heads = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.outer(heads.transpose(1, 2).flatten(2)) + tokens


def predicted(tmp_path: Path, tokens: int, **options: Any) -> Any:
    inputs = torch.randn(2, tokens, 64)
    return roller.predict_model(Block().eval(), inputs, device="epyc-7763", cache=tmp_path, **options)


def test_a_step_is_its_kernels_the_library_loops_and_calls(tmp_path: Path) -> None:
    step = predicted(tmp_path, 48, competes=False)
    assert [decision.is_taken for decision in step.decisions] == [True, True]
    price = step.price
    assert price.kernels == pytest.approx(sum(decision.seconds for decision in step.decisions))
    assert price.library > 0 and price.loops > 0
    # Two kernels, attention, the norm's loop and a copy of the heads.
    assert price.calls == pytest.approx(GRAPH_SECONDS + 6 * PARAMETER_SECONDS + 5 * CALL_SECONDS)
    assert price.seconds == pytest.approx(price.kernels + price.library + price.loops + price.calls)
    assert not list(tmp_path.glob("*/manifest.json"))


def test_calls_begin_with_lines_of_memory_where_tensors_leave_no_room_for_them(tmp_path: Path) -> None:
    device = load_device("epyc-7763")
    small = msgspec.structs.replace(
        device,
        name="small",
        layers=tuple(
            msgspec.structs.replace(layer, capacity_bytes=1 << 20) if layer.name == "l3" else layer
            for layer in device.layers
        ),
    )
    (tmp_path / "small.toml").write_text(toml_text(small))
    roomy, crowded = (
        roller.predict_model(
            Block(512).eval(), torch.randn(2, 48, 512), device=name, cache=tmp_path, competes=False
        ).price.calls
        for name in ("epyc-7763", str(tmp_path / "small.toml"))
    )
    assert crowded - roomy == pytest.approx(5 * prices.COLD_LINES * (device.dram.latency_seconds or 0.0))


def test_loops_grow_with_their_tokens(tmp_path: Path) -> None:
    short, long = (predicted(tmp_path, tokens).price for tokens in (64, 128))
    assert long.loops > 1.5 * short.loops


def attention_seconds(queries: int, keys: int) -> float:
    """Time of attention alone of 12 heads of 64 columns, on a shipped processor."""

    def attend(query: Any, key: Any, value: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    inputs = [torch.ones(1, 12, tokens, 64) for tokens in (queries, keys, keys)]
    return float(roller.predict_model(attend, *inputs, device="epyc-7763").price.library)


def test_attention_takes_its_products_and_exponentials() -> None:
    device = load_device("epyc-7763")
    peak = 4 * 12 * 1024 * 1024 * 64 / device.peak_flops("float32")
    long, short = attention_seconds(1024, 1024), attention_seconds(128, 128)
    assert 1.3 * peak < long < 3 * peak
    assert short > 1.2 * long / 64, "small blocks pack more for each multiply-add"


def test_products_of_a_described_processor_have_the_share_that_was_chosen() -> None:
    assert product_share(load_device("epyc-7763")) == PRODUCT_SHARE


def test_products_of_this_machine_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 1,024 rows, at the fastest of five."""
    clock = iter([0.0, 9.0, 10.0, 13.0, 20.0, 22.0, 30.0, 35.0, 40.0, 44.0])
    monkeypatch.setattr(prices, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    prices._timed_share.cache_clear()
    device = msgspec.structs.replace(load_device("epyc-7763"), name="cpu")
    assert product_share(device) == pytest.approx(2.0 * device.peak_flops("float32") / (2 * 1024**3))
    prices._timed_share.cache_clear()


def test_attention_of_one_query_reads_its_keys_and_values() -> None:
    device = load_device("epyc-7763")
    slowest = min(layer.bandwidth_bytes_per_second for layer in device.layers)
    once, twice = attention_seconds(1, 4096), attention_seconds(1, 8192)
    bytes_ = 2 * 12 * 4096 * 64 * 4
    assert 0 < twice - once <= 1.01 * bytes_ / slowest


def test_boards_are_refused() -> None:
    with pytest.raises(InputError, match="is no processor"):
        roller.predict_model(Block(), torch.ones(1, 1, 64), device="v100")
