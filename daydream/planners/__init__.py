"""PyTorch's own planners of distributed training, given Roller's prices."""
