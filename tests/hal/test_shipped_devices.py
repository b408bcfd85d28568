"""The shipped device files against arithmetic, against each other and against the published JSON Schema."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import jsonschema
import pytest

import hal
from hal.spec.device import DeviceSpec

KiB, MiB = 1024, 1024**2

DEVICES = hal.all_devices()
GPUS = [device for device in DEVICES if device.kind == "gpu"]
CUDA = [device for device in GPUS if device.vendor == "NVIDIA"]
CPUS = [device for device in DEVICES if device.kind == "cpu"]

FLOAT32_LANES_PER_UNIT = {
    "sm_37": 192,
    "sm_60": 64,
    "sm_61": 128,
    "sm_70": 64,
    "sm_75": 64,
    "sm_80": 64,
    "sm_86": 128,
    "sm_89": 128,
    "sm_90": 128,
    "sm_100": 128,
    "sm_103": 128,
    "sm_120": 128,
    "gfx906": 64,
    "gfx90a": 64,
    "gfx942": 128,
}

# CUDA C++ programming guide: threads, blocks, registers and shared KiB per SM; shared KiB per block when asked for.
PROGRAMMING_GUIDE = {
    (3, 7): (2048, 16, 131_072, 112, 48),
    (6, 0): (2048, 32, 65_536, 64, 48),
    (6, 1): (2048, 32, 65_536, 96, 48),
    (7, 0): (2048, 32, 65_536, 96, 96),
    (7, 5): (1024, 16, 65_536, 64, 64),
    (8, 0): (2048, 32, 65_536, 164, 163),
    (8, 6): (1536, 16, 65_536, 100, 99),
    (8, 9): (1536, 24, 65_536, 100, 99),
    (9, 0): (2048, 32, 65_536, 228, 227),
    (10, 0): (2048, 32, 65_536, 228, 227),
    (10, 3): (2048, 32, 65_536, 228, 227),
    (12, 0): (1536, 24, 65_536, 100, 99),
}

# Units, L2 in KiB, and the datasheet's float32 TFLOP/s and DRAM GB/s.
DATASHEET = {
    "a100-pcie-40gb": (108, 40 * 1024, 19.5, 1555),
    "a100-pcie-80gb": (108, 40 * 1024, 19.5, 1935),
    "a100-sxm-40gb": (108, 40 * 1024, 19.5, 1555),
    "a100-sxm-80gb": (108, 40 * 1024, 19.5, 2039),
    "a10": (72, 6 * 1024, 31.2, 600),
    "a4000": (48, 4 * 1024, 19.2, 448),
    "a6000": (84, 6 * 1024, 38.7, 768),
    "b200": (148, 126 * 1024, 75, 8000),
    "b300": (148, 126 * 1024, 75, 8000),
    "gb200": (152, 126 * 1024, 76.5, 8000),
    "gb300": (152, 126 * 1024, 76.5, 8000),
    "h20": (78, 50 * 1024, 39.5, 4000),
    "h100-nvl": (132, 50 * 1024, 60, 3938),
    "h100-pcie-80gb": (114, 50 * 1024, 51.2, 2039),
    "h100-sxm-80gb": (132, 50 * 1024, 67, 3350),
    "h200": (132, 50 * 1024, 67, 4800),
    "h800": (132, 50 * 1024, 67, 3350),
    "k80": (13, 1536, 8.74 / 2, 480 / 2),
    "l20": (92, 96 * 1024, 59.8, 864),
    "l4": (58, 48 * 1024, 30.3, 300),
    "l40s": (142, 96 * 1024, 91.6, 864),
    "mi210": (104, 8 * 1024, 22.6, 1638),
    "mi250x": (220 // 2, 8 * 1024, 47.9 / 2, 3277 / 2),
    "mi300x": (304, 32 * 1024, 163.4, 5300),
    "mi325x": (304, 32 * 1024, 163.4, 6000),
    "mi50": (60, 4 * 1024, 13.3, 1024),
    "p100-pcie-16gb": (56, 4 * 1024, 9.5, 732),
    "p4": (20, 2 * 1024, 5.7, 192),
    "rtx-2080-ti": (68, 5632, 13.45, 616),
    "rtx-3090": (82, 6 * 1024, 35.6, 936),
    "rtx-4090": (128, 72 * 1024, 82.6, 1008),
    "rtx-pro-6000": (188, 128 * 1024, 125, 1792),
    "t4": (40, 4 * 1024, 8.1, 320),
    "v100-pcie-16gb": (80, 6 * 1024, 14.0, 900),
    "v100-sxm2-16gb": (80, 6 * 1024, 15.7, 900),
}

# Cores, multiply-add lanes of a core, boost GHz, KiB of L1, L2 and L3, and DRAM GB/s by channels x rate.
PROCESSORS = {
    "epyc-7763": (64, 16, 3.5, (32, 512, 256 * 1024), 204.8),
    "epyc-9654": (96, 16, 3.7, (32, 1024, 384 * 1024), 460.8),
    "epyc-9755": (128, 32, 4.1, (48, 1024, 512 * 1024), 614.4),
    "graviton3": (64, 16, 2.6, (64, 1024, 32 * 1024), 307.2),
    "xeon-platinum-8375c": (32, 32, 3.5, (48, 1280, 54 * 1024), 204.8),
}


def named(device: DeviceSpec) -> str:
    return device.name


def test_the_promised_boards_are_there() -> None:
    assert hal.device_names() == tuple(sorted([*DATASHEET, *PROCESSORS, "ipu-mk1"]))
    assert [device.name for device in DEVICES] == list(hal.device_names())


@pytest.mark.parametrize("device", GPUS, ids=named)
def test_float32_peak_is_lanes_times_two_times_boost_clock(device: DeviceSpec) -> None:
    lanes = device.unit_count * FLOAT32_LANES_PER_UNIT[device.architecture]
    assert device.peak_flops("float32") == pytest.approx(lanes * 2 * device.clocks.boost_hz, rel=0.03)


@pytest.mark.parametrize("device", GPUS, ids=named)
def test_units_caches_and_rates_agree_with_the_datasheet(device: DeviceSpec) -> None:
    units, l2_kib, tflops, dram_gb_per_second = DATASHEET[device.name]
    assert device.unit_count == units
    assert device.l2 is not None
    assert device.l2.capacity_bytes == l2_kib * KiB
    assert device.peak_flops("float32") == pytest.approx(tflops * 1e12, rel=0.03)
    share = device.dram.bandwidth_bytes_per_second / (dram_gb_per_second * 1e9)
    assert 0.7 < share < 0.95, "sustained DRAM bandwidth lies a little under the datasheet's"


@pytest.mark.parametrize("device", CUDA, ids=named)
def test_limits_are_those_of_the_compute_capability(device: DeviceSpec) -> None:
    assert device.compute_capability is not None
    threads, blocks, registers, shared_kib, opt_in_kib = PROGRAMMING_GUIDE[device.compute_capability]
    limits = device.limits
    assert (limits.threads_per_unit, limits.blocks_per_unit) == (threads, blocks)
    assert limits.registers_per_unit == registers
    assert limits.shared_bytes_per_unit == shared_kib * KiB
    assert limits.shared_bytes_per_block_opt_in == opt_in_kib * KiB
    assert limits.shared_bytes_per_block == 48 * KiB
    assert limits.shared_bytes_reserved_per_block == (KiB if device.compute_capability >= (8, 0) else 0)
    assert (limits.registers_per_thread, limits.register_allocation_granularity) == (255, 256)
    assert (limits.grid_x, limits.grid_y, limits.grid_z) == (2**31 - 1, 65_535, 65_535)
    assert (device.warp_lanes, limits.threads_per_block) == (32, 1024)


@pytest.mark.parametrize("device", GPUS, ids=named)
def test_shared_memory_moves_no_more_than_its_banks_deliver(device: DeviceSpec) -> None:
    shared = device.shared
    assert shared.bank_count is not None
    assert shared.bank_width_bytes is not None
    ceiling = device.unit_count * shared.bank_count * shared.bank_width_bytes * device.clocks.boost_hz
    assert 0.4 * ceiling < shared.bandwidth_bytes_per_second < ceiling


#: FLOP of one unit and clock, dense, by generation, bfloat16 inputs with float32 sums: the white papers' figures.
MATRIX_FLOP_PER_CLOCK = {
    "a10": 1024, "a4000": 1024, "a6000": 1024, "a100-sxm-40gb": 2048, "a100-sxm-80gb": 2048, "l40s": 1024,
    "rtx-3090": 512, "rtx-4090": 512, "rtx-pro-6000": 1024,
}  # fmt: skip
#: The datasheet's dense TFLOP/s in bfloat16 of boards whose matrix units run at a clock of their own.
MATRIX_TFLOPS = {"h100-pcie-80gb": 756, "h100-nvl": 835, "h100-sxm-80gb": 989, "h200": 989, "b200": 2250, "gb200": 2500}


@pytest.mark.parametrize("name", [*MATRIX_FLOP_PER_CLOCK, *MATRIX_TFLOPS])
def test_matrix_rates_agree_with_the_datasheet(name: str) -> None:
    device = hal.load_device(name)
    best = device.best_matrix_instruction("bfloat16")
    assert best is not None
    if name in MATRIX_TFLOPS:
        peak = MATRIX_TFLOPS[name] * 1e12
    else:
        peak = device.unit_count * MATRIX_FLOP_PER_CLOCK[name] * device.clocks.boost_hz
    assert best.peak_flops == pytest.approx(peak, rel=0.015)
    assert best.best_flops is not None
    highest = best.peak_flops * (device.clocks.highest_hz or device.clocks.boost_hz) / device.clocks.boost_hz
    assert 0.75 * best.peak_flops < best.best_flops <= highest
    assert (best.power_limited_flops or best.best_flops) <= best.best_flops


#: The data sheets' dense TFLOP/s of AMD's boards: float32, float64, float16, bfloat16, and float8 where there is any.
MATRIX_CORE_TFLOPS = {
    "mi210": (45.3, 45.3, 181.0, 181.0, None),
    "mi250x": (95.7 / 2, 95.7 / 2, 383.0 / 2, 383.0 / 2, None),
    "mi300x": (163.4, 163.4, 1307.4, 1307.4, 2614.9),
    "mi325x": (163.4, 163.4, 1307.4, 1307.4, 2614.9),
}


@pytest.mark.parametrize("name", MATRIX_CORE_TFLOPS)
def test_matrix_cores_agree_with_the_datasheet_and_are_libraries_alone(name: str) -> None:
    device = hal.load_device(name)
    for dtype, tflops in zip(
        ("float32", "float64", "float16", "bfloat16", "float8_e4m3fn"), MATRIX_CORE_TFLOPS[name], strict=True
    ):
        best = device.best_matrix_instruction(dtype)
        assert device.matrix_instruction(dtype) is None, "no kernel of ours is written with it"
        assert (best is None) == (tflops is None)
        if best is not None and tflops is not None:
            assert best.peak_flops == pytest.approx(tflops * 1e12, rel=0.005)
            assert 0.4 * best.peak_flops < best.sustained_flops < 0.8 * best.peak_flops


@pytest.mark.parametrize("device", CUDA, ids=named)
def test_narrow_types_double_the_rate_of_halves(device: DeviceSpec) -> None:
    halves = device.best_matrix_instruction("float16")
    capability = device.compute_capability or (0, 0)
    if halves is None or capability < (8, 0):
        return
    for dtype, factor in (("tfloat32", 0.5), ("float8_e4m3fn", 2.0), ("float8_e5m2", 2.0)):
        rates = device.best_matrix_instruction(dtype)
        assert (rates is not None) == (dtype == "tfloat32" or capability >= (8, 9))
        if rates is not None:
            assert rates.peak_flops == pytest.approx(factor * halves.peak_flops, rel=0.01)
    integers = device.best_matrix_instruction("int8")
    assert integers is not None
    if capability == (10, 3):  # Blackwell Ultra gave its integers up.
        assert integers.peak_flops < 0.1 * halves.peak_flops
        return
    # GeForce boards halve the rate of float32 sums, not that of integers.
    factor = 4 if device.title.startswith("NVIDIA GeForce") else 2
    assert integers.peak_flops == pytest.approx(factor * halves.peak_flops, rel=0.01)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("AMD Instinct MI210", "mi210"),
        ("AMD Instinct MI250X", "mi250x"),
        ("AMD Instinct MI250", "mi210"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI325X", "mi325x"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_board_goes_by_what_the_driver_calls_it(reported: str, name: str) -> None:
    assert hal.load_device(reported).name == name


@pytest.mark.parametrize("device", CPUS, ids=named)
def test_processors_agree_with_their_makers_pages(device: DeviceSpec) -> None:
    cores, lanes, boost_ghz, caches_kib, dram_gb_per_second = PROCESSORS[device.name]
    assert device.unit_count == cores
    assert device.peak_flops("float32") == pytest.approx(cores * lanes * 2 * boost_ghz * 1e9, rel=1e-3)
    assert [device.layer(name).capacity_bytes // KiB for name in ("l1", "l2", "l3")] == list(caches_kib)
    assert device.dram.bandwidth_bytes_per_second == pytest.approx(0.8 * dram_gb_per_second * 1e9, rel=1e-3)
    assert device.registers.capacity_bytes == 4 * device.limits.registers_per_thread
    latencies = [layer.latency_seconds for layer in device.layers[1:]]
    assert latencies == sorted(latencies, key=lambda seconds: seconds or 0)


def test_the_numbers_of_the_thesis() -> None:
    """Sections 5.5.3 and 6.4, and the constants of its artifact."""
    v100, k80, mi50, ipu = (hal.load_device(name) for name in ("v100-pcie", "k80", "mi50", "ipu"))
    assert (v100.unit_count, k80.unit_count, ipu.unit_count) == (80, 13, 1216)
    usable = [device.limits.registers_per_thread_usable for device in (v100, k80, mi50, ipu)]
    assert usable == [96, 64, 96, 10]
    assert [device.dram.transaction_bytes for device in (v100, k80, mi50)] == [32, 32, 64]
    assert [(d.shared.bank_count, d.shared.bank_width_bytes) for d in (v100, k80, mi50)] == [(32, 4), (32, 8), (32, 4)]
    assert (v100.warp_lanes, k80.warp_lanes, mi50.warp_lanes) == (32, 32, 64)
    assert (v100.teu.group_size, k80.teu.group_size) == (4, 4)
    assert [d.limits.shared_bytes_per_block for d in (v100, k80, ipu)] == [48 * KiB, 48 * KiB, 256 * KiB]
    bandwidths = [device.shared.bandwidth_bytes_per_second for device in (v100, k80, mi50)]
    assert bandwidths == [12_080e9, 2_540e9, 8e12]
    assert k80.dram.bandwidth_bytes_per_second == 191e9
    assert v100.block_launch_seconds == 1.56e-9


@pytest.mark.parametrize("device", DEVICES, ids=named)
def test_only_what_can_be_compiled_claims_a_full_generator(device: DeviceSpec) -> None:
    usual = "llvm" if device.kind == "cpu" else "cuda"
    special = {"k80": "cuda-source", "ipu-mk1": None, "graviton3": None}
    special |= dict.fromkeys(("mi50", "mi210", "mi250x", "mi300x", "mi325x"), "opencl-source")
    expected = special.get(device.name, usual)
    assert device.code_generator == expected
    assert (device.code_generator_reason == "") == (expected == usual)


@pytest.mark.parametrize("device", DEVICES, ids=named)
def test_every_number_names_its_source(device: DeviceSpec) -> None:
    for path, _ in hal.leaves(device):
        assert len(hal.provenance_of(device, path)) > 15, path


@pytest.mark.parametrize("name", hal.device_names())
def test_the_schema_accepts_the_file(name: str) -> None:
    schema = hal.device_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    document = tomllib.loads(files("hal").joinpath("devices", f"{name}.toml").read_text("utf-8"))
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(document)) == []


@pytest.mark.parametrize("changed", [{"unit_count": 0}, {"kind": "tpu"}, {"unit_cuont": 3}, {"clocks": None}])
def test_the_schema_refuses_what_the_loader_refuses(changed: dict[str, object]) -> None:
    document = tomllib.loads(files("hal").joinpath("devices", "t4.toml").read_text("utf-8"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document | changed, hal.device_schema(), cls=jsonschema.Draft202012Validator)
