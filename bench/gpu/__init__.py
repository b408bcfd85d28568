"""Everything a GPU has to say about kernels, predictions and what-ifs, harvested in one command.

What runs on the GPU machine (`harvest` and what it imports) needs NumPy, CuPy, PyTorch and Triton alone.
"""
