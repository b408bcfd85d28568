"""The faces of the packages name what there is, and import it when it is first used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

PACKAGES = ("hal", "sokoban", "codegen", "roller")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_face_can_be_used(package: str) -> None:
    face = importlib.import_module(package)
    assert [name for name in face.__all__ if getattr(face, name, None) is None] == []


def test_a_face_imports_nothing_before_it_is_used() -> None:
    heavy = ("msgspec", "numpy", "tvm")
    code = f"import sys, {', '.join(PACKAGES)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
