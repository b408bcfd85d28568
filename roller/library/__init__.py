"""Models of vendor libraries: which kernels cuBLAS and PyTorch launch for an operator, and how long they take."""

from roller.library.calls import LibraryCall, PricedCall
from roller.library.operators import LibraryEstimate, library_calls, library_time, library_times, priced

__all__ = ["LibraryCall", "LibraryEstimate", "PricedCall", "library_calls", "library_time", "library_times", "priced"]
