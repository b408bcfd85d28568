"""Kernels of attention do not depend on how it is written: same schedules, times and texts, launched by other names."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from codegen.gpu.lower import lower
from codegen.target import Target
from codegen.tir.lowering import LoweringRequest
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from roller.algorithms import flash, flash_gradient
from roller.algorithms.chain import ChainProgram
from roller.algorithms.sequence import _resized
from sokoban.kernel.attention_gradient import GRADIENT_INPUTS
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.stages import operator_form
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs
from sokoban.language.reference import evaluate
from tests.sokoban.attention_spellings import Spelling, attention_spellings, gradient_spellings

A100, V100, H100 = (load_device(name) for name in ("a100", "v100", "h100"))


def programs(form: KernelForm, device: Any = A100, top_k: int = 3) -> tuple[ChainProgram, ...]:
    algorithm = flash if form.kind == "attention" else flash_gradient
    return algorithm.consider(PlacedForm(form, device), top_k).programs


def ranked(form: KernelForm) -> list[Any]:
    return [(each.estimate, [part.schedule for part in each.parts]) for each in programs(form)]


def forms(spelling: Spelling) -> tuple[KernelForm, KernelForm]:
    named, written = (kernel_form(operator_from_data(each)) for each in (spelling.named, spelling.written))
    return named, written


@settings(max_examples=12, deadline=None)
@given(attention_spellings(largest=1000, widths=(16, 64, 72)))
def test_spellings_of_attention_have_the_same_schedules_and_times(spelling: Spelling) -> None:
    named, written = forms(spelling)
    assert written.kind == named.kind and ranked(written) == ranked(named)


@settings(max_examples=12, deadline=None)
@given(gradient_spellings(largest=1000, widths=(16, 64, 72)))
def test_spellings_of_gradients_have_the_same_schedules_and_times(spelling: Spelling) -> None:
    named, written = forms(spelling)
    assert written.kind == named.kind and ranked(written) == ranked(named)


def renamed(text: str, names: dict[str, str]) -> str:
    """A kernel's text with pointers and maps of other tensors."""
    return re.sub(r"\b(\w+?)_(ptr|map)\b", lambda match: f"{names.get(match[1], match[1])}_{match[2]}", text)


NAMES = {"Q": "V", "K": "Keys", "V": "A", "Y": "Q"}
WRITTEN = (
    "S[n,h,x,y] = sum(c, Keys[n,h,y,c] * V[n,h,x,c]); M[n,h,x] = max(y, S[n,h,x,y]); "
    "W[n,h,x,y] = exp(0.125 * (S[n,h,x,y] - M[n,h,x])); T[n,h,x] = sum(y, W[n,h,x,y]); "
    "Q[n,h,x,e] = sum(y, A[n,h,y,e] * W[n,h,x,y]) / T[n,h,x]"
)
GRADIENT_NAMES = {"Q": "K", "K": "L", "V": "dY", "dY": "G", "L": "D", "D": "Dots", "dQ": "Q"}
GRADIENT_WRITTEN = (
    "U[n,h,x,y] = sum(e, dY[n,h,y,e] * G[n,h,x,e]); S[n,h,x,y] = sum(c, L[n,h,y,c] * K[n,h,x,c] * 0.125); "
    "W[n,h,x,y] = exp(S[n,h,x,y] - D[n,h,x]) * (U[n,h,x,y] - Dots[n,h,x]); "
    "Q[n,h,x,c] = 0.125 * sum(y, W[n,h,x,y] * L[n,h,y,c])"
)
AXES = {"n": 2, "h": 3, "x": 150, "y": 150, "c": 64, "e": 64}
SIZES = {"b": 2, "heads": 3, "queries": 150, "head_dim": 64}


def written_and_named(kind: str, dtype: str) -> tuple[KernelForm, KernelForm, dict[str, str]]:
    text, names = (WRITTEN, NAMES) if kind == "attention" else (GRADIENT_WRITTEN, GRADIENT_NAMES)
    dtypes = {} if kind == "attention" else {names["L"]: "float32", names["D"]: "float32"}
    written = {"expr": text, "sizes": AXES, "dtype": dtype, "dtypes": dtypes, "name": "core"}
    of = {} if kind == "attention" else {"of": "queries"}
    named = {"op": kind, "dtype": dtype, "name": "core", **SIZES, **of}
    return kernel_form(operator_from_data(written)), kernel_form(operator_from_data(named)), names


