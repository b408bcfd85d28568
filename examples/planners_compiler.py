"""TorchInductor hides an all-reduce behind products by their times on eight H100s. No GPU, one process."""

import torch
import torch.distributed
import torch.distributed._functional_collectives as collectives
from torch._inductor import comms, config
from torch.testing._internal.distributed.fake_pg import FakeStore

from daydream.planners import node_runtime, op_runtime

config.estimate_op_runtime = op_runtime("h100")
config.aten_distributed_optimizations.custom_runtime_estimation = node_runtime("h100")


def show(nodes):
    for node in nodes:
        kernel = getattr(node.node, "python_kernel_name", "") or "kernel of the compiler"
        print(f"{comms.estimate_op_runtime(node) * 1e3:8.1f} us  {kernel}")
    return nodes


config.reorder_for_compute_comm_overlap = True
config.reorder_for_compute_comm_overlap_passes = ["sink_waits_iterative", show]


@torch.compile
def step(x, w):
    total = collectives.all_reduce(x @ w, "sum", torch.distributed.group.WORLD)
    return (w @ x) @ total


torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
step(torch.randn(1024, 1024), torch.randn(1024, 1024))
torch.distributed.destroy_process_group()
