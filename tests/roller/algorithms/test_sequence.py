"""Operators of several kernels: programs of each put together, priced as a sum, and right as a whole."""

from __future__ import annotations

import math
from typing import Any

import pytest

from codegen.target import Target
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from roller.algorithms.chain import ChainProgram
from roller.explain.page import explain
from roller.programs import Programs, find_programs
from sokoban.kernel.form import MAX_REPEATED_POINTS
from sokoban.kernel.stages import operator_form
from sokoban.language.named.attention import Attention
from sokoban.language.operators import operator_from_data

A100, V100, H100 = (load_device(name) for name in ("a100", "v100", "h100"))
LAYERS = {
    "expr": "H[m,n] = sum(k, X[m,k] * A[k,n]); G[m,n] = gelu(H[m,n] + b[n]); Y[m,p] = sum(n, G[m,n] * B[n,p])",
    "sizes": {"m": 512, "n": 1024, "k": 256, "p": 256},
}
BIASED = {
    "expr": "S[i,j] = sum(d, Q[i,d] * K[j,d]); T[i,j] = S[i,j] + bias[i,j]; M[i] = max(j, T[i,j]); "
    "E[i,j] = exp(T[i,j] - M[i]); N[i] = sum(j, E[i,j]); P[i,j] = E[i,j] / N[i]; Y[i,e] = sum(j, P[i,j] * V[j,e])",
    "sizes": {"i": 200, "j": 333, "d": 64, "e": 48},
}


def found(operator: dict[str, Any], device: DeviceSpec, top_k: int = 5, method: str = "roller") -> Programs:
    return find_programs(operator_form(operator_from_data(operator)), device, top_k, method)


def ranked(operator: dict[str, Any], device: DeviceSpec, top_k: int = 5, method: str = "roller") -> list[ChainProgram]:
    programs = found(operator, device, top_k, method).ranked(top_k)
    assert all(isinstance(program, ChainProgram) for program in programs)
    return programs  # type: ignore[return-value]


def test_the_first_has_the_best_of_every_kernel() -> None:
    first, *others = ranked(LAYERS, A100)
    stages = first.form.stages
    best = [find_programs(stage, A100, 5, "roller", ("direct",)).direct[0] for stage in stages]
    assert [part.schedule for part in first.parts] == [program.schedule for program in best]
    assert first.estimate.seconds == pytest.approx(sum(program.estimate.seconds for program in best))
    assert [tensor.name for tensor in first.workspace] == ["G"]
    for program in others:
        changed = [one.schedule != other.schedule for one, other in zip(first.parts, program.parts, strict=True)]
        assert sum(changed) == 1 and program.estimate.seconds >= first.estimate.seconds


def test_the_search_looks_at_every_kernel_where_it_is_asked() -> None:
    by_both = ranked(LAYERS, V100, 3, "both")[0].estimate.seconds
    assert by_both <= ranked(LAYERS, V100, 3)[0].estimate.seconds


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("operator", "device"),
    [(LAYERS, V100), (LAYERS | {"dtype": "float16"}, A100), (BIASED | {"dtype": "bfloat16"}, H100), (BIASED, V100)],
    ids=["float32", "float16", "softmax in bfloat16", "softmax"],
)
def test_the_first_is_right(operator: dict[str, Any], device: DeviceSpec) -> None:
    check = ranked(operator, device, 1)[0].check()
    assert check is not None
    result = verify_chain(check, engine="emulator", target=Target.of(device))
    assert result.passed, result.reason


def test_a_page_tells_of_every_kernel() -> None:
    programs = found(BIASED, A100)
    page = " ".join(explain(programs, 1, programs.ranked(3)).split())
    for line in (
        "kernels one after the other",
        "it sums 4 times, not twice",
        "Kernel 1 of 3: makes T",
        "Kernel 3 of 3: makes Y",
        "of workspace",
    ):
        assert line in page


def test_a_page_tells_of_a_processor_too() -> None:
    programs = found(LAYERS, load_device("epyc-7763"), 2)
    page = " ".join(explain(programs, 1, programs.ranked(2)).split())
    assert "Kernel 2 of 2: makes Y" in page and "not tried, as its kernels are for lanes that are threads" in page


def test_cut_down_it_has_as_many_kernels_as_before() -> None:
    # Of small sizes one kernel would compute the sum again for every j.
    broadcast = {"expr": "Y[i,j] = silu(sum(k, relu(X[k,i]))) * Z[j]", "sizes": {"i": 97, "j": 600, "k": 512}}
    program = ranked(broadcast, V100, 1)[0]
    check = program.check()
    assert len(program.parts) == len(check.steps) == 2
    assert math.prod(check.form.sizes.values()) < MAX_REPEATED_POINTS < 97 * 600 * 512


@pytest.mark.parametrize(("keys", "causal"), [(4099, False), (4096, False), (4099, True)])
def test_attention_over_pages_is_written_out_over_fewer_of_them(keys: int, causal: bool) -> None:
    operator = {
        "op": "attention", "b": 2, "heads": 4, "queries": 64, "keys": keys, "head_dim": 16, "page": 16, "pool": 600,
        "causal": causal, "epilogue": ["relu"],
    }  # fmt: skip
    program = ranked(operator, V100, 1)[0]
    small = program.check().form.source.operator_as(Attention)
    assert small is not None and small.pages is not None
    assert (small.heads, small.queries) == (2, 32) and small.pages.per_sequence > 1
    assert small.pages.are_full == (keys % 16 == 0)
