"""Constructed programs: aligned, within the device's limits, ranked, distinct, and with their reasons."""

from __future__ import annotations

import json
import math
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.construct.construct import EPSILON_STEPS, IRREGULAR_EPSILON, construct
from roller.construct.performance import MicroModel
from roller.construct.program import Construction, RProgram
from roller.construct.rtile import TileSpace
from sokoban.kernel.form import KernelForm, kernel_form
from sokoban.language.operators import operator_from_data
from sokoban.model.rational import estimate_schedules
from tests.sokoban.schedules import form_of

SUITE = {data["name"]: data for data in json.loads(files("bench.suites").joinpath("roller119.json").read_text())}
NAMES = ("M0", "M2", "C0", "C3", "C11", "C40", "D0", "D5", "E0", "P0", "P5", "R0", "R3")
DEVICES = ("v100", "a100", "h200", "k80", "mi50", "ipu")


def suite_form(name: str) -> KernelForm:
    return kernel_form(operator_from_data(SUITE[name]))


_done: dict[tuple[str, str], Construction] = {}


def constructed(name: str, device: str) -> Construction:
    if (name, device) not in _done:
        _done[name, device] = construct(suite_form(name), load_device(device))
    return _done[name, device]


every_operator = pytest.mark.parametrize("name", NAMES)
every_device = pytest.mark.parametrize("device", DEVICES)
#: Blocks of operators without reuse are 64 threads or more: an IPU's tile has six.
every_pair = pytest.mark.parametrize(
    ("name", "device"),
    [(name, device) for name in NAMES for device in DEVICES if device != "ipu" or name[0] in "MCD"],
)


@every_pair
def test_distinct_programs_best_first(name: str, device: str) -> None:
    programs = constructed(name, device).programs
    assert len(programs) in (9, 10)
    assert len({program.schedule for program in programs}) == len(programs)
    seconds = [program.estimate.seconds for program in programs]
    assert seconds == sorted(seconds)
    assert all(math.isfinite(s) and s > 0 for s in seconds)


@every_pair
def test_programs_keep_to_the_device(name: str, device: str) -> None:
    construction = constructed(name, device)
    limits = construction.device.limits
    for program in construction.programs:
        assert 1 <= program.schedule.threads_per_block <= limits.threads_per_block
        assert program.estimate.shared_bytes <= limits.shared_bytes_per_block_opt_in
        assert program.estimate.blocks_per_unit >= 1
        assert (
            construction.device.kind == "ipu" or program.schedule.grid_blocks(construction.form.sizes) <= limits.grid_x
        )


@every_pair
def test_blocks_divide_into_threads(name: str, device: str) -> None:
    construction = constructed(name, device)
    form = construction.form
    for program in construction.programs:
        schedule = program.schedule
        assert tuple(axis for axis, _ in schedule.block) == form.spatial
        for axis, block in schedule.block:
            assert block % schedule.register_tile[axis] == 0
        assert set(schedule.step_of) <= set(form.reduced)
        assert all(size >= 1 for _, size in schedule.step)


@every_pair
def test_scaled_up_blocks_fill_their_warps(name: str, device: str) -> None:
    """Tiles as they were grown; those that were shrunk later are the next test's."""
    construction = constructed(name, device)
    lanes = construction.device.warp_lanes
    for program in construction.programs:
        if any(reason.action.startswith("keep") and reason.layer == "shared" for reason in program.reasons) and not any(
            reason.layer == "scale out" for reason in program.reasons
        ):
            threads = program.schedule.threads_per_block
            warps = math.ceil(threads / lanes)
            assert warps * lanes - threads <= program.epsilon * warps * lanes, program.schedule


def test_shrunken_blocks_fill_their_warps() -> None:
    for size in ((128, 1000, 2048), (96, 200, 512), (100, 100, 100)):
        construction = construct(form_of(op="matmul", m=size[0], n=size[1], k=size[2]), load_device("v100"), top_k=99)
        for program in construction.programs:
            if any(reason.layer == "scale out" for reason in program.reasons):
                threads = program.schedule.threads_per_block
                warps = math.ceil(threads / 32)
                assert warps * 32 - threads <= program.epsilon * warps * 32, program.schedule


