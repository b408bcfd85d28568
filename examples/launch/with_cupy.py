"""A bundle's fastest kernel on CuPy arrays: ``python with_cupy.py out/feed_forward``."""

import sys

import cupy
import numpy as np

import roller

kernel = roller.load(sys.argv[1])
random = np.random.default_rng(0)
a, b, bias = (random.random(shape, np.float32) for shape in ((256, 128), (128, 192), (192,)))
c = kernel(cupy.asarray(a), cupy.asarray(b), cupy.asarray(bias))
error = abs(cupy.asnumpy(c) - np.maximum(a @ b + bias, 0)).max()
print(f"{c.shape} of {c.dtype}, off by at most {error:.0e}")
