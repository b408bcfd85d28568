"""What a DeviceSpec answers, and what it refuses to be."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

import hal
from hal.spec.device import DeviceSpec
from hal.spec.parts import MemoryLayer
from hal.support.errors import InputError


@pytest.fixture(scope="module")
def v100() -> DeviceSpec:
    return hal.load_device("v100-sxm2-16gb")


@pytest.fixture(scope="module")
def ipu() -> DeviceSpec:
    return hal.load_device("ipu-mk1")


def with_layer(device: DeviceSpec, which: str, **changes: Any) -> DeviceSpec:
    layers = tuple(msgspec.structs.replace(x, **changes) if x.name == which else x for x in device.layers)
    return msgspec.structs.replace(device, layers=layers)


def with_limits(device: DeviceSpec, **changes: Any) -> DeviceSpec:
    return msgspec.structs.replace(device, limits=msgspec.structs.replace(device.limits, **changes))


class TestAnswers:
    def test_layers_go_by_name(self, v100: DeviceSpec) -> None:
        assert [layer.name for layer in v100.layers] == ["registers", "shared", "l2", "dram"]
        assert (v100.registers, v100.shared, v100.l2, v100.dram) == v100.layers
        assert v100.layer("dram").capacity_bytes == 16 * 1024**3

    def test_an_ipu_stands_in_local_memory_for_shared_and_exchange_for_dram(self, ipu: DeviceSpec) -> None:
        assert ipu.shared.name == "local"
        assert ipu.dram.name == "exchange"
        assert ipu.l2 is None
        assert ipu.dram.capacity_bytes == 1216 * 256 * 1024

    def test_an_unknown_layer_names_those_there_are(self, ipu: DeviceSpec) -> None:
        with pytest.raises(InputError) as error:
            ipu.layer("dram")
        assert (
            str(error.value)
            == "device.layers.dram: ipu-mk1 has no such memory layer; it has registers, local and exchange"
        )

    def test_a_board_that_nobody_measured_has_typical_framework_calls(self, v100: DeviceSpec) -> None:
        assert v100.framework is not None
        assert v100.framework_calls is v100.framework
        provenance = {key: text for key, text in v100.provenance.items() if key != "framework"}
        unmeasured = msgspec.structs.replace(v100, framework=None, provenance=provenance)
        assert 20e-6 < unmeasured.framework_calls.call_seconds < unmeasured.framework_calls.linear_call_seconds < 1e-4

    def test_the_best_rate_lies_between_sustained_and_peak(self, v100: DeviceSpec, ipu: DeviceSpec) -> None:
        assert v100.sustained_flops("float32") < v100.best_flops("float32") < v100.peak_flops("float32")
        assert ipu.best_flops("float32") == ipu.sustained_flops("float32"), "nobody measured it"
        assert v100.power_limited_flops("float32") is None
        limit = hal.load_device("t4").power_limited_flops("float32")
        assert limit is not None
        assert limit < hal.load_device("t4").best_flops("float32")

    def test_rates_go_by_data_type(self, v100: DeviceSpec) -> None:
        assert v100.peak_flops("float32") == pytest.approx(80 * 64 * 2 * 1.53e9, rel=1e-3)
        assert v100.peak_flops("float16") == pytest.approx(2 * v100.peak_flops("float32"), rel=1e-3)
        assert v100.sustained_flops("float32") < v100.peak_flops("float32")

    @pytest.mark.parametrize("method", ["peak_flops", "sustained_flops"])
    def test_an_unknown_data_type_names_those_there_are(self, v100: DeviceSpec, method: str) -> None:
        with pytest.raises(InputError) as error:
            getattr(v100, method)("bfloat16")
        assert str(error.value) == (
            "device.throughput.bfloat16: v100-sxm2-16gb has no arithmetic rate for this data type; "
            "it has float32, float16, float64 and int32"
        )

    def test_matrix_instructions_go_by_input_type(self, v100: DeviceSpec) -> None:
        instruction = v100.matrix_instruction("float16")
        assert instruction is not None
        assert (instruction.name, instruction.shape, instruction.key) == ("wmma", (16, 16, 16), "float16-float32")
        assert v100.matrix_instruction("float32") is None

    def test_warp_groups_have_matrix_instructions_of_their_own(self, v100: DeviceSpec) -> None:
        h200 = hal.load_device("h200")
        warps, groups = h200.matrix_instruction("bfloat16"), h200.warp_group_instruction("bfloat16")
        assert warps is not None
        assert groups is not None
        assert (warps.key, groups.key) == ("bfloat16-float32", "bfloat16-float32-wgmma")
        assert warps.peak_flops < groups.peak_flops
        assert h200.best_matrix_instruction("bfloat16") == groups
        assert h200.unit_pair_instruction("bfloat16") is None
        assert v100.warp_group_instruction("float16") is None
        assert v100.best_matrix_instruction("float16") == v100.matrix_instruction("float16")

    def test_matrix_instructions_are_distinguished_by_accumulator(self) -> None:
        device = hal.load_device("rtx-2080-ti")
        full, half = device.matrix_instruction("float16", "float32"), device.matrix_instruction("float16", "float16")
        assert full is not None
        assert half is not None
        assert half.peak_flops == 2 * full.peak_flops
        assert device.matrix_instruction("float16", "float64") is None

    def test_teus_are_counted_over_the_device(self, v100: DeviceSpec) -> None:
        assert v100.teu_count == 80 * 4
        assert v100.warp_lanes == 32

    def test_devices_are_values(self, v100: DeviceSpec) -> None:
        again = pickle.loads(pickle.dumps(v100))
        assert again == v100
        assert hash(again) == hash(v100)
        with pytest.raises(AttributeError):
            v100.unit_count = 81  # type: ignore[misc]

    def test_every_number_has_a_key_path(self, v100: DeviceSpec) -> None:
        numbers = list(hal.leaves(v100))
        assert ("layers.dram.capacity_bytes", 16 * 1024**3) in numbers
        assert numbers[:3] == [("compute_capability", 7), ("compute_capability", 0), ("unit_count", 80)]
        assert ("matrix_instructions.float16-float32.shape", 16) in numbers
        assert not any(path.startswith("layers.l2.bank") for path, _ in numbers), "absent numbers have none"


class TestRefusals:
    """Each case is one change of a valid V100 and the whole message it brings."""

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"threads_per_block": 4096},
                "device.limits.threads_per_block: got 4096, expected at most 2048 (limits.threads_per_unit)",
            ),
            (
                {"registers_per_thread_usable": 300},
                (
                    "device.limits.registers_per_thread_usable: got 300, "
                    "expected at most 255 (limits.registers_per_thread)"
                ),
            ),
            (
                {"shared_bytes_per_block": 99_000},
                (
                    "device.limits.shared_bytes_per_block: got 99000, "
                    "expected at most 98304 (limits.shared_bytes_per_block_opt_in)"
                ),
            ),
            (
                {"shared_bytes_reserved_per_block": 1024},
                (
                    "device.limits.shared_bytes_per_block_opt_in: got 98304, "
                    "expected at most 97280 (limits.shared_bytes_per_unit less what is reserved per block)"
                ),
            ),
            (
                {"threads_per_unit": 1024},
                (
                    "device.teu.resident_per_unit: got 64, "
                    "expected resident_per_unit x lanes = limits.threads_per_unit (1024), not 2048"
                ),
            ),
            (
                {"shared_bytes_per_unit": 100_000},
                "device.layers.shared.capacity_bytes: got 98304, expected 100000 (limits.shared_bytes_per_unit)",
            ),
            (
                {"registers_per_thread": 254},
                "device.layers.registers.capacity_bytes: got 1020, expected 1016 (limits.registers_per_thread x 4)",
            ),
            ({"grid_x": 0}, "device.limits.grid_x: got 0, expected a number above 0"),
            (
                {"shared_bytes_reserved_per_block": -1},
                "device.limits.shared_bytes_reserved_per_block: got -1, expected a number of at least 0",
            ),
        ],
    )
    def test_limits_that_contradict_each_other(self, v100: DeviceSpec, changes: dict[str, int], message: str) -> None:
        with pytest.raises(InputError) as error:
            with_limits(v100, **changes)
        assert str(error.value) == message

    @pytest.mark.parametrize(
        ("layer", "changes", "message"),
        [
            (
                "dram",
                {"bandwidth_bytes_per_second": 0.0},
                "device.layers.dram.bandwidth_bytes_per_second: got 0, expected a number above 0",
            ),
            (
                "dram",
                {"bandwidth_bytes_per_second": float("inf")},
                "device.layers.dram.bandwidth_bytes_per_second: got inf, expected a finite number",
            ),
            (
                "dram",
                {"bandwidth_bytes_per_second": 9e12},
                (
                    "device.layers.dram.bandwidth_bytes_per_second: got 9e+12, expected at most 2.155e+12 "
                    "(layers.l2.bandwidth_bytes_per_second); bandwidth falls from the registers down"
                ),
            ),
            (
                "dram",
                {"capacity_bytes": 10**30},
                f"device.layers.dram.capacity_bytes: got {10**30}, expected a number below 1e18",
            ),
            (
                "shared",
                {"bank_count": None},
                "device.layers.shared.bank_count: is missing, but bank_width_bytes is given; give both or neither",
            ),
            (
                "shared",
                {"bank_width_bytes": None},
                "device.layers.shared.bank_width_bytes: is missing, but bank_count is given; give both or neither",
            ),
            ("l2", {"shared_by": "unit"}, "device.layers.l2.shared_by: got 'unit', expected 'device'"),
            (
                "l2",
                {"name": "l3"},
                (
                    "device.layers: got registers, shared, l3, dram, expected registers, shared, l2, dram "
                    "in this order (l2 may be left out); "
                    "a device of kind 'gpu' lists its memory layers from the registers down, each once"
                ),
            ),
        ],
    )
    def test_impossible_layers(self, v100: DeviceSpec, layer: str, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError) as error:
            with_layer(v100, layer, **changes)
        assert str(error.value) == message

    def test_layers_out_of_order_repeated_or_missing(self, v100: DeviceSpec, ipu: DeviceSpec) -> None:
        registers, shared, l2, dram = v100.layers
        wrong: list[tuple[MemoryLayer, ...]] = [(dram, l2, shared, registers), (registers, shared, shared, dram), ()]
        for layers in wrong:
            with pytest.raises(InputError) as error:
                msgspec.structs.replace(v100, layers=layers)
            assert error.value.field == "device.layers"
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(ipu, layers=v100.layers)
        assert error.value.problem == (
            "got registers, shared, l2, dram, expected registers, local, exchange in this order"
        )

    def test_a_gpu_may_go_without_l2(self, v100: DeviceSpec) -> None:
        provenance = {key: text for key, text in v100.provenance.items() if not key.startswith("layers.l2")}
        layers = tuple(layer for layer in v100.layers if layer.name != "l2")
        assert msgspec.structs.replace(v100, layers=layers, provenance=provenance).l2 is None

    def test_rates_above_their_peak_or_missing(self, v100: DeviceSpec) -> None:
        single, half, double, _ = v100.throughput
        fast = msgspec.structs.replace(half, sustained_flops=40e12)
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, throughput=(single, fast, double))
        assert str(error.value) == (
            "device.throughput.float16.sustained_flops: got 4e+13, "
            "expected at most 3.1334e+13 (throughput.float16.peak_flops)"
        )
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, throughput=(single, half, half))
        assert str(error.value) == "device.throughput.float16: is listed twice; keep one entry"
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, throughput=(half, double))
        assert str(error.value) == (
            "device.throughput: has float16 and float64, expected at least float32; add float32"
        )

    def test_a_matrix_instruction_above_its_peak(self, v100: DeviceSpec) -> None:
        fast = msgspec.structs.replace(v100.matrix_instructions[0], sustained_flops=200e12)
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, matrix_instructions=(fast,))
        assert str(error.value) == (
            "device.matrix_instructions.float16-float32.sustained_flops: got 2e+14, "
            "expected at most 1.25e+14 (matrix_instructions.float16-float32.peak_flops)"
        )

    def test_clocks_above_boost(self, v100: DeviceSpec) -> None:
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, clocks=msgspec.structs.replace(v100.clocks, sustained_hz=1.6e9))
        assert str(error.value) == (
            "device.clocks.sustained_hz: got 1.6e+09, expected at most 1.53e+09 (clocks.boost_hz)"
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"title": " "}, "device.title: is empty; write a name"),
            (
                {"name": "V100 SXM2"},
                (
                    "device.name: got 'V100 SXM2', expected lower-case letters, digits and hyphens; "
                    "it is also the file name"
                ),
            ),
            ({"aliases": ("v100", "")}, "device.aliases: holds an empty name; remove it"),
            (
                {"architecture": "sm_75"},
                "device.architecture: got 'sm_75', expected sm_70, as compute_capability [7, 0] says",
            ),
            (
                {"compute_capability": None},
                (
                    "device.compute_capability: is missing, but code_generator is 'cuda'; "
                    "add compute_capability = [major, minor]"
                ),
            ),
            (
                {"code_generator": None},
                (
                    "device.code_generator_reason: is empty, but code_generator is absent, not 'cuda' or 'llvm'; "
                    "say in words why kernels for this device are not compiled here"
                ),
            ),
            (
                {"code_generator": "cuda-source"},
                (
                    "device.code_generator_reason: is empty, but code_generator is 'cuda-source', "
                    "not 'cuda' or 'llvm'; "
                    "say in words why kernels for this device are not compiled here"
                ),
            ),
            ({"unit_count": True}, "device.unit_count: got True, expected a number"),
        ],
    )
    def test_names_that_say_nothing_or_contradict(
        self, v100: DeviceSpec, changes: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, **changes)
        assert str(error.value) == message


class TestProvenance:
    def test_the_longest_start_of_the_key_path_counts(self, v100: DeviceSpec) -> None:
        usable = "limits.registers_per_thread_usable"
        assert hal.provenance_of(v100, usable) == v100.provenance[usable]
        assert hal.provenance_of(v100, "limits.grid_x") == v100.provenance["limits"]
        assert hal.provenance_of(v100, "device.limits.grid_x") == v100.provenance["limits"]
        assert hal.provenance_of(v100, "limits") == v100.provenance["limits"]

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            (
                "layers.dram.bandwidth_bytes_per_secnd",
                (
                    "device.layers.dram.bandwidth_bytes_per_secnd: v100-sxm2-16gb has no source under this key path; "
                    "did you mean layers.dram.bandwidth_bytes_per_second?"
                ),
            ),
            (
                "limit",
                (
                    "device.limit: v100-sxm2-16gb has no source under this key path; "
                    "use a path such as layers.dram.bandwidth_bytes_per_second"
                ),
            ),
        ],
    )
    def test_an_unknown_key_path_is_refused(self, v100: DeviceSpec, path: str, message: str) -> None:
        with pytest.raises(InputError) as error:
            hal.provenance_of(v100, path)
        assert str(error.value) == message

    def test_a_number_without_a_source_is_refused(self, v100: DeviceSpec) -> None:
        fewer = {key: text for key, text in v100.provenance.items() if key != "limits"}
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, provenance=fewer)
        assert str(error.value) == (
            "device.limits.threads_per_block: is 1024, but nothing says where the number comes from; "
            'add "limits.threads_per_block" (or "limits") to [provenance], a source or \'estimate: \' and how'
        )

    def test_a_source_without_a_number_is_refused(self, v100: DeviceSpec) -> None:
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, provenance={**v100.provenance, "limit": "a guess"})
        assert str(error.value) == (
            "device.provenance.limit: no number of this device has this key path; correct the key or remove it"
        )

    def test_an_empty_source_is_refused(self, v100: DeviceSpec) -> None:
        with pytest.raises(InputError) as error:
            msgspec.structs.replace(v100, provenance={**v100.provenance, "limits": "  "})
        assert str(error.value) == (
            "device.provenance.limits: is empty; name the source of the number, or write 'estimate: ' and how"
        )


@pytest.mark.parametrize(("field", "factor"), [("best_flops", 1.1), ("best_flops", 0.1), ("power_limited_flops", 1.1)])
def test_best_and_power_limited_rates_out_of_range(v100: DeviceSpec, field: str, factor: float) -> None:
    rates = tuple(
        msgspec.structs.replace(rate, **{field: factor * rate.peak_flops}) if rate.dtype == "float32" else rate
        for rate in v100.throughput
    )
    with pytest.raises(InputError, match=r"device\.throughput\.float32\."):
        msgspec.structs.replace(v100, throughput=rates, provenance=v100.provenance | {"throughput": "test"})


class TestUnitPairs:
    """Matrix instructions of a unit or a pair of units (``tcgen05``)."""

    def test_they_are_what_a_library_uses_and_no_warp_groups(self) -> None:
        b200 = hal.load_device("b200")
        warps, pairs = b200.matrix_instruction("bfloat16"), b200.unit_pair_instruction("bfloat16")
        assert warps is not None
        assert pairs is not None
        assert (warps.key, pairs.key) == ("bfloat16-float32", "bfloat16-float32-tcgen05")
        assert (warps.is_by_warps, pairs.is_by_warps) == (True, False)
        assert (pairs.is_by_unit_pairs, pairs.is_by_groups) == (True, False)
        assert b200.warp_group_instruction("bfloat16") is None
        assert b200.best_matrix_instruction("bfloat16") == pairs

    def test_kernels_of_ours_take_the_instruction_of_warps(self) -> None:
        from sokoban.kernel.matrix import instruction_for

        assert str(instruction_for(hal.load_device("b200"), "bfloat16")) == "mma_16x8x16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"best_flops": 2300e12},
            "best_flops: got 2.3e+15, expected at most 2.25e+15 "
            "(matrix_instructions.bfloat16-float32-tcgen05.peak_flops)",
        ),
        (
            {"best_flops": 1500e12, "power_limited_flops": None},
            "sustained_flops: got 1.554e+15, expected at most 1.5e+15 "
            "(matrix_instructions.bfloat16-float32-tcgen05.best_flops)",
        ),
        (
            {"power_limited_flops": 2100e12},
            "power_limited_flops: got 2.1e+15, expected at most 1.972e+15 "
            "(matrix_instructions.bfloat16-float32-tcgen05.best_flops)",
        ),
        (
            {"best_flops": None, "power_limited_flops": 2300e12},
            "power_limited_flops: got 2.3e+15, expected at most 2.25e+15 "
            "(matrix_instructions.bfloat16-float32-tcgen05.peak_flops)",
        ),
    ],
)
def test_rates_of_a_matrix_instruction_out_of_order(changes: dict[str, float | None], message: str) -> None:
    b200 = hal.load_device("b200")
    key = "bfloat16-float32-tcgen05"
    instructions = tuple(
        msgspec.structs.replace(each, **changes) if each.key == key else each for each in b200.matrix_instructions
    )
    with pytest.raises(InputError) as error:
        msgspec.structs.replace(b200, matrix_instructions=instructions)
    assert str(error.value) == f"device.matrix_instructions.{key}.{message}"


def test_scattered_reads_above_the_bandwidth(v100: DeviceSpec) -> None:
    with pytest.raises(InputError, match="scattered_bytes_per_second"):
        with_layer(v100, "dram", scattered_bytes_per_second=1e12)


class TestTranslation:
    def test_reach_and_time_of_a_miss_come_together(self, v100: DeviceSpec) -> None:
        source = {"layers.dram": "test"}
        pair: dict[str, Any] = {"translation_reach_bytes": 1 << 25, "translation_miss_seconds": 1e-8}
        whole = msgspec.structs.replace(with_layer(v100, "dram", **pair), provenance=v100.provenance | source)
        assert whole.dram.translation_reach_bytes == 1 << 25
        assert v100.dram.translation_reach_bytes is None
        for given, missing in (list(pair), list(pair)[::-1]):
            with pytest.raises(InputError) as error:
                with_layer(v100, "dram", **{given: pair[given]})
            assert error.value.field == f"device.layers.dram.{missing}"
            assert error.value.problem == f"is missing, but {given} is given"

    def test_only_of_dram_and_within_it(self, v100: DeviceSpec) -> None:
        pair: dict[str, Any] = {"translation_reach_bytes": 1 << 25, "translation_miss_seconds": 1e-8}
        with pytest.raises(InputError, match="belongs to the layer dram"):
            with_layer(v100, "l2", **pair)
        with pytest.raises(InputError, match=r"expected at most 17179869184 \(layers\.dram\.capacity_bytes\)"):
            with_layer(v100, "dram", **(pair | {"translation_reach_bytes": 1 << 40}))


def test_products_beyond_the_peak_of_a_boost_clock_that_the_board_exceeds() -> None:
    board = hal.load_device("rtx-3090")
    instruction = board.matrix_instruction("bfloat16")
    assert instruction is not None
    assert instruction.best_flops == 76.58e12 > instruction.peak_flops
    with pytest.raises(InputError) as error:
        msgspec.structs.replace(board, clocks=msgspec.structs.replace(board.clocks, highest_hz=1.75e9))
    assert str(error.value).startswith(
        "device.matrix_instructions.float16-float32.best_flops: got 7.564e+13, expected at most 7.35103e+13 "
        "(matrix_instructions.float16-float32.peak_flops at clocks.highest_hz)"
    )