@every_pair
def test_the_reasons_end_with_the_program(name: str, device: str) -> None:
    construction = constructed(name, device)
    for program in construction.programs:
        assert program.reasons
        assert all(reason.layer and reason.action for reason in program.reasons)
        if program.shared_tile is None or program.register_tile is None:
            continue
        schedule = program.schedule
        assert program.reasons[-1].tile == program.shared_tile.shape
        assert program.shared_tile.sizes == {**schedule.block_of, **schedule.step_of}
        registers = [reason.tile for reason in program.reasons if reason.layer == "registers"]
        assert registers[-1] == program.register_tile.shape
        spatial = program.register_tile.shape[: program.register_tile.space.spatial_count]
        assert spatial == tuple(schedule.register_tile[axis] for axis in construction.form.spatial)


@every_operator
def test_every_growth_has_the_score_that_the_formula_gives(name: str) -> None:
    construction = constructed(name, "v100")
    space = TileSpace.of(construction.form)
    model = MicroModel(space, construction.device, 1.0, 1.0)
    for program in construction.programs:
        before: tuple[int, ...] = (1,) * len(space.axes)
        for reason in program.reasons:
            if isinstance(reason.tile, str):
                continue
            if reason.action.startswith("grow"):
                score = dict(reason.numbers)["score"]
                saved = model.traffic(before) - model.traffic(reason.tile)
                added = model.footprint(reason.layer, reason.tile) - model.footprint(reason.layer, before)
                assert score > 0
                assert score == pytest.approx(saved / max(1, added))
                changed = [axis for axis, a, b in zip(space.axes, before, reason.tile, strict=True) if a != b]
                assert reason.action == f"grow {changed[0]}" and len(changed) == 1
            before = reason.tile


@pytest.mark.parametrize("device", ["v100", "mi50"])
@every_operator
def test_construction_is_deterministic(name: str, device: str) -> None:
    again = construct(suite_form(name), load_device(device))
    assert again.programs == constructed(name, device).programs
    assert (again.considered, again.epsilon) == (
        constructed(name, device).considered,
        constructed(name, device).epsilon,
    )


@every_operator
def test_the_ranking_s_estimates_are_those_of_the_schedules(name: str) -> None:
    construction = constructed(name, "v100")
    schedules = [program.schedule for program in construction.programs]
    table = estimate_schedules(construction.form, construction.device, schedules)
    for position, program in enumerate(construction.programs):
        assert program.estimate.seconds == pytest.approx(float(table.seconds[position]), rel=1e-12)
        assert program.estimate.shared_bytes == table.shared_bytes[position]


def test_fewer_programs_are_the_first_of_more() -> None:
    ten = constructed("M2", "v100").programs
    assert construct(suite_form("M2"), load_device("v100"), top_k=3).programs == ten[:3]


# Scale out


def balance(program: RProgram, form: KernelForm, device: DeviceSpec) -> float:
    return program.schedule.grid_blocks(form.sizes) / device.unit_count


@pytest.mark.parametrize("device_name", ["v100", "a100", "h200"])
@pytest.mark.parametrize("size", [(128, 256, 256), (96, 200, 512)])
def test_small_operators_shrink_until_half_the_units_work(device_name: str, size: tuple[int, int, int]) -> None:
    """Some proposals do; whether fewer blocks with longer steps beat them is the model's to say."""
    device = load_device(device_name)
    form = form_of(op="matmul", m=size[0], n=size[1], k=size[2])
    programs = construct(form, device, top_k=80).programs
    assert max(balance(program, form, device) for program in programs) >= 0.5
    tiled = [p for p in programs if p.policy == "scale up"]
    shrunk = [p for p in tiled if any(reason.layer == "scale out" for reason in p.reasons)]
    assert shrunk
    for program in shrunk:
        for reason in program.reasons:
            if reason.layer == "scale out":
                numbers = dict(reason.numbers)
                assert numbers["blocks"] < numbers["units"] == device.unit_count


def test_large_operators_do_not_shrink() -> None:
    for program in construct(form_of(op="matmul", m=8192, n=8192, k=512), load_device("v100")).programs:
        assert not any(reason.layer == "scale out" for reason in program.reasons)


def test_a_tiled_reduction_stays_on_one_unit() -> None:
    """Blocks are tiles of the output: none is split along the reduction."""
    form = form_of(op="matmul", m=128, n=1000, k=4032)
    for program in construct(form, load_device("v100")).programs:
        assert set(program.schedule.block_of) == {"m", "n"}


