"""Which buckets of gradients, recomputation and fused kernels make a distributed step shortest (dPRO, section 5)."""
