"""Ours against NumPy/OpenBLAS, PyTorch (oneDNN) and TVM's MetaSchedule on this machine's cores (docs/bench-cpu.md).

``python -m bench.cpu`` measures, ``python -m bench.cpu.tune`` lets MetaSchedule search.
"""

import codegen.tir.tvm_import  # noqa: F401  # TVM is imported here and there, always without PyTorch
