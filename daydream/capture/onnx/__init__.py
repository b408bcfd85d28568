"""ONNX files as models that run in PyTorch on tensors without data."""