# Epsilon


def test_regular_shapes_need_no_more_padding_than_the_first_step() -> None:
    for name in ("M3", "C5", "E0"):
        construction = construct(suite_form(name), load_device("v100"))
        assert construction.epsilon == EPSILON_STEPS[0]


def test_padding_is_raised_only_for_too_few_programs() -> None:
    form, device = form_of(op="matmul", m=8192, n=680, k=512), load_device("v100")
    few, many = construct(form, device, top_k=1), construct(form, device, top_k=200)
    assert few.epsilon == EPSILON_STEPS[0]
    assert many.epsilon > few.epsilon
    assert many.considered > few.considered
    assert few.programs[0].epsilon == EPSILON_STEPS[0]


def test_irregular_shapes_far_from_their_bound_are_padded_too() -> None:
    """Seven by seven outputs have aligned tiles of 1 and 7; tiles of 8 waste an eighth and are worth it."""
    form, device = form_of(op="conv2d", n=128, c=512, h=7, w=7, f=512, kh=3, kw=3, padding="SAME"), load_device("v100")
    assert construct(form, device).epsilon == IRREGULAR_EPSILON
    regular = form_of(op="conv2d", n=128, c=512, h=8, w=8, f=512, kh=3, kw=3, padding="SAME")
    assert construct(regular, device).epsilon == EPSILON_STEPS[0]


def test_a_launch_of_few_blocks_takes_long_steps() -> None:
    """Waiting for memory at every step is what such a launch does: fewer steps, as long as shared memory has room."""
    best = construct(form_of(op="matmul", m=128, n=1000, k=4096), load_device("v100")).programs[0]
    assert best.schedule.step_of["k"] >= 32
    assert any("a longer reduction step" in reason.action for reason in best.reasons)


@pytest.mark.parametrize(
    "operator",
    [
        {"op": "matmul", "m": 17, "n": 33, "k": 1000},
        {"op": "matmul", "m": 1, "n": 1, "k": 7},
        {"op": "matmul", "m": 3, "n": 1009, "k": 1},
        {"op": "conv2d", "n": 1, "c": 3, "h": 7, "w": 11, "f": 5, "kh": 3, "kw": 2, "stride": 2, "groups": 1},
        {"op": "elementwise", "function": "relu", "shape": [7]},
        {"op": "elementwise", "function": "add", "shapes": [[7, 1, 13], [11, 13]]},
        {"op": "reduce", "function": "max", "shape": [3, 5, 7], "axes": [0, 1, 2]},
        {"op": "softmax", "shape": [3, 17], "axis": 0},
        {"op": "transpose", "shape": [5, 7, 9], "perm": [2, 1, 0]},
    ],
    ids=lambda operator: "-".join(str(v) for v in operator.values()),
)
@pytest.mark.parametrize("device", ["v100", "a100", "h200", "k80", "mi50"])
def test_odd_and_tiny_operators_have_programs(operator: dict[str, Any], device: str) -> None:
    construction = construct(form_of(**operator), load_device(device))
    assert construction.programs
    for program in construction.programs:
        assert program.schedule.threads_per_block <= construction.device.limits.threads_per_block


# Policies


def test_halves_use_tensor_cores_where_there_are_some() -> None:
    form = form_of(op="matmul", m=1024, n=768, k=512, dtype="float16")
    best = construct(form, load_device("v100")).programs[0]
    assert (best.schedule.instruction, best.policy) == ("wmma_16x16x16", "scale up, Tensor Core")
    for axis, size in (*best.schedule.block, *best.schedule.thread, *best.schedule.step):
        assert size % 16 == 0, axis
    for program in construct(form, load_device("p100")).programs:
        assert program.schedule.instruction == "fma"


def test_halves_with_odd_sizes_still_have_ten_programs() -> None:
    construction = construct(form_of(op="matmul", m=17, n=33, k=1000, dtype="float16"), load_device("v100"))
    assert len(construction.programs) == 10


def test_element_wise_operators_have_one_layer_of_tiles() -> None:
    construction = construct(form_of(op="elementwise", function="gelu", shape=[127, 333]), load_device("v100"))
    for program in construction.programs:
        assert (program.policy, program.shared_tile, program.schedule.cached) == ("element-wise", None, ())
        assert [reason.layer for reason in program.reasons] == ["registers"]


