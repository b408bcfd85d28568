"""Networks by `torch.compile` with our backend, with Inductor and eagerly, on this machine's cores."""
