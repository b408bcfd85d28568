"""`torch.compile(model, backend="roller")`: graphs of PyTorch with our kernels in them, a library for the rest."""
