"""Passes that answer in bytes, on a predicted step and on one read from a trace: time and peak worked out by hand.

The network's tensors are so large that the host is never waited for: what kernels gain or lose is what the step does.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from daydream.answers import Prediction, Replay, predict, replay, replay_of  # noqa: E402
from daydream.capture.pytorch.checkpoints import apply_checkpoints  # noqa: E402
from daydream.capture.pytorch.meta_kernels import board_kernels  # noqa: E402
from daydream.capture.pytorch.step import Subject, capture  # noqa: E402
from daydream.graph.graph import Phase  # noqa: E402
from daydream.graph.memory import HeldMemory  # noqa: E402
from daydream.memory.attached import with_memory  # noqa: E402
from daydream.passes.basis.bytes import memory_of  # noqa: E402
from daydream.prediction.step import PredictedStep, predicted  # noqa: E402
from daydream.prediction.trace import predicted_trace  # noqa: E402
from daydream.trace.writer import write_trace  # noqa: E402
from daydream.whatif import parse_pass  # noqa: E402
from hal.catalog import load_device  # noqa: E402

BOARD = load_device("v100")

#: Bytes of a map: 64 pictures of 64 channels of 112 x 112. Pooling leaves a quarter, and as many indices of 8 bytes.
MAP = 64 * 64 * 112 * 112 * 4

#: Bytes of the weights before the head, of the head's, and of the running statistics and counters of batch norms.
BODY, HEAD, BUFFERS = 2 * (64 * 64 * 9 + 2 * 64) * 4, (64 * 56 * 56 * 10 + 10) * 4, 2 * (2 * 64 * 4 + 8)

#: What the peak holds besides maps: weights, momentum, the head's gradient, statistics of the batch, the loss.
STANDING = 2 * (BODY + HEAD) + HEAD + BUFFERS + 4 * 64 * 4 + 8


@cache
def step(batch: int = 64, optimizer: str = "sgd", implementation: str = "foreach", blocks: str = "") -> PredictedStep:
    """Twice convolution, batch norm and ReLU, then pooling and a linear layer."""
    with torch.device("meta"):
        parts = [
            nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()) for _ in range(2)
        ]
        ends = {"pool": nn.MaxPool2d(2), "flat": nn.Flatten(), "head": nn.Linear(64 * 56 * 56, 10)}
        model = nn.Sequential(OrderedDict(blocks=nn.Sequential(*parts), **ends))
        subject = Subject(title="net", model=model, args=[torch.empty(batch, 64, 112, 112)], batch=batch)
    if blocks:
        apply_checkpoints(model, blocks)
    with board_kernels("eager"):
        made = capture(subject, training=True, optimizer=optimizer, implementation=implementation)
    return predicted(made, [BOARD])[0]


def microseconds(phase: Phase, *names: str, of: PredictedStep | None = None) -> float:
    """All kernels of a phase, or those of these operators."""
    made = of or step()
    pairs = zip(made.capture.operators, made.prices, strict=True)
    stems = [(each.name.removeprefix("aten::"), price) for each, price in pairs if each.phase == phase]
    return 1e6 * sum(price.seconds for name, price in stems if not names or name in names)


F, B, U = Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE


@pytest.fixture(scope="module", params=["prediction", "recording"])
def before(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Replay:
    """The step as predicted, and as ``daydream record`` would have recorded it, with sizes and allocations."""
    trace = predicted_trace(step())
    if request.param == "prediction":
        return replay_of(trace)
    path: Path = tmp_path_factory.mktemp("recorded") / "step.json"
    write_trace(replace(trace, metadata={name: trace.metadata[name] for name in ("batch", "gradients")}), path)
    return replay(path)


def held(made: Replay) -> HeldMemory:
    memory = memory_of(with_memory(made.graph))
    assert memory is not None
    return memory


def is_recorded(made: Replay) -> bool:
    return "predicted" not in getattr(made.graph.trace, "metadata", {})


def applied(before: Replay, text: str) -> tuple[float, float]:
    """How much longer the step is, in µs, and how many bytes its peak has."""
    answer: Prediction = predict(before, [parse_pass(text)])
    gain = answer.after.timeline.step_us[0] - before.timeline.step_us[0]
    return float(gain), held(answer.after).peak_bytes


def peak(made: Replay, maps: float, further: float = 0.0, *, of_batch: float = 0.0) -> object:
    """A peak of so many maps, what the step holds further and, in a prediction, so many maps of the batch.

    Statistics of batch norms are not counted one by one. A recording's allocator rounds, and it does not know running
    statistics, nor the batch, which was there before.
    """
    if is_recorded(made):
        return pytest.approx(maps * MAP + STANDING + further, abs=32 * 512)
    return pytest.approx((maps + of_batch) * MAP + STANDING + further, abs=4 * 64 * 4)


def test_the_step_as_it_is(before: Replay) -> None:
    # The gradient of the second ReLU: results of both convolutions and ReLUs, the gradients behind and before it.
    assert held(before).peak_bytes == peak(before, 6, of_batch=1)
    assert is_recorded(before) or held(before).peak_bytes == 7 * MAP + STANDING
    first = 1e6 * (step().host[0] + 4e-6)
    assert before.timeline.step_us[0] == pytest.approx(
        first + sum(microseconds(phase) for phase in (F, B, U)), abs=0.01
    )


def test_recompute_runs_both_blocks_again(before: Replay) -> None:
    gain, most = applied(before, "recompute:host-us=0")
    blocks = ("convolution", "add_", "native_batch_norm", "relu")
    assert gain == pytest.approx(microseconds(F, *blocks), rel=1e-3)
    # While the second block's gradients are made, the first's convolution has no result.
    assert most == peak(before, 5, of_batch=1)
    # So it is with torch.utils.checkpoint around the blocks.
    done = step(blocks="blocks.*")
    assert 1e6 * done.step_seconds == pytest.approx(before.timeline.step_us[0] + gain, rel=1e-6)
    if not is_recorded(before):
        assert done.memory.footprint.peak_bytes == most


def test_accumulate_makes_four_small_passes(before: Replay) -> None:
    gain, most = applied(before, "accumulate:steps=4")
    quarter = microseconds(F, of=step(16)) + microseconds(B, of=step(16))
    # Three times every gradient is read, read and written.
    adding = 3 * 3 * (BODY + HEAD) / BOARD.dram.bandwidth_bytes_per_second * 1e6
    whole = microseconds(F) + microseconds(B)
    assert gain == pytest.approx(4 * quarter + adding - whole, abs=2e-4 * whole)
    # A quarter of the maps; the earlier passes' gradients are there; the whole batch is.
    assert most == peak(before, 6 / 4, BODY, of_batch=1)


def test_vdnn_takes_the_second_convolutions_input_away(before: Replay) -> None:
    copy = MAP / 1000e3
    gain, most = applied(before, "vdnn:pcie-gbps=1000")
    # Its own copy back begins with the backward pass of convolutions, that is with its own.
    assert gain == pytest.approx(copy, abs=0.01)
    # The first one's input is the batch, which the program holds.
    assert most == peak(before, 5, of_batch=1)
    # At 12 GB/s copies are all there is: out, out, in and in, behind the first convolution and before its gradient.
    copy = MAP / 12e3
    gain, _ = applied(before, "vdnn:pcie-gbps=12")
    (first,) = {price.seconds for each, price in zip(step().capture.operators, step().prices, strict=True)
                if each.name == "aten::convolution"}  # fmt: skip
    last = step().prices[[each.name for each in step().capture.operators].index("aten::convolution_backward") + 7]
    assert last.kernels[0].name == "implicit_gemm"
    ends = 1e6 * (step().host[0] + 4e-6 + first + last.seconds) + microseconds(U)
    assert gain == pytest.approx(ends + 4 * copy - before.timeline.step_us[0], abs=0.1)


def test_gist_encodes_both_relus(before: Replay) -> None:
    gain, most = applied(before, "gist:density=0.4")
    # Each encoded and decoded in the time of a ReLU.
    assert gain == pytest.approx(2 * microseconds(F, "relu"), abs=0.1)
    # The first is stored sparse: 5 bytes for 4, of 0.4 of its elements. The second is whole while its gradient is made.
    assert most == peak(before, 5 + 0.4 * 5 / 4, of_batch=1)


def test_fused_optimizer_moves_five_tensors_for_eight(before: Replay) -> None:
    assert applied(before, "fused-optimizer:host-us=0")[0] == pytest.approx(0, abs=0.01)
    gain, most = applied(before, "fused-optimizer:duration=traffic,host-us=0")
    # m *= mu 2, m += g 3, w += lr * m 3; fused w, m, g read, w and m written.
    assert gain == pytest.approx(-(1 - 5 / 8) * microseconds(U), rel=1e-3)
    assert most == peak(before, 6, of_batch=1)
    fused = microseconds(U, of=step(implementation="fused"))
    assert microseconds(U) + gain == pytest.approx(fused, rel=0.05)


def test_a_fused_adam_has_no_temporaries() -> None:
    made = replay_of(predicted_trace(step(optimizer="adam")))
    answer = predict(made, [parse_pass("fused-optimizer:duration=traffic,host-us=0")])
    memory, after = held(made), held(answer.after)
    update = memory.moments(U)
    # The root of the second moments, as large as the weights.
    assert memory.curve[update].max() - after.curve[update].max() == BODY + HEAD
    gain = answer.after.timeline.step_us[0] - made.timeline.step_us[0]
    fused = microseconds(U, of=step(optimizer="adam", implementation="fused"))
    assert microseconds(U, of=step(optimizer="adam")) + gain == pytest.approx(fused, rel=0.05)


def test_amp_shortens_products_by_three_and_the_rest_by_two(before: Replay) -> None:
    gain, most = applied(before, "amp:price=no,casts=no,scaler=no")
    heavy = microseconds(F, "convolution") + microseconds(B, "convolution_backward")
    # Counters of batches are integers, sums stay in float32.
    light = microseconds(F) + microseconds(B) - heavy
    light -= sum(microseconds(phase, "add_", "sum") for phase in (F, B))
    assert gain == pytest.approx(-heavy * 2 / 3 - light / 2, rel=1e-4)
    # The gradient of pooling now has the peak: four maps and its result in half, half a quarter of its own gradient,
    # and indices as they were. Weights have halves, too, and so has the batch.
    weights = BODY + HEAD + (0 if is_recorded(before) else BUFFERS)
    assert most == peak(before, 5 / 2 + 1 / 8 + 1 / 2, weights / 2, of_batch=1 + 1 / 2)


def test_a_scaler_reads_and_writes_every_gradient(before: Replay) -> None:
    from roller.library.streaming.elementwise import kernel_seconds_floor

    alone, _ = applied(before, "amp:price=no,casts=no,scaler=no")
    scaled, _ = applied(before, "amp:price=no,casts=no")
    moved = 2 * (BODY + HEAD) / BOARD.dram.bandwidth_bytes_per_second * 1e6
    # Besides ten kernels of single numbers and a copy of the flag, for which the CPU waits before the update.
    least = moved + 10 * kernel_seconds_floor(BOARD) * 1e6
    assert least < scaled - alone < least + 400


def test_casts_take_the_bytes_of_weights_and_gradients(before: Replay) -> None:
    alone, _ = applied(before, "amp:price=no,casts=no,scaler=no")
    cast, _ = applied(before, "amp:price=no,scaler=no")
    maps = MAP // 4 * 6 / BOARD.dram.bandwidth_bytes_per_second * 1e6
    weights = 2 * (BODY + HEAD) // 4 * 6 / BOARD.dram.bandwidth_bytes_per_second * 1e6
    # The batch is cast, too; batch norms are done in half precision and leave nothing to cast.
    assert cast - alone == pytest.approx(weights + maps, rel=0.1)


def test_batch_norms_are_restructured(before: Replay) -> None:
    gain, most = applied(before, "restructure-batchnorm")
    norms = microseconds(F, "native_batch_norm") + microseconds(B, "native_batch_norm_backward")
    relus = microseconds(F, "relu") + microseconds(B, "threshold_backward")
    assert gain == pytest.approx(-norms / 2 - relus, rel=1e-4)
    assert most == peak(before, 4, of_batch=1)


def test_offloaded_states_come_for_the_update(before: Replay) -> None:
    gain, most = applied(before, "offload:what=optimizer,pcie-gbps=12")
    assert gain == pytest.approx((BODY + HEAD) / 12e3, abs=0.01)
    assert most == peak(before, 6, -(BODY + HEAD), of_batch=1)


def test_offloaded_maps_come_back_layer_by_layer(before: Replay) -> None:
    gain, most = applied(before, "offload:what=feature-maps,pcie-gbps=1000")
    # The second ReLU's result goes behind pooling and comes for its gradient; the head alone runs meanwhile.
    head = microseconds(F, "addmm", "sum") + microseconds(B, "ones_like", "mm", "sum")
    assert gain == pytest.approx(2 * MAP / 1000e3 - head, abs=0.1)
    # The first convolution's result is away.
    assert most == peak(before, 5, of_batch=1)
