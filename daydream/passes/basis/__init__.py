"""Common knowledge of several passes: kernels by name, gradients, collectives, checks of options."""
