"""Pairs of products by hand-picked schedules, for tests of their texts."""

from __future__ import annotations

from typing import Any

from codegen.target import Target
from codegen.verify.chain import ChainCheck, Step
from codegen.verify.gpu import EMULATED, verify_chain
from codegen.verify.result import Verification
from roller.algorithms.pair import WholePair
from sokoban.kernel.form import KernelForm
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.stages import operator_form
from sokoban.language.operators import operator_from_data
from sokoban.schedule.pair import PairSchedule

PLAIN = "H[m,n] = sum(k, X[m,k] * A[k,n]); G[m,n] = gelu(H[m,n] + b[n]); Y[m,p] = sum(n, G[m,n] * B[n,p])"
#: Both factors the other way round, one of every problem; a gate between; bias, activation and residual at the end.
BATCHED = (
    "H[b,m,n] = sum(k, X[b,m,k] * A[n,k]); G[b,m,n] = silu(H[b,m,n] + c[n]) * gate[b,m,n]; "
    "Z[b,m,k] = sum(n, G[b,m,n] * B[b,k,n]); Y[b,m,k] = relu(Z[b,m,k] + d[k]) + X[b,m,k]"
)
#: Rows of X and of the result beside those of other problems; logarithms that are infinite beyond the last column.
ASIDE = (
    "H[b,m,n] = sum(k, X[m,b,k] * A[b,n,k]); G[b,m,n] = log(H[b,m,n] * H[b,m,n] + e[n]); "
    "Z[m,b,p] = sum(n, G[b,m,n] * B[b,n,p]); Y[m,b,p] = Z[m,b,p] * 0.125"
)
SIZES = {"b": 3, "m": 37, "n": 72, "k": 40, "p": 24}


def form_of(text: str = PLAIN, dtype: str = "float16", **sizes: int) -> KernelForm:
    used = {axis: size for axis, size in (SIZES | sizes).items() if f"{axis}]" in text or f"{axis}," in text}
    used = used if "[b," in text or ",b," in text else {axis: size for axis, size in used.items() if axis != "b"}
    used = used if "p]" in text else {axis: size for axis, size in used.items() if axis != "p"}
    return operator_form(operator_from_data({"expr": text, "sizes": used, "dtype": dtype}))


def by_matrices(rows: int = 32, step: int = 32, warps: int = 2, stages: int = 1, held: bool = False) -> PairSchedule:
    return PairSchedule(
        rows=rows, step=step, warps=warps, stages=stages, held=held, instruction=Instruction.MMA_16X8X16
    )


def by_multiply_adds(rows: int = 16, step: int = 16, warps: int = 2, lanes: int = 8) -> PairSchedule:
    return PairSchedule(
        rows=rows, step=step, warps=warps, stages=1, held=False, lanes=lanes, instruction=Instruction.FMA
    )


def checked(
    schedule: PairSchedule, form: KernelForm, engine: str = "emulator", target: Target = EMULATED, **more: Any
) -> Verification:
    """What became of the kernel of a pair of products, run whole."""
    split = WholePair()
    steps = tuple(Step(problem, schedule) for problem in split.problems(form))
    return verify_chain(ChainCheck(form, steps, split.tolerance(form)), engine=engine, target=target, **more)
