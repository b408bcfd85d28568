"""What passes do to memory, added up by hand."""

from __future__ import annotations

import pytest

from daydream.graph.graph import TaskGraph
from daydream.graph.memory import Held, HeldMemory, MemoryKind
from daydream.passes import registered
from daydream.passes.kernels.batchnorm import restructure_batchnorm
from daydream.passes.kernels.fused_optimizer import fused_optimizer
from daydream.passes.memory.gist import gist
from daydream.passes.memory.vdnn import vdnn
from tests.daydream.graphs import graph, launched, pairs
from tests.daydream.passes.held import B, F, U, a_map, memory, of
from tests.daydream.passes.traced import traced

amp = registered()["amp"]

MAP = [2, 8, 4, 4]
#: Bytes of a map in float32.
SIZE = 1024
FORWARD = ["aten::batch_norm", "aten::relu", "aten::conv2d", "aten::relu", "aten::max_pool2d"]
BACKWARD = ["pool_backward", "relu_backward", "conv_backward", "relu_backward", "batch_norm_backward"]
KERNELS = [
    "bn_fw",
    "relu",
    "fprop",
    "relu",
    "max_pool",
    "max_pool_backward",
    "threshold",
    "dgrad",
    "threshold",
    "bn_bw",
]
LAYERS = ["bn", "relu1", "conv", "relu2", "pool"]


def network(held: list[Held]) -> TaskGraph:
    """Batch norm, ReLU, convolution, ReLU and pooling, forward and back; a moment each."""
    layers = [*LAYERS, *reversed(LAYERS)]
    tasks = []
    for row, (kernel, layer) in enumerate(zip(KERNELS, layers, strict=True)):
        tasks += launched(kernel, 10, layer=layer, phase=F if row < 5 else B, operator=row)
    dims = {row: [MAP] for row in range(10)}
    trace = traced([*FORWARD, *BACKWARD], [-1] * 10, dims=dims)
    moments = [(F, number) for number in range(5)] + [(B, number) for number in reversed(range(5))]
    return graph(tasks, pairs(10), memory=memory(moments, held), **trace)


def after(made: TaskGraph) -> HeldMemory:
    assert made.memory is not None
    return made.memory


def test_vdnn_takes_the_convolutions_input_off_the_board():
    # ReLU's result is the convolution's input, from moment 1 to its gradient in 7 and ReLU's own in 8.
    outcome = vdnn(network([a_map(SIZE, 1, 8), a_map(50, 0, 9)]))
    # It leaves after the convolution in 2. One convolution alone comes back with its own backward call, in 7.
    assert after(outcome.graph).curve.tolist() == [50, SIZE + 50, SIZE + 50, 50, 50, 50, 50, SIZE + 50, SIZE + 50, 50]


def test_gist_holds_maps_in_fewer_bits():
    # The convolution's input is stored sparse, what the pooling reads in a bit for each of 32.
    outcome = gist(network([a_map(SIZE, 1, 8), a_map(SIZE, 3, 6)]), density=0.4)
    curve = after(outcome.graph).curve
    # Half of the first, 0.4 x 5 / 4; a 32nd of the second; between pooling and its gradient nothing else.
    assert curve[5] == pytest.approx(SIZE / 2 + SIZE / 32)
    # Whole while its gradient is made: the second in 6, the first in 7.
    assert curve[6] == pytest.approx(SIZE / 2 + SIZE)
    assert curve[7] == pytest.approx(SIZE)


def test_a_fused_batch_norms_relu_leaves_nothing():
    outcome = restructure_batchnorm(network([a_map(SIZE, 0, 8), a_map(300, 2, 7)]))
    # The first ReLU follows a batch norm and works in place; its map is gone.
    assert after(outcome.graph).curve.tolist() == [0, 0, 300, 300, 300, 300, 300, 300, 0, 0]


def test_autocast_halves_maps_but_those_of_softmax_and_copies_weights():
    names = ["aten::linear", "aten::_softmax", "aten::_softmax_backward_data", "aten::mm"]
    moments = [(F, 0), (F, 0), (B, 0), (B, 0)]
    held = [of(MemoryKind.WEIGHTS, 40, -1, 4), a_map(100, 0, 3), a_map(200, 1, 2)]
    tasks = [each for row in range(4) for each in launched("k", 10, phase=F if row < 2 else B, operator=row)]
    some = graph(tasks, pairs(4), memory=memory(moments, held), **traced(names, [-1] * 4))
    outcome = amp(some, device="v100")
    # Weights once more in half: 60; 50 of the product; all 200 of softmax.
    assert after(outcome.graph).curve.tolist() == [110, 310, 310, 110]
    assert outcome.memory_bytes == {"weights": 20, "feature maps": -50}
    assert after(amp(some, device="v100", single=False).graph).curve.tolist() == [110, 210, 210, 110]


def test_a_fused_optimizer_has_no_temporaries():
    moments = [(F, 0), (B, 0), (U, 0), (U, 0)]
    held = [a_map(10, 0, 1), of(MemoryKind.TEMPORARY, 90, 2, 3), of(MemoryKind.TEMPORARY, 5, 1, 1)]
    tasks = [*launched("b", 5, phase=B), *launched("update", 4, phase=U), *launched("update", 4, phase=U)]
    outcome = fused_optimizer(graph(tasks, pairs(3), memory=memory(moments, held)))
    assert after(outcome.graph).curve.tolist() == [10, 15, 0, 0]
    assert outcome.memory_bytes == {"feature maps": 10, "temporary": -85}
