"""Finding a device by name, alias or file, and what is said when that fails."""

from __future__ import annotations

import json
import os
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hal
from hal.spec.file import FILE_LIMIT_BYTES
from hal.support.errors import InputError

V100 = files("hal").joinpath("devices", "v100-sxm2-16gb.toml").read_text("utf-8")


def message_for(name_or_path: str | Path) -> str:
    with pytest.raises(InputError) as error:
        hal.load_device(name_or_path)
    return str(error.value)


class TestNames:
    @pytest.mark.parametrize(
        ("spelling", "name"),
        [
            ("v100-sxm2-16gb", "v100-sxm2-16gb"),
            ("v100", "v100-sxm2-16gb"),
            ("V100", "v100-sxm2-16gb"),
            (" V100-SXM2 ", "v100-sxm2-16gb"),
            ("Tesla V100-PCIE-32GB", "v100-pcie-16gb"),
            ("a100", "a100-pcie-40gb"),
            ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
            ("h100", "h100-sxm-80gb"),
            ("NVIDIA H200", "h200"),
            ("nvidia_h200", "h200"),
            ("RTX 2080 Ti", "rtx-2080-ti"),
            ("ipu", "ipu-mk1"),
        ],
    )
    def test_names_and_aliases_in_any_case_and_with_any_separator(self, spelling: str, name: str) -> None:
        assert hal.load_device(spelling).name == name

    def test_every_alias_leads_to_its_device(self) -> None:
        for alias, name in hal.device_aliases().items():
            assert hal.load_device(alias) is hal.load_device(name)

    def test_an_unknown_name_brings_the_closest(self) -> None:
        assert message_for("v1000") == (
            "device: no device is called 'v1000'; did you mean v100, p100 or h100? "
            "`roller devices` lists the names; a path to a .toml file works too"
        )

    def test_a_name_like_no_other_brings_the_list(self) -> None:
        assert message_for("zzz") == (
            "device: no device is called 'zzz'; `roller devices` lists the names; a path to a .toml file works too"
        )