def test_transposed_operands_turn_in_shared_memory() -> None:
    construction = construct(form_of(op="transpose", shape=[1000, 777], perm=[1, 0]), load_device("v100"))
    best = construction.programs[0]
    assert best.schedule.cached == ("X",)
    assert best.schedule.padding_of["X"] % 2 == 1


def test_rows_share_their_reduction() -> None:
    construction = construct(form_of(op="softmax", shape=[517, 1000]), load_device("mi50"))
    for program in construction.programs:
        # Whole wavefronts of 64, which several short rows may share.
        assert program.schedule.threads_per_block % 64 == 0


# Devices from files


def device_file(tmp_path: Path, **changes: tuple[str, str]) -> DeviceSpec:
    """The V100's file with some of its text replaced."""
    text = files("hal").joinpath("devices", "v100-sxm2-16gb.toml").read_text()
    for old, new in changes.values():
        assert old in text
        text = text.replace(old, new)
    tomllib.loads(text)
    path = tmp_path / "own.toml"
    path.write_text(text)
    return load_device(path)


LITTLE_SHARED_MEMORY = {
    "block": ("shared_bytes_per_block = 49_152", "shared_bytes_per_block = 2_048"),
    "opt_in": ("shared_bytes_per_block_opt_in = 98_304", "shared_bytes_per_block_opt_in = 2_048"),
}
FEW_THREADS = {"threads": ("threads_per_block = 1024", "threads_per_block = 96")}


def test_a_device_of_one_s_own_with_little_shared_memory(tmp_path: Path) -> None:
    device = device_file(tmp_path, **LITTLE_SHARED_MEMORY)
    for name in ("M2", "C0", "D0", "E0", "R0"):
        construction = construct(suite_form(name), device)
        assert construction.programs
        assert all(program.estimate.shared_bytes <= 2048 for program in construction.programs)


def test_a_device_of_one_s_own_with_few_threads(tmp_path: Path) -> None:
    device = device_file(tmp_path, **FEW_THREADS)
    for name in ("M2", "D0", "E0", "R0", "P0"):
        for program in construct(suite_form(name), device).programs:
            assert program.schedule.threads_per_block <= 96


@pytest.mark.parametrize("name", ["C3", "C28"])
def test_programs_that_cannot_run_do_not_count(name: str) -> None:
    assert len(construct(suite_form(name), load_device("mi50")).programs) == 10


def test_a_product_over_two_axes_fits_an_mi50() -> None:
    text = "C[i,j] = sum([k,l], A[i,k,l] * B[l,j,k])"
    form = form_of(expr=text, sizes={"i": 512, "j": 768, "k": 96, "l": 64})
    assert construct(form, load_device("mi50")).programs


def test_little_shared_memory_leaves_ten_programs(tmp_path: Path) -> None:
    assert len(construct(suite_form("M2"), device_file(tmp_path, **LITTLE_SHARED_MEMORY)).programs) == 10


def test_few_threads_leave_a_convolution(tmp_path: Path) -> None:
    assert construct(suite_form("C0"), device_file(tmp_path, **FEW_THREADS)).programs


@pytest.mark.parametrize("name", ["E0", "P0", "R0"])
def test_an_ipu_takes_operators_without_reuse(name: str) -> None:
    assert construct(suite_form(name), load_device("ipu")).programs


def test_programs_scored_in_two_parts_rank_as_if_scored_at_once() -> None:
    form, device = suite_form("C36"), load_device("v100")
    found = construct(form, device)
    assert found.epsilon == IRREGULAR_EPSILON  # scored once for each of two epsilons
    scored = estimate_schedules(form, device, [program.schedule for program in found.programs])
    seconds = [program.estimate.seconds for program in found.programs]
    assert seconds == scored.seconds.tolist() == sorted(seconds)
    assert len({program.epsilon for program in found.programs}) == 2


def test_what_no_tile_fits_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    device = load_device("v100")
    monkeypatch.setattr("roller.construct.construct.Proposals.within", lambda self, epsilon: iter(()))
    with pytest.raises(InputError) as caught:
        construct(suite_form("M2"), device)
    assert str(caught.value) == "M2: no tile fits the memory of v100-sxm2-16gb; use a smaller operator"
