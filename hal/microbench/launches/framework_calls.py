"""What a call of PyTorch costs however small its tensors: GPU events right before and after, nothing else in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hal.microbench.launcher import KernelText, Launcher
from hal.microbench.measurement import Found, Measurement
from hal.microbench.sampling import Settings

_CALLS_PER_REPEAT = 10


def kernels(capability: int) -> tuple[KernelText, ...]:
    """None of ours: PyTorch's."""
    return ()


def measure(launcher: Launcher, found: Found, settings: Settings) -> Iterator[Measurement]:
    """``call.OPERATOR`` in seconds, host and device together; nothing without a PyTorch that sees the GPU."""
    torch = launcher.torch()
    if torch is None:
        return
    for name, call in _calls(torch).items():
        samples = tuple(_seconds(torch, call) for _ in range(20 + _CALLS_PER_REPEAT * settings.repeats))[20:]
        method = f"PyTorch {torch.__version__}: {name} of small tensors between two events, device idle before"
        path = f"framework.{'' if name == 'add' else name + '_'}call_seconds"
        yield Measurement(key=f"call.{name}", unit="s", samples=samples, method=method, path=path, low=2e-6, high=1e-3)


def _calls(torch: Any) -> dict[str, Callable[[], object]]:
    options = {"device": "cuda", "dtype": torch.float32}
    x, batch = torch.randn(32, 32, **options), torch.randn(2, 32, 32, **options)
    bias, linear = torch.randn(32, **options), torch.nn.functional.linear
    return {
        "add": lambda: torch.add(x, x),
        "matmul": lambda: torch.bmm(batch, batch),
        "linear": lambda: linear(x, x, bias),
        "softmax": lambda: torch.softmax(x, -1),
        "layer_norm": lambda: torch.nn.functional.layer_norm(x, (32,), bias, bias),
    }


def _seconds(torch: Any, call: Callable[[], object]) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    call()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) * 1e-3
