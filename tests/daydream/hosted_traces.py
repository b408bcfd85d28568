"""A synthetic trace of data-parallel training on gloo: two layers, a bucket each."""

from __future__ import annotations

from tests.daydream.traces import Builder

#: Microseconds in which the step's thread lies idle for the second bucket, and from its end to what waits for it.
IDLE_US, WOKEN_US = 270.0, 3.0

#: Bytes of the gradients of layers b and a.
B_BYTES, A_BYTES = 4096, 8192

#: Microseconds of a call of c10d, and of the step as recorded.
CALL_US, STEP_US = 8.0, 1000.0


def data_parallel_step(*, late_end_us: float = 0.0) -> Builder:
    """One step of a rank; gloo writes down the end of the second bucket so much later than the caller goes on."""
    trace = Builder("2026")
    trace.step(0, 0, STEP_US)
    for number, layer in enumerate("ab"):
        begin = 10 + 100 * number
        trace.annotation(f"nn.Module: {layer}", begin, 90)
        trace.operator("aten::mm", begin + 10, 40, sequence=number + 1)
    for number, (sequence, size) in enumerate(((2, B_BYTES), (1, A_BYTES))):
        begin = 210 + 130 * number
        trace.operator(
            "autograd::engine::evaluate_function: MmBackward0", begin, 60, sequence=sequence, forward_thread=1
        )
        trace.operator("MmBackward0", begin + 2, 50, sequence=sequence, forward_thread=1)
        trace.operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", begin + 60, 20)
        trace.operator("torch::autograd::AccumulateGrad", begin + 62, 8, dims=[[size // 4]], types=["float"])
        trace.operator("c10d::allreduce_", begin + 82, CALL_US)
        end = 500 if number == 0 else 430 + IDLE_US - WOKEN_US + late_end_us
        thread = 200 + number
        trace.annotation(
            "gloo:all_reduce", begin + 91, end - begin - 91, thread=thread,
            **{"Input Dims": [[size // 4]], "Input type": ["float"]},
        )  # fmt: skip
    trace.operator("torch.distributed.ddp.reducer::copy_bucket_to_grad", 430 + IDLE_US, 10)
    trace.annotation("Optimizer.step#SGD.step", 720, 80).operator("aten::add_", 730, 20).operator("aten::add_", 750, 40)
    trace.head["daydream"] = {
        "gradients": [
            {"name": f"{layer}.weight", "module": layer, "bytes": size, "elements": size // 4, "dtype": "float32"}
            for layer, size in (("b", B_BYTES), ("a", A_BYTES))
        ]
    }
    return trace
