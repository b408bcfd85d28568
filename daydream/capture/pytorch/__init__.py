"""A step of a PyTorch model on tensors without data: its operators as they are dispatched."""
