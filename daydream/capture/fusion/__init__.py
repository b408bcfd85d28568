"""What TorchInductor would fuse of a captured step."""
