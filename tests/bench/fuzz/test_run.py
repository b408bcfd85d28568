"""Drawn operators run as kernels of every kind: a fixed set of them agrees, and a planted fault is found and shrunk."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import bench.fuzz.kernels
from bench.fuzz.kernels import Kernel, drawn, kernels_of, outcome_of
from bench.fuzz.run import examined, examined_data, meaning_error, shrunk_operator
from bench.fuzz.shrink import shrunk
from bench.fuzz.sound import error_of_plain_sums, shaken, unit_of
from codegen.tolerance import TF32_TOLERANCE, relative_error
from codegen.verify.result import Verification
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.language.random_data import random_inputs

pytestmark = pytest.mark.usefixtures("emulator")

#: Numbers of operators that are run in every test: of all frames, for seconds.
NUMBERS = range(12)


@pytest.mark.slow
@pytest.mark.usefixtures("opencl", "c_compiler")
@pytest.mark.parametrize("number", NUMBERS)
def test_a_drawn_operator_agrees(number: int) -> None:
    record = examined(number)
    assert "traceback" not in record, record["traceback"]
    assert {run["outcome"] for run in record["runs"]} <= {"agrees"}, record["runs"]
    assert record["took"] or record["refused"]


TRIANGLE = {
    "name": "triangle", "expr": "C[i,j] = sum(k, select(k <= i, A[i,k], 0) * B[k,j]); Y[i,j] = exp(0.1 * C[i,j]) + i",
    "sizes": {"i": 300, "j": 200, "k": 300},
}  # fmt: skip


def test_kernels_of_every_kind_are_drawn() -> None:
    kernels = kernels_of(operator_from_data(TRIANGLE), "v100")
    chosen = drawn(kernels, random.Random(0), 3)
    assert len(chosen) == 3 and len({kernel.kind for kernel in chosen}) == len({kernel.kind for kernel in kernels})
    assert {"inside le", "inside reduced axis compared"} <= set(chosen[0].productions()[chosen[0].lowerings[0]])


@pytest.mark.slow
def test_a_planted_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    import codegen.gpu.sources as sources

    emitted = sources.cuda_source

    def with_fault(*arguments: Any) -> str:
        # Of every comparison with "at most" in a reduction, "less than".
        return emitted(*arguments).replace("<= ", "< ", 1) if "<= " in emitted(*arguments) else emitted(*arguments)

    monkeypatch.setattr(sources, "cuda_source", with_fault)
    record = examined_data(TRIANGLE, random.Random(1))
    wrong = next(run for run in record["runs"] if run["outcome"] == "wrong")
    small = shrunk_operator(TRIANGLE, wrong, 8.0)
    assert len(small["expr"]) < len(str(TRIANGLE["expr"]))
    assert operator_from_data(small).name == "triangle"


def test_the_smallest_operator_that_fails_is_kept() -> None:
    small = shrunk(TRIANGLE, lambda data: "exp" in data["expr"] and data["sizes"].get("i", 0) > 4)
    assert small["expr"] == "Y[i, j] = exp(0.1)"
    assert small["sizes"] == {"i": 5, "j": 1}


def test_places_are_made_smaller_as_reads() -> None:
    gathered = {
        "name": "rows", "expr": "Y[i, j] = exp(E[P[i] | pad=0] * 2) + X[i, j]", "sizes": {"i": 8, "j": 4},
        "dtypes": {"P": "int32"}, "shapes": {"E": [16], "P": [8]},
    }  # fmt: skip
    small = shrunk(gathered, lambda data: "P[" in data["expr"])
    assert small["expr"] == "Y[i, j] = E[P[i] | pad=0]"


def test_the_canonical_form_means_what_was_written() -> None:
    small = {**TRIANGLE, "sizes": {"i": 9, "j": 7, "k": 9}}
    assert meaning_error(kernel_form(operator_from_data(small))) < 1e-12


class _Judged:
    """A kernel's verification as it came out."""

    def __init__(self, reason: str, error: float | None, **sizes: int) -> None:
        self.result = Verification(
            passed=False, method="", relative_error=error, tolerance=1e-4, axis_sizes=sizes, reason=reason
        )


@pytest.mark.parametrize(
    ("reason", "error", "sound", "outcome"),
    [
        ("relative error 1 is above 0.0001", 1.0, True, "wrong"),
        ("relative error 1 is above 0.0001", 1.0, False, "unsound"),
        ("3 of 9 outputs not written, or read outside a tensor", 1.0, False, "unsound"),
        ("verify: a race", float("inf"), False, "wrong"),
        ("no such tile", None, True, "refused"),
    ],
)
def test_outcomes(monkeypatch: pytest.MonkeyPatch, reason: str, error: float | None, sound: bool, outcome: str) -> None:
    monkeypatch.setattr(bench.fuzz.kernels, "_is_sound", lambda kernel, result: sound)
    kernel: Kernel = kernels_of(operator_from_data(TRIANGLE), "v100")[0]
    assert outcome_of(kernel, _Judged(reason, error).result) == outcome


