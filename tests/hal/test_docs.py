"""docs/devices.md says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hal

PAGE = (Path(__file__).parents[2] / "docs" / "devices.md").read_text("utf-8")


@pytest.mark.parametrize("device", hal.all_devices(), ids=lambda device: device.name)
def test_the_table_of_boards_shows_the_shipped_numbers(device: hal.DeviceSpec) -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{device.name}` |"))
    name, title, aliases, units, peak, sustained, bandwidth, generator = [c.strip() for c in row.strip("|").split("|")]
    assert (name, title) == (f"`{device.name}`", device.title)
    assert set(re.findall("`(.*?)`", aliases)) <= set(device.aliases)
    assert units == f"{device.unit_count} {device.unit_name}"
    assert float(peak) == pytest.approx(device.peak_flops("float32") / 1e12, abs=0.051)
    assert float(sustained) == pytest.approx(device.sustained_flops("float32") / 1e12, abs=0.051)
    assert float(bandwidth) == pytest.approx(device.dram.bandwidth_bytes_per_second / 1e9, abs=0.51)
    assert generator == (f"`{device.code_generator}`" if device.code_generator else "none")


def test_every_key_of_a_device_file_is_on_the_page() -> None:
    for name, definition in hal.device_schema()["$defs"].items():
        for key in definition["properties"]:
            assert f"`{key}`" in PAGE or f"[{key}]" in PAGE, f"{name}.{key}"


def test_the_example_error_is_a_real_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = Path(hal.__file__).parent / "devices" / "v100-sxm2-16gb.toml"
    text = shipped.read_text("utf-8").replace("resident_per_unit = 64", "resident_per_unit = 63")
    Path("my-board.toml").write_text(text, "utf-8")
    with pytest.raises(hal.InputError) as error:
        hal.load_device("my-board.toml")
    assert str(error.value) in PAGE.splitlines()
