"""A model on the cores of a machine by `torch.compile` with our backend, predicted from its code alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal.support.errors import InputError

if TYPE_CHECKING:
    from hal.spec.device import DeviceSpec
    from roller.dynamo.explanation import Explanation

#: Standard deviation of weights that nothing depends on.
_WEIGHTS = 0.02


@dataclass(frozen=True, kw_only=True)
class ProcessorStep:
    """One call of a model on a processor.

    Attributes:
        title: the model as the user named it.
        batch: samples of the call; None where that is unknown.
        device: the processor.
        explanation: what kernels of ours take, and the time of all.
        assumed: what had to be supposed.
    """

    title: str
    batch: int | None
    device: DeviceSpec
    explanation: Explanation
    assumed: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """The step as JSON."""
        price, decisions = self.explanation.price, self.explanation.decisions
        return {
            "model": self.title,
            "device": self.device.name,
            "batch": self.batch,
            "dtype": "float32",
            "mode": "inference",
            "compiler": "roller",
            "step_seconds": round(price.seconds, 9),
            "kernel_seconds": round(price.kernels, 9),
            "library_seconds": round(price.library, 9),
            "loop_seconds": round(price.loops, 9),
            "call_seconds": round(price.calls, 9),
            "samples_per_second": None if self.batch is None else round(self.batch / price.seconds, 3),
            "products": len(decisions),
            "products_taken": sum(decision.is_taken for decision in decisions),
            "assumed": list(self.assumed),
        }


def processor_step(model: str, device: DeviceSpec, options: Mapping[str, Any]) -> ProcessorStep:
    """A call of a model in float32 with our backend, whose weights are any numbers.

    Args:
        model: as `daydream predict` takes it.
        device: a processor.
        options: of the command: batch, sequence, image, class_name and attention.

    Raises:
        InputError: the model cannot be built, or fails.
    """
    import torch

    from daydream.capture.failures import failures_as_errors
    from daydream.capture.sources import load_subject
    from roller.dynamo.explanation import predict_model

    chosen = {name: options.get(name) for name in ("batch", "sequence", "image", "class_name")}
    subject = load_subject(model, training=False, attention=options.get("attention") or "auto", **chosen)
    generator = torch.Generator().manual_seed(0)

    def on_processor(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator).to(value.dtype)
        return torch.zeros(value.shape, dtype=value.dtype)

    with failures_as_errors(subject.title, subject.source), torch.no_grad():
        module = subject.model.eval().to_empty(device="cpu")
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(0.0, _WEIGHTS, generator=generator).abs_()
            else:
                tensor.zero_()
        arguments = [on_processor(value) for value in subject.args]
        names = {name: on_processor(value) for name, value in subject.kwargs.items()}
        explanation = predict_model(lambda *given: module(*given, **names), *arguments, device=device.name)
    if not explanation.prices:
        raise InputError(model, "nothing of it was captured as a graph", "give a model of tensors of float32")
    return ProcessorStep(
        title=subject.title,
        batch=subject.batch,
        device=device,
        explanation=explanation,
        assumed=(*subject.assumed, "weights are numbers of no meaning, frozen as the backend freezes them"),
    )
