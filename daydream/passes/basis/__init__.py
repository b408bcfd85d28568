"""What several passes know: kernels by name, gradients, collectives, checks of options."""
