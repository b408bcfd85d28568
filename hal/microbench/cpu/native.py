"""LLVM IR to functions of this process, by llvmlite, which comes with Numba."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

#: Arguments of every loop: pointers and 64-bit integers.
_SIGNATURES = {
    "read": "ppii",
    "read_apart": "ppii",
    "add": "pppii",
    "copy": "ppii",
    "fma": "ppii",
    "issue": "ppii",
    "chase": "ppi",
    "count": "ipi",
    "barrier": "pii",
    "product": "pppiii",
}


def _binding() -> Any:
    return importlib.import_module("llvmlite.binding")


def host_features() -> frozenset[str]:
    """Features of this processor's instruction set by LLVM's names, ``avx512f``."""
    return frozenset(name for name, present in dict(_binding().get_host_cpu_features()).items() if present)


def host_architecture() -> str:
    """This processor's name in LLVM, ``icelake-server``."""
    return str(_binding().get_host_cpu_name())


class Loops:
    """The loops of `vector_ir.module` as functions; calling one releases Python's lock."""

    def __init__(self, text: str) -> None:
        self._engine = _engine(text)
        self._functions = {name: self._function(name, kinds) for name, kinds in _SIGNATURES.items()}

    def __getitem__(self, name: str) -> Callable[..., None]:
        return self._functions[name]

    def _function(self, name: str, kinds: str) -> Callable[..., None]:
        types = [ctypes.c_void_p if kind == "p" else ctypes.c_int64 for kind in kinds]
        prototype = ctypes.CFUNCTYPE(None, *types)
        function: Callable[..., None] = prototype(self._engine.get_function_address(name))
        return function


def _engine(text: str) -> Any:
    binding = _binding()
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=2
    )
    parsed = binding.parse_assembly(text)
    parsed.verify()
    engine = binding.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


@lru_cache(maxsize=4)
def loops(lanes: int, registers: int) -> Loops:
    """The loops for vectors of that many float32 lanes, compiled once."""
    from hal.microbench.cpu.vector_ir import module

    return Loops(module(lanes, registers))
