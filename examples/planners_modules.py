"""What every module of a model takes on an H100, and what recomputing it would cost. No GPU, no weights."""

from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from daydream.planners import RollerRuntimeEstimator, RollerSACEstimator

runtime, recomputation = RollerRuntimeEstimator("h100"), RollerSACEstimator("h100")
with FakeTensorMode():
    layer = partial(torch.nn.TransformerEncoderLayer, 1024, 16, 4096, batch_first=True, dtype=torch.bfloat16)
    model = torch.nn.Sequential(*(layer() for _ in range(4)))
    batch = torch.randn(16, 512, 1024, dtype=torch.bfloat16)
    with runtime("operator-level-cost-model"):
        model(batch).sum().backward()
    with recomputation("operator-level-cost-model"):
        model(batch)

runtime.display_modulewise_stats(depth=2)
stats = recomputation.sac_mod_stats["Sequential.0"]
print(f"a layer's operators: {sum(stats.runtimes):.3f} ms make {sum(stats.memory) / 2**20:.0f} MiB")
