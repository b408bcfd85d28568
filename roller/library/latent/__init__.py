"""Multi-head latent attention as serving engines run it: its products, its attention, and the kernels around them."""
