"""A profile of a compiled graph on an H100, and what PyTorch's profile-guided estimator reads from it. No GPU."""

import tempfile
from pathlib import Path

import torch
from torch._inductor.fx_passes.profile_guided_estimation import ProfileGuidedEstimator
from torch.fx.experimental.proxy_tensor import make_fx

from daydream.planners import write_profile


def step(x, w):
    return torch.softmax(x @ w, -1)


graph = make_fx(step, tracing_mode="fake")(torch.empty(4096, 1024), torch.empty(1024, 2048))
with tempfile.TemporaryDirectory() as folder:
    path = str(Path(folder) / "h100.json")
    write_profile(path, graph, "h100", groups=[range(8)])
    # In a training script: torch._inductor.config.aten_distributed_optimizations
    #     .profile_guided_estimations_profile_path = path
    estimator = ProfileGuidedEstimator(path)

for node in graph.graph.nodes:
    if node.op == "call_function" and estimator(node) is not None:
        print(f"{estimator(node) * 1e3:8.1f} us  {node.target}")
