"""Two products in a row in one kernel, in CUDA by `mma.sync` and in either language by multiply-adds."""
