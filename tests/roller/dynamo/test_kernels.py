"""Bundles of regions: an operator that has no right kernel does not keep the others from theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import roller.compile.bundles
from hal.catalog import load_device
from roller.compile.bundles import WrongKernelError
from roller.dynamo.kernels import Kernel, KernelShelf
from sokoban.language.operators import operator_from_data


@pytest.mark.slow
@pytest.mark.usefixtures("device_compiler", "c_compiler")
def test_a_wrong_kernel_leaves_the_others_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = roller.compile.bundles.write_bundle

    def wrong_for_the_first(operator: Any, *arguments: Any) -> Any:
        if operator.expr.sizes["n"] == 16:
            raise WrongKernelError("all kernels failed")
        return right(operator, *arguments)

    monkeypatch.setattr(roller.compile.bundles, "write_bundle", wrong_for_the_first)
    shelf = KernelShelf.of(load_device("xeon-platinum-8375c"), tmp_path, 1)
    expressions = [operator_from_data({"op": "matmul", "m": 8, "n": n, "k": 8}) for n in (16, 32)]
    first, second = (shelf.kernels(expressions)[shelf.name_of(expr)] for expr in expressions)
    assert first == "all kernels failed"
    assert isinstance(second, Kernel)
