"""`torch.compile(model, backend="roller")`: graphs of PyTorch with kernels of ours in them, and a library for the rest."""
