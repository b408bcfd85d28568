"""The library model for GEMMs: what must hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

import hal
from roller.library.products import gemm, gemm_cost, gemm_tiles
from roller.library.products.gemm_cost import CONSTANTS, TiledGemms, kernel_stages, resident_blocks

V100, P100, P4, T4, A100, H100, L4 = (
    hal.load_device(name) for name in ("v100-pcie", "p100", "p4", "t4", "a100", "h100", "l4")
)
BOARDS = [device for device in hal.all_devices() if device.vendor == "NVIDIA"]
ONE = np.ones(1)


def named(device: hal.DeviceSpec) -> str:
    return device.name


def launch(tile: str = "128x128", splits: float = 1, reduce: bool = False, rows: int = 1) -> gemm.GemmLaunch:
    found = next(t for t in gemm_tiles.TILES if t.name == tile)
    m, n, depth, threads, slices = (
        np.full(rows, float(value)) for value in (found.m, found.n, found.depth, found.threads, splits)
    )
    return gemm.GemmLaunch(
        tile_m=m, tile_n=n, tile_k=depth, threads=threads, splits=slices, reduce=np.full(rows, reduce)
    )


def kernel(m: Any, n: Any, k: Any, device: hal.DeviceSpec = V100, b: Any = 1, **kwargs: Any) -> np.ndarray:
    rows = np.broadcast(np.atleast_1d(b), m, n, k).size
    given = launch(kwargs.pop("tile", "128x128"), kwargs.pop("splits", 1), kwargs.pop("reduce", False), rows)
    return gemm.gemm_seconds(b, m, n, k, device, given, **kwargs).kernel_seconds


@pytest.mark.parametrize("device", BOARDS, ids=named)
@pytest.mark.parametrize("bias", [False, True])
def test_every_board_gives_positive_times_and_a_launch_from_its_menu(device: hal.DeviceSpec, bias: bool) -> None:
    m, n, k = (axis.ravel() for axis in np.meshgrid([1, 7, 300, 4096], [1, 33, 5000], [1, 64, 20_000], indexing="ij"))
    times = gemm.choose_gemm(1, m, n, k, device, bias=bias)
    assert (times.kernel_seconds > 0).all()
    assert np.isfinite(times.call_seconds).all()
    assert (times.call_seconds >= times.kernel_seconds).all()
    menu = {gemm_tiles.TILES[i].name for i in gemm_tiles.menu(gemm_tiles.generation(device), batched=not bias)}
    assert set(times.launch.tile_names) <= menu
    assert set(times.stage_seconds) == set(gemm.STAGES)
    assert set(times.bound.tolist()) <= set(gemm.STAGES)


@pytest.mark.parametrize("device", BOARDS, ids=named)
def test_a_longer_k_never_costs_less(device: hal.DeviceSpec) -> None:
    k = np.arange(8, 4096, 8)
    for bias in (False, True):
        assert (np.diff(kernel(512, 512, k, device, bias=bias)) > -1e-12).all()


def test_blocks_come_in_waves() -> None:
    units = V100.unit_count
    one, two, three = (
        kernel(128, 128 * blocks, 512, tile="128x128")[0] for blocks in (units, units + 1, 2 * units + 1)
    )
    half = kernel(128, 128 * (units // 2), 512, tile="128x128")[0]
    assert half == pytest.approx(one, rel=0.1), "the busiest unit has one block either way"
    assert two > 1.5 * one
    assert three > 1.2 * two


def test_long_large_products_run_near_the_best_rate_and_never_above_the_datasheet() -> None:
    size = 8192
    for device in BOARDS:
        rate = 2 * size**3 / kernel(size, size, size, device)[0]
        assert 0.4 * device.sustained_flops("float32") < rate <= device.peak_flops("float32"), device.name


def test_a_board_at_its_power_limit_is_fast_for_a_moment() -> None:
    assert T4.power_limited_flops("float32") is not None
    rate = [2 * 1024**3 * b / kernel(1024, 1024, 1024, T4, b=b)[0] for b in (2, 2000)]
    assert rate[0] > 1.05 * rate[1]
    tiles = [kernel(1024, 1024, 1024, T4, b=500, tile=name)[0] for name in ("128x128", "64x64")]
    assert tiles[1] > tiles[0], "more operand traffic, more energy"


def test_splitting_k_helps_only_where_blocks_are_few() -> None:
    few = [kernel(64, 64, 16_384, tile="64x64", splits=s, bias=True)[0] for s in (1, 8)]
    many = [kernel(4096, 4096, 1024, tile="64x64", splits=s, bias=True)[0] for s in (1, 8)]
    assert few[1] < few[0]
    assert many[1] > many[0]
    chosen = gemm.choose_gemm(1, [64, 4096], [64, 4096], [16_384, 1024], V100, bias=True).launch.splits
    assert chosen[0] > 1
    assert chosen[1] == 1


def test_a_second_kernel_for_the_slices_costs_its_launch() -> None:
    times = gemm.gemm_seconds(1, 64, 64, 8192, V100, launch("64x64", splits=8, reduce=True), bias=True)
    assert times.stage_seconds["reduce"][0] >= CONSTANTS.reduce_seconds


def test_slices_added_in_place_take_turns() -> None:
    def turns(m: int, splits: float, k: int = 8192) -> float:
        times = gemm.gemm_seconds(1, m, 64, k, V100, launch("64x64", splits=splits), bias=True)
        return float(times.stage_seconds["reduce"][0])

    assert turns(64, 1) == 0
    assert turns(64, 8) == pytest.approx(7 * CONSTANTS.turn_seconds), "all slices end together"
    assert turns(64, 32) == pytest.approx(31 * CONSTANTS.turn_seconds)
    at_once = V100.unit_count * 8  # 64x64 tiles
    assert turns(64 * at_once, 8) == 0, "a wave has one slice of each tile: they end one after the other"
    assert turns(64 * at_once // 2, 8) == pytest.approx(CONSTANTS.turn_seconds), "two of each tile in the last wave"


def test_turns_bound_a_kernel_of_many_short_slices() -> None:
    more_than_fit = 8 * V100.unit_count * 8
    times = gemm.gemm_seconds(1, 64, 64, more_than_fit, V100, launch("64x64", splits=more_than_fit / 8), bias=True)
    assert times.kernel_seconds[0] > (more_than_fit / 8 - 1) * CONSTANTS.turn_seconds


def test_rows_that_straddle_sectors_cost_requests() -> None:
    k = np.array([2048.0, 2052.0, 2050.0, 2049.0])
    plain, rows, double = (
        gemm.gemm_seconds(1, 2048, 2048, k, P100, launch("64x64", rows=4), bias=bias, dtype=dtype)
        for bias, dtype in ((False, "float32"), (True, "float32"), (True, "float64"))
    )
    for times in (plain, rows):
        per_step = times.stage_seconds["compute"] / np.ceil(k / 8)
        assert (np.diff(per_step) > 0).all(), "the fewer rows start with a sector, the more"
    assert (rows.stage_seconds["compute"] > plain.stage_seconds["compute"]).all(), "two operands instead of one"
    eight = double.stage_seconds["compute"] / np.ceil(k / 8)
    assert eight[0] == pytest.approx(eight[1], rel=0.01), "four elements of eight bytes fill a sector"


def test_deep_steps_read_rows_in_fewer_requests() -> None:
    def share(tile: str) -> float:
        with_rows, without = (
            gemm.gemm_seconds(
                1, 2048, 2048, 2048, A100, launch(tile), bias=True, constants=replace(CONSTANTS, short_rows=cost)
            ).stage_seconds["compute"][0]
            for cost in (CONSTANTS.short_rows, 0.0)
        )
        return float(with_rows / without - 1)

    assert 0 < share("128x32_sliced1x4") < 0.5 * share("128x32")


def translation(device: hal.DeviceSpec, n: float, k: float, *, m: float = 4096, bias: bool = True) -> float:
    """Seconds of one product by tiles of 128 rows and 32 columns."""
    tile = {name: column for name, column in gemm_tiles.tile_arrays(np.array([4])).items() if name not in ("m", "n")}
    run = TiledGemms(
        b=ONE, m=m * ONE, n=n * ONE, k=k * ONE, tile_m=128 * ONE, tile_n=32 * ONE, splits=ONE, reduce=ONE > 1,
        transposed=np.array([bias]), **tile,
    )  # fmt: skip
    return float(gemm_cost._translation_seconds(run, device, k * ONE, 4, CONSTANTS)[0])


def test_addresses_are_translated_where_the_spec_says_so() -> None:
    assert translation(V100, 4096, 40_000) == 0, "its spec has no reach"
    reach = P100.dram.translation_reach_bytes
    assert reach is not None
    layers = tuple(
        msgspec.structs.replace(layer, translation_reach_bytes=256 * reach) if layer.name == "dram" else layer
        for layer in P100.layers
    )
    farther = msgspec.structs.replace(P100, layers=layers)
    assert translation(farther, 4096, 40_000) < 0.02 * translation(P100, 4096, 40_000)
    assert translation(P100, 4096, 40_000) > 50 * translation(P100, 4096, 4000), "longer rows span more"
    assert translation(P100, 4096, 40_000, bias=False) < translation(P100, 4096, 40_000), "one operand of short rows"


def test_a_unit_with_blocks_in_more_rows_misses_more() -> None:
    few, many = (translation(P100, n, 8000, m=128 * 28 * 8 * 256 / n) for n in (28 * 256, 256))
    assert many > 1.2 * few, "as many blocks; with few columns those of a unit lie in different rows"


def test_a_call_costs_at_least_what_the_host_takes() -> None:
    for bias, floor in ((False, "matmul_call_seconds"), (True, "linear_call_seconds")):
        small = gemm.choose_gemm(1, 8, 8, 8, A100, bias=bias)
        assert small.call_seconds[0] == pytest.approx(getattr(A100.framework_calls, floor), rel=0.05)
        assert small.kernel_seconds[0] < 20e-6
    long = gemm.choose_gemm(1, 8192, 8192, 8192, V100)
    assert long.call_seconds[0] - long.kernel_seconds[0] < V100.framework_calls.matmul_call_seconds


def test_a_step_leaves_a_power_limited_board_more_clock_than_a_benchmark_does() -> None:
    shares = []
    for board in (T4, A100, V100):
        times = gemm.choose_gemm(1, 8192, 8192, 8192, board)
        shares.append(float(times.kernel_seconds[0] / times.call_seconds[0]))
    assert 1 / CONSTANTS.power_heat <= shares[0] < shares[1] < shares[2], "the further from its boost, the more"
    assert shares[2] == pytest.approx(1.0, abs=0.01), "no limit binds"


def test_narrow_operands_with_long_rows_are_bound_by_memory() -> None:
    times = gemm.choose_gemm(512, 1024, 8, 1024, V100)
    assert times.bound[0] == "dram"
    streamed = 512 * 4 * (1024 * 1024 + 8 * 1024 + 1024 * 8) / V100.dram.bandwidth_bytes_per_second
    assert times.kernel_seconds[0] > 1.5 * streamed, "every short read activates a DRAM row"


def test_doubling_dram_bandwidth_helps_what_memory_binds() -> None:
    layers = [
        msgspec.structs.replace(layer, bandwidth_bytes_per_second=2 * layer.bandwidth_bytes_per_second)
        if layer.name == "dram"
        else layer
        for layer in V100.layers
    ]
    faster = msgspec.structs.replace(V100, layers=tuple(layers))
    assert kernel(4096, 4096, 8, faster)[0] < 0.8 * kernel(4096, 4096, 8)[0]


def test_blocks_of_two_warps_share_schedulers_unevenly() -> None:
    units = V100.unit_count
    times = [
        gemm.gemm_seconds(units * blocks, 64, 64, 1024, V100, launch("64x64")).stage_seconds["compute"][0]
        for blocks in (1, 2, 4)
    ]
    assert times[1] == pytest.approx(times[2], rel=0.01), "two of the four schedulers do all the work"
    assert times[0] < 0.7 * times[1]


def test_resident_blocks_follow_registers_shared_memory_and_threads() -> None:
    columns = gemm_tiles.tile_arrays(np.arange(len(gemm_tiles.TILES)))
    ones = np.ones(len(gemm_tiles.TILES))
    run = TiledGemms(
        b=ones, m=ones, n=ones, k=ones, tile_m=columns["m"], tile_n=columns["n"], depth=columns["depth"],
        threads=columns["threads"], registers=columns["registers"], shared_bytes=columns["shared_bytes"],
        splits=ones, reduce=ones > 1, transposed=ones > 1,
    )  # fmt: skip
    found = dict(zip((tile.name for tile in gemm_tiles.TILES), resident_blocks(run, V100).tolist(), strict=True))
    assert (found["128x128"], found["128x64"], found["64x64"], found["32x128"]) == (2, 4, 8, 4)
    assert found["32x32_sliced1x4"] == 3
    stages = kernel_stages(run, V100, V100.best_flops("float32"), 4)
    assert all((seconds >= 0).all() for seconds in stages.values())


def test_double_precision_takes_longer() -> None:
    double, single = (
        gemm.choose_gemm(1, 8192, 8192, 8192, A100, dtype=name).kernel_seconds[0] for name in ("float64", "float32")
    )
    assert double > single


def test_matrix_times_vector_takes_the_time_of_reading_the_matrix() -> None:
    seconds = gemm.choose_gemm(1, 1, 8192, 8192, A100, bias=True).kernel_seconds[0]
    assert seconds == pytest.approx(4 * 8192**2 / A100.dram.bandwidth_bytes_per_second, rel=0.05)


def test_many_shapes_at_once_give_what_each_gives_alone() -> None:
    m, n, k = np.array([100, 2000, 33]), np.array([300, 70, 4000]), np.array([64, 5000, 900])
    together = gemm.choose_gemm(1, m, n, k, T4, bias=True).call_seconds
    alone = [gemm.choose_gemm(1, *shape, T4, bias=True).call_seconds[0] for shape in zip(m, n, k, strict=True)]
    assert together.tolist() == pytest.approx(alone)


def test_an_unknown_tile_is_taken_for_the_nearest() -> None:
    index = gemm_tiles.tile_index(
        np.array([128.0, 256.0, 32.0]), np.array([128.0, 128.0, 32.0]), np.array([8.0, 8, 32])
    )
    assert [gemm_tiles.TILES[i].name for i in index] == ["128x128", "128x128", "32x32_sliced1x4"]


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf")])
def test_sizes_below_one_are_refused(bad: float) -> None:
    with pytest.raises(hal.InputError, match=r"gemm\.k"):
        gemm.choose_gemm(1, 8, 8, bad, V100)
    with pytest.raises(hal.InputError, match="int8"):
        gemm.choose_gemm(1, 8, 8, 8, V100, dtype="int8")


def test_the_constants_are_an_argument() -> None:
    slow = replace(CONSTANTS, staging_gaps=4 * CONSTANTS.staging_gaps)
    given = launch("64x64")
    plain, slowed = (
        gemm.gemm_seconds(1, 2048, 2048, 2048, V100, given, constants=constants).kernel_seconds[0]
        for constants in (CONSTANTS, slow)
    )
    assert slowed > plain


def test_blocks_that_share_reads_drift_apart_where_l2_is_small_and_k_long() -> None:
    def read_per_flop(m: int, k: int, device: hal.DeviceSpec) -> float:
        times = gemm.gemm_seconds(1, m, 8192, k, device, launch("64x64"), bias=True)
        return float(times.stage_seconds["dram"][0]) / (m * k)

    assert read_per_flop(4096, 32_768, P4) > 1.5 * read_per_flop(4096, 2048, P4), "with k"
    assert read_per_flop(8192, 8192, P4) > 1.1 * read_per_flop(1024, 8192, P4), "with the number of waves"
    larger = tuple(
        msgspec.structs.replace(layer, capacity_bytes=16 * layer.capacity_bytes) if layer.name == "l2" else layer
        for layer in P4.layers
    )
    assert read_per_flop(4096, 32_768, msgspec.structs.replace(P4, layers=larger)) < read_per_flop(4096, 32_768, P4)


def test_blocks_of_many_warps_lose_less_of_what_they_share() -> None:
    given = launch("32x128")
    few = replace(given, threads=given.threads / 4)
    many, less = (gemm.gemm_seconds(1, 8192, 8192, 16_384, P4, runs, bias=True) for runs in (given, few))
    assert many.stage_seconds["dram"][0] < less.stage_seconds["dram"][0]


def test_small_tiles_cost_arithmetic_where_shared_memory_or_issue_slots_are_scarce() -> None:
    def penalty(device: hal.DeviceSpec) -> float:
        seconds = [
            gemm.gemm_seconds(512, 1024, 1024, 1024, device, launch(tile)).stage_seconds["compute"][0]
            for tile in ("64x64", "128x128")
        ]
        return float(seconds[0] / seconds[1])

    assert min(penalty(T4), penalty(P4), penalty(P100)) > max(penalty(V100), penalty(A100)) > 1


def test_dram_takes_its_share_of_the_power() -> None:
    times = gemm.gemm_seconds(1000, 1024, 1024, 64, T4, launch("128x64"))
    arithmetic = 2 * 1000 * 1024 * 1024 * 64 / (T4.power_limited_flops("float32") or 0)
    assert times.stage_seconds["power"][0] > arithmetic + 0.2 * times.stage_seconds["dram"][0]


@pytest.mark.parametrize("device", [P4, P100, A100, H100, L4], ids=named)
def test_k_is_split_only_for_results_that_leave_units_idle(device: hal.DeviceSpec) -> None:
    wide = gemm.choose_gemm(1, [4096, 8192], [4096, 3000], [8192, 40_000], device, bias=True).launch
    assert wide.splits.tolist() == [1, 1]
    small = gemm.choose_gemm(1, 64, 64, 40_000, device, bias=True).launch
    assert small.splits[0] > 4


def test_maxwell_kernels_of_short_k_are_not_split() -> None:
    times = gemm.choose_gemm(1, 200, 200, [200, 2000], P100, bias=True)
    assert times.launch.splits[0] == 1
    assert times.launch.splits[1] > 1


def test_maxwell_kernels_have_the_least_area_of_whole_tiles() -> None:
    # 128 x 32 tiles cover 4096 rows and 4128 columns, 64 x 64 ones 4160.
    times = gemm.choose_gemm(1, 4096, 4128, 1024, P4, bias=True)
    assert times.launch.tile_names == ["32x128"]
    alone = gemm.gemm_seconds(1, 4096, 4128, 1024, P4, launch("32x128"), bias=True)
    assert times.call_seconds[0] == pytest.approx(alone.call_seconds[0], rel=1e-3), "no other counts"


def test_rows_of_a_result_that_begin_within_sectors_are_written_with_whole_ones() -> None:
    def dram(n: float) -> float:
        times = gemm.gemm_seconds(256, 4096, n, 8, V100, launch("128x64"))
        return float(times.stage_seconds["dram"][0])

    # Seven of eight rows share a sector of 32 bytes with the next tile's at each of 1,024 columns' eight tiles.
    assert dram(1023) / dram(1024) == pytest.approx(1 + 3 * 7 / 8 * 32 / 512, rel=0.02)


def test_a_board_that_draws_little_beyond_its_limit_keeps_its_boost_for_longer() -> None:
    from roller.library.products.gemm_cost import _limited_seconds

    busy = np.full(2, 2e-3)
    little, much = _limited_seconds(busy, busy * np.array([1.1, 2.0]), gemm.CONSTANTS) / busy - 1
    assert little == pytest.approx(0.1 * (1 - 1 / 1.04))
    assert much == pytest.approx(1 - 1 / 5)
