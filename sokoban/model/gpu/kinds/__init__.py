"""RATIONAL for kernels that are no tiles: attention and its gradients, pairs of products, patches, lines."""