def test_numbers_beyond_the_accumulators_are_no_fault_of_a_kernel() -> None:
    data = {"expr": "G[i] = exp(X[i] * 400); Y[i] = sum(j, G[i] * W[j])", "sizes": {"i": 64, "j": 8}}
    kernel: Kernel = kernels_of(operator_from_data(data), "v100")[0]
    judged = _Judged("3 of 9 outputs not written, or read outside a tensor", 1.0, i=64, j=8)
    assert outcome_of(kernel, judged.result) == "unsound"


def test_numbers_beyond_what_stores_them_are_no_fault_of_a_kernel() -> None:
    text = "H[i,n] = sum(k, A[i,k] * B[k,n]); G[i,n] = exp(H[i,n] * 0.4); C[i,p] = sum(n, G[i,n] * D[p,n])"
    sizes = {"i": 32, "n": 32, "k": 32, "p": 32}
    data = {"expr": f"{text}; Y[i,p] = C[i,p] ** 0.5", "sizes": sizes, "dtypes": dict.fromkeys("ABDY", "float16")}
    kernels: list[Kernel] = kernels_of(operator_from_data(data), "a100")
    judged = _Judged("relative error inf is above 0.00391", float("inf"), **sizes)
    for kind in ("mma+rows+sequence", "walks.pair_warps"):
        assert outcome_of(next(each for each in kernels if each.kind == kind), judged.result) == "unsound"


def test_what_few_bits_of_factors_come_to_is_no_fault_of_a_kernel() -> None:
    text = "C[i,j] = sum(k, A[i,k] * B[k,j]); Y[i,j] = cos(8 * C[i,j])"
    sizes = {"i": 16, "j": 16, "k": 96}
    judged = _Judged("relative error 0.0186 is above 0.00781", 0.0186, **sizes).result
    for rounded, outcome in ((True, "unsound"), (False, "wrong")):
        data = {"expr": text, "sizes": sizes, "allow_tf32": rounded}
        kernel: Kernel = kernels_of(operator_from_data(data), "h100")[0]
        assert outcome_of(kernel, replace(judged, tolerance=TF32_TOLERANCE)) == outcome


def test_what_cancels_inside_a_function_is_no_fault_of_a_kernel() -> None:
    data = {"expr": "C[i] = min(k, A[k,i] * k); Y[i] = gelu(C[i] * 3 - 5)", "sizes": {"i": 1, "k": 3}}
    kernel: Kernel = kernels_of(operator_from_data(data), "v100")[0]
    assert outcome_of(kernel, _Judged("relative error 0.3 is above 0.0001", 0.3, i=1, k=3).result) == "unsound"


def test_equal_terms_added_one_by_one_are_no_fault_of_a_kernel() -> None:
    data = {"expr": "Y[i] = sum(k, min(X[i,k], T[i] - 9.1))", "sizes": {"i": 2, "k": 400000}}
    expr = operator_from_data(data)
    kernel: Kernel = kernels_of(expr, "v100")[0]
    off = error_of_plain_sums(expr)
    assert off > 1e-4
    slight = _Judged("relative error is above 0.0001", 2 * off, i=2, k=400000)
    assert outcome_of(kernel, slight.result) == "unsound"
    grave = _Judged("relative error 0.9 is above 0.0001", 0.9, i=2, k=400000)
    assert outcome_of(kernel, grave.result) == "wrong"


def test_rows_that_cancel_wholly_are_not_compared_in_their_meaning() -> None:
    rows = "M[i] = sum(j, X[i,j]) / 4096; R[i] = sum(j, X[i,j] - M[i]) / 4096; Y[i,j] = tanh(X[i,j] - M[i]) * R[i]"
    form = kernel_form(operator_from_data({"expr": rows, "sizes": {"i": 2, "j": 4096}}))
    moved = [shaken(form.source, random_inputs(form.source, 0), unit_of("float64"), seed)[0] for seed in range(2)]
    assert relative_error(*moved) > 1e-2
    assert meaning_error(form) == 0.0


def test_seeds_are_those_of_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str | None, tuple[int, ...]]] = []

    def verify(self: Kernel, engine: str | None, seeds: Sequence[int]) -> Verification:
        asked.append((engine, tuple(seeds)))
        return Verification(passed=True, method="", relative_error=0.0, tolerance=1e-4, axis_sizes={})

    monkeypatch.setattr(Kernel, "verify", verify)
    examined(12)
    first = list(asked)
    asked.clear()
    examined(12)
    assert asked == first and len(first) >= 2
