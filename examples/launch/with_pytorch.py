"""A bundle as an operator of PyTorch: ``python with_pytorch.py out/feed_forward``, and ``cpu`` for a processor's."""

import sys

import torch

import roller

feed_forward = roller.torch_op(sys.argv[1], name="feed_forward")
device = sys.argv[2] if len(sys.argv) > 2 else "cuda"
a, b, bias = (torch.rand(shape, device=device) for shape in ((256, 128), (128, 192), (192,)))


@torch.compile(backend="aot_eager")
def layer(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return feed_forward(a, b, bias) * 2


error = (layer(a, b, bias) - 2 * torch.relu(a @ b + bias)).abs().max()
print(f"torch.ops.roller.feed_forward, compiled, off by at most {error.item():.0e}")
