"""Two products in one kernel against a sequence of two: where it pays, where it does not, and that it is right."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from codegen.target import Target
from codegen.verify.gpu import verify_chain
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from roller.algorithms.chain import ChainProgram
from roller.algorithms.pair import consider, program_of
from roller.estimate.schedules import score_file
from roller.explain.page import explain
from roller.programs import Programs, find_programs, form_on
from sokoban.kernel.instructions import Instruction
from sokoban.kernel.placed import PlacedForm
from sokoban.kernel.stages import operator_form
from sokoban.language.operators import operator_from_data
from sokoban.model.gpu.kinds.pair import element_instructions
from sokoban.schedule.pair import PairSchedule

A100, H100, V100, EPYC = (load_device(name) for name in ("a100", "h100", "v100", "epyc-7763"))
LAYERS = "H[m,n] = sum(k, X[m,k] * A[k,n]); G[m,n] = relu(H[m,n] + b[n]); Y[m,p] = sum(n, G[m,n] * B[n,p])"
#: The first layers of a Swin Transformer on 32 images, and those of BERT on four sequences.
NARROW = {"m": 100352, "n": 384, "k": 96, "p": 96}
WIDE = {"m": 2048, "n": 3072, "k": 768, "p": 768}


def operator(sizes: dict[str, int], text: str = LAYERS, dtype: str = "float16") -> dict[str, Any]:
    return {"expr": text, "sizes": sizes, "dtype": dtype}


def found(data: dict[str, Any], device: DeviceSpec = A100, top_k: int = 6) -> Programs:
    return find_programs(form_on(operator_from_data(data), device), device, top_k, "roller")


def test_narrow_layers_are_one_kernel_and_both_kinds_are_kept() -> None:
    for device, gain in ((A100, 1.5), (H100, 1.6)):
        programs = found(operator(NARROW), device)
        ranked = programs.ranked(6)
        assert [program.algorithm for program in ranked] == ["fused pair"] * 3 + ["sequence"] * 3
        assert all(one.estimate.seconds <= other.estimate.seconds for one, other in pairwise(ranked))
        assert ranked[3].estimate.seconds > gain * ranked[0].estimate.seconds
        assert not ranked[0].workspace and len(ranked[0].parts) == 1


def test_wide_layers_stay_a_sequence() -> None:
    programs = found(operator(WIDE))
    sequence, fused = programs.considered
    assert fused.declined == "no tile with whole rows of 768 and of 768 elements fits the memory of a100-pcie-40gb"
    assert programs.ranked(4) == list(sequence.programs[:4])


def test_what_has_no_kernel_says_why() -> None:
    declined = {
        consider(PlacedForm(operator_form(operator_from_data(data)), device), 3).declined
        for data, device in (
            (operator(NARROW | {"k": 100}), A100), (operator(NARROW, dtype="float64"), A100),
            (operator(NARROW, dtype="float32"), EPYC),
        )
    }  # fmt: skip
    assert declined == {
        "columns of X, 100 elements, are no multiple of 8",
        "is no pair of products in one kernel: its factors and result have to be all of one of float16, bfloat16, "
        "float32, summed in float32",
        "its kernels are for lanes that are threads; those of epyc-7763 are elements of vectors",
    }


def test_what_is_done_with_every_element_is_counted() -> None:
    """A multiply-add and a rounding to 16 bits each way more or less: gelu takes 14 instructions more than relu."""
    schedule = PairSchedule(rows=64, step=32, warps=4, stages=1, held=False, instruction=Instruction.MMA_16X8X16)
    relu, gelu = (
        program_of(
            operator_form(operator_from_data(operator(NARROW, LAYERS.replace("relu", name)))), schedule, A100
        ).parts[0].problem
        for name in ("relu", "gelu")
    )  # fmt: skip
    assert element_instructions(gelu, schedule) - element_instructions(relu, schedule) == 14  # type: ignore[arg-type]


@pytest.mark.usefixtures("emulator")
@pytest.mark.parametrize(
    ("sizes", "dtype", "device"),
    [
        (NARROW, "float16", A100),
        ({"m": 5000, "n": 488, "k": 256, "p": 64}, "bfloat16", H100),
        ({"m": 5000, "n": 201, "k": 32, "p": 44}, "float32", V100),
    ],
)
def test_the_first_is_right(sizes: dict[str, int], dtype: str, device: DeviceSpec) -> None:
    programs = consider(PlacedForm(operator_form(operator_from_data(operator(sizes, dtype=dtype))), device), 1)
    check = programs.programs[0].check()
    assert check.form.sizes["m"] < 1000
    result = verify_chain(check, engine="emulator", target=Target.of(device))
    assert result.passed, result.reason
    assert not result.needless


def test_pages_tell_why_and_why_not() -> None:
    programs = found(operator(NARROW))
    ranked = programs.ranked(6)
    fused, sequence = (" ".join(explain(programs, rank, ranked).split()) for rank in (1, 4))
    for line in (
        "77.1 MB that a sequence of kernels writes and reads, passes through registers alone",
        "a byte of A and B from L2 serves", "instructions besides them", "% of the peak of mma_16x8x16",
    ):  # fmt: skip
        assert line in fused
    assert "One kernel of two products, against 167 µs of the best sequence" in sequence
    wide = found(operator(WIDE))
    assert "fused pair: not tried, as no tile with whole rows" in explain(wide, 1, wide.ranked(2))


def test_schedules_of_a_file_are_scored(tmp_path: Path) -> None:
    lines = [
        '{"rows": 128, "step": 32, "warps": 4, "stages": 2, "held": true}',
        '{"rows": 512, "step": 128, "warps": 8}',
    ]
    (tmp_path / "schedules.jsonl").write_text("\n".join(lines))
    first, second = score_file(tmp_path / "schedules.jsonl", operator_from_data(operator(NARROW)), A100).rows([0, 1])
    best = found(operator(NARROW)).ranked(1)[0]
    assert isinstance(best, ChainProgram) and first.estimate.seconds == pytest.approx(best.estimate.seconds, rel=0.05)
    assert second.reason is not None and "registers each: no block fits" in second.reason


def test_other_pairs_stand_in_for_one_that_spills() -> None:
    programs = found(operator(NARROW))
    ranked = programs.ranked(1, spares=3)
    assert [program.algorithm for program in ranked] == ["fused pair"] * 4
    assert len({program.composition for program in ranked}) == 4