@pytest.mark.parametrize("device", [A100, V100, H100], ids=["a100", "v100", "h100"])
@pytest.mark.parametrize("kind", ["attention", "attention_gradient"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_texts_differ_in_names_alone_and_take_tensors_in_the_kernels_order(kind: str, dtype: str, device: Any) -> None:
    written, named, names = written_and_named(kind, dtype)
    order = [*("QKV" if kind == "attention" else GRADIENT_INPUTS), "Y" if kind == "attention" else "dQ"]
    for ours, theirs in zip(programs(written, device), programs(named, device), strict=True):
        problem = ours.parts[0].problem
        assert [tensor.name for tensor in problem.tensors] == [names[name] for name in order]
        target = Target.of(device)
        texts = [
            lower(LoweringRequest(each.parts[0].problem, each.parts[0].schedule, "core", target)).text
            for each in (ours, theirs)
        ]
        assert texts[0] and texts[0] == (renamed(texts[1], names) if kind == "attention" else texts[1])


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize("device", [A100, V100], ids=["a100", "v100"])
@pytest.mark.parametrize("kind", ["attention", "attention_gradient"])
def test_kernels_of_renamed_tensors_are_right(kind: str, device: Any) -> None:
    written, _, _ = written_and_named(kind, "float16")
    check = programs(written, device, 1)[0].check()
    assert check is not None
    result = verify_chain(check, engine="emulator", target=Target.of(device))
    assert result.passed, result.reason


EPILOGUES = {
    "a function": ("; Z[n,h,x,e] = relu(Q[n,h,x,e])", ["relu"]),
    "a tensor": ("; Z[n,h,x,e] = Q[n,h,x,e] + P[n,h,x,e]", [{"function": "residual_add"}]),
}


@pytest.mark.parametrize("text, steps", EPILOGUES.values(), ids=EPILOGUES)
def test_what_follows_attention_follows_the_same_sequence(text: str, steps: list[Any]) -> None:
    """Of a window, over which a smaller operator still sees keys; ``P`` is a tensor of the program, too."""
    masked = WRITTEN.replace(
        "M[n,h,x] = max(y, S[n,h,x,y])",
        "L[n,h,x,y] = select(y <= x and y > x - 50, S[n,h,x,y], -inf); M[n,h,x] = max(y, L[n,h,x,y])",
    ).replace("(S[", "(L[")
    data = {"expr": masked + text, "sizes": AXES, "dtype": "float16", "name": "core"}
    named = {"op": "attention", "dtype": "float16", "causal": True, "window": 50, "epilogue": steps, **SIZES}
    forms = [operator_form(operator_from_data(each)) for each in (data, named)]
    assert [form.kind for form in forms] == ["sequence"] * 2
    stages = [[(each.kind, list(each.sizes.values()), each.flops) for each in form.stages] for form in forms]
    assert stages[0] == stages[1]
    small = _resized(forms[0], {axis: min(32, size) for axis, size in forms[0].sizes.items()})
    assert [stage.kind for stage in small.stages] == [stage.kind for stage in forms[0].stages]
    inputs = random_inputs(small.source, seed=2)
    assert np.isfinite(evaluate(small.source, inputs)).all()


def test_where_no_kernel_has_it_whole_its_program_is_written_out() -> None:
    """Every spelling is then the same sequence of kernels, on the tensors that it has."""
    written, named, names = written_and_named("attention", "float32")
    sequences = [operator_form(form.source, with_attention=False) for form in (written, named)]
    assert [[stage.kind for stage in form.stages] for form in sequences] == [["tile", "rows", "tile"]] * 2
    assert list(sequences[0].sizes.values()) == list(sequences[1].sizes.values())
    assert list(sequences[0].sizes) == ["n", "h", "x", "y", "c", "e"]
    assert [tensor.name for tensor in sequences[0].expr.inputs] == [names[name] for name in "QKV"]
    assert sequences[0].expr.output.name == names["Y"]