class TestFiles:
    @pytest.mark.parametrize("kind", [str, Path])
    def test_a_toml_file_of_ones_own(self, tmp_path: Path, kind: type) -> None:
        path = tmp_path / "mine.toml"
        path.write_text(V100.replace("unit_count = 80", "unit_count = 84"))
        assert hal.load_device(kind(path)).unit_count == 84

    def test_a_json_file_means_the_same(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(tomllib.loads(V100)))
        assert hal.load_device(path) == hal.load_device("v100")

    def test_a_file_in_the_current_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "v100.toml").write_text(V100.replace("unit_count = 80", "unit_count = 84"))
        monkeypatch.chdir(tmp_path)
        assert hal.load_device("v100.toml").unit_count == 84
        assert hal.load_device("v100").unit_count == 80

    def test_a_changed_file_is_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        for units in (80, 84):
            path.write_text(V100.replace("unit_count = 80", f"unit_count = {units}"))
            assert hal.load_device(path).unit_count == units

    def test_windows_line_ends_and_byte_order_mark(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_bytes(b"\xef\xbb\xbf" + V100.replace("\n", "\r\n").encode())
        assert hal.load_device(path) == hal.load_device("v100")


class TestUnreadableFiles:
    def test_no_such_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        assert message_for(path) == (
            f"{path}: there is no such file; `roller devices` lists the devices that need no file"
        )

    def test_a_folder(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.mkdir()
        assert message_for(path) == f"{path}: is not a regular file; give the path of a device file"

    def test_a_named_pipe_does_not_block(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        os.mkfifo(path)
        assert message_for(path) == f"{path}: is not a regular file; give the path of a device file"

    def test_another_ending(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        assert message_for(path) == f"{path}: got a file ending in '.yaml', expected .toml or .json; rename the file"

    def test_a_path_with_a_null_byte(self) -> None:
        assert message_for("a\0.toml") == r"device: no device is called 'a\x00.toml'; `roller devices` lists the names"

    def test_a_huge_file(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_bytes(b"#" * (FILE_LIMIT_BYTES + 1))
        assert message_for(path) == f"{path}: is larger than 1048576 bytes; a device file has a few KiB; check the path"

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("x.toml", b"a = 1\nb = \n", "x.toml: line 2: is not TOML: Invalid value; correct the line"),
            ("x.toml", b"a = 1\n\xff", "x.toml: line 2: is not UTF-8 text; save the file as UTF-8"),
            ("x.toml", b"", "x.toml: device.name: is missing; add it; docs/devices.md describes every key"),
            (
                "x.toml",
                b"a = " + b"9" * 9999,
                "x.toml: is not TOML: nested too deeply or a number too long; correct the file",
            ),
            ("x.json", b'{"a": 1,\n"b": }', "x.json: line 2: is not JSON: invalid character; correct the line"),
            ("x.json", b'{"a":', "x.json: line 1: is not JSON: Input data was truncated; correct the line"),
            ("x.json", b"[1]", "x.json: device: got an array of 1, expected a table"),
            ("x.json", b"[" * 99_999, "x.json: is not JSON: nested too deeply; correct the file"),
        ],
    )
    def test_broken_text(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path(name).write_bytes(content)
        assert message_for(name) == message

    @given(st.binary(max_size=200))
    def test_any_bytes_bring_an_input_error(self, tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
        for name in ("x.toml", "x.json"):
            path = tmp_path_factory.getbasetemp() / name
            path.write_bytes(content)
            assert "\n" not in message_for(path)


class TestWrongContents:
    """Each case replaces one piece of the V100 file; the message has the key path, what came and what was expected."""

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ("unit_count = 80", "unit_count = '80'", "device.unit_count: got '80', expected a whole number"),
            ("unit_count = 80", "unit_count = true", "device.unit_count: got True, expected a whole number"),
            ("unit_count = 80", "unit_count = 80.5", "device.unit_count: got 80.5, expected a whole number"),
            ("unit_count = 80", "unit_count = -80", "device.unit_count: got -80, expected a number above 0"),
            (
                "unit_count = 80",
                "",
                "device.unit_count: is missing; add it; docs/devices.md describes every key",
            ),
            (
                "unit_count = 80",
                "unit_cuont = 80",
                "device.unit_cuont: is not a key of a device file; did you mean unit_count?",
            ),
            (
                "boost_hz = 1.53e9",
                "boost_mhz = 1530\nturbo = 1",
                "device.clocks.boost_mhz: is not a key of a device file; did you mean boost_hz?",
            ),
            (
                "boost_hz = 1.53e9",
                "boost_hz = 1.53e9\nturbo = 1",
                (
                    "device.clocks.turbo: is not a key of a device file; "
                    "the keys here are base_hz, boost_hz, sustained_hz, highest_hz and job_hz"
                ),
            ),
            (
                "bandwidth_bytes_per_second = 812.6e9",
                "bandwidth_bytes_per_second = nan",
                "device.layers.dram.bandwidth_bytes_per_second: got nan, expected a finite number",
            ),
            (
                "bandwidth_bytes_per_second = 812.6e9",
                "bandwidth_bytes_per_second = [812.6e9]",
                "device.layers.dram.bandwidth_bytes_per_second: got an array of 1, expected a number",
            ),
            (
                "bandwidth_bytes_per_second = 812.6e9",
                "bandwidth_bytes_per_second = false",
                "device.layers.dram.bandwidth_bytes_per_second: got False, expected a number",
            ),
            (
                "bank_count = 32",
                "bank_count = 'many'",
                "device.layers.shared.bank_count: got 'many', expected a whole number",
            ),
            (
                'shared_by = "unit"',
                'shared_by = "block"',
                "device.layers.shared.shared_by: got 'block', expected one of 'device', 'thread', 'unit'",
            ),
            ('kind = "gpu"', 'kind = "tpu"', "device.kind: got 'tpu', expected one of 'cpu', 'gpu', 'ipu'"),
            (
                'code_generator = "cuda"',
                'code_generator = "metal"',
                "device.code_generator: got 'metal', expected one of 'cuda', 'cuda-source', 'llvm', 'opencl-source'",
            ),
            (
                "shape = [16, 16, 16]",
                "shape = [16, 16]",
                "device.matrix_instructions.float16-float32.shape: got an array of 2, expected an array of 3",
            ),
            (
                "shape = [16, 16, 16]",
                "shape = [16, 16, '16']",
                "device.matrix_instructions.float16-float32.shape[2]: got '16', expected a whole number",
            ),
            (
                'dtype = "float64"',
                'dtype = "double"',
                (
                    "device.throughput.double.dtype: got 'double', expected one of "
                    "'bfloat16', 'float16', 'float32', 'float64', 'float8_e4m3fn', 'float8_e5m2', 'int32', "
                    "'int8', 'tfloat32'"
                ),
            ),
            ("[teu]", "[[teu]]", "device.teu: got an array of 1, expected a table"),
            ("aliases = [", "aliases = [3, ", "device.aliases[0]: got 3, expected text"),
            ('clocks = "', 'clocks = 3 # "', "device.provenance.clocks: got 3, expected text"),
            (
                'clocks = "',
                'clock = "',
                "device.provenance.clock: no number of this device has this key path; correct the key or remove it",
            ),
        ],
    )
    def test_one_wrong_value(self, tmp_path: Path, old: str, new: str, message: str) -> None:
        assert V100.count(old) >= 1
        path = tmp_path / "mine.toml"
        path.write_text(V100.replace(old, new, 1))
        assert message_for(path) == f"{path}: {message}"

    @pytest.mark.parametrize("layers", ["3", "[3]", "[[]]", "[{}]"])
    def test_layers_that_are_no_tables(self, tmp_path: Path, layers: str) -> None:
        path = tmp_path / "mine.toml"
        path.write_text(f"layers = {layers}")
        expected = {
            "3": "device.layers: got 3, expected an array",
            "[3]": "device.layers[0]: got 3, expected a table",
            "[[]]": "device.layers[0]: got an array of 0, expected a table",
            "[{}]": "device.layers[0].name: is missing; add it; docs/devices.md describes every key",
        }
        assert message_for(path) == f"{path}: {expected[layers]}"
