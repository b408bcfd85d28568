"""The page on adding a device: its file, its tables, and that nothing but files and tables tells devices apart."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from hal.catalog import all_devices, load_device
from hal.spec.device import DeviceSpec
from hal.spec.parts import CodeGenerator, Kind, Lane, MemoryLayer, Teu
from hal.this_cpu import THIS_CPU
from roller.construct.construct import construct
from roller.explain.page import explain
from roller.programs import Programs
from sokoban.kernel.form import kernel_form
from sokoban.language.operators import operator_from_data

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "adding-a-device.md").read_text("utf-8")
SERVER, LAPTOP = ROOT / "hal" / "devices" / "epyc-7763.toml", ROOT / "examples" / "my-laptop.toml"


def patched(old: list[str], difference: list[str]) -> list[str]:
    """A text with a unified difference without context applied to it."""
    new, place = [], 0
    for line in difference:
        hunk = re.match(r"@@ -(\d+)(?:,(\d+))? ", line)
        if hunk:
            start, count = int(hunk[1]), int(hunk[2] or 1)
            begin = start - 1 if count else start
            new += old[place:begin]
            place = begin
        elif line.startswith("-"):
            assert old[place] == line[1:]
            place += 1
        elif line.startswith("+"):
            new.append(line[1:])
    return new + old[place:]


def laptop(directory: Path) -> DeviceSpec:
    """The device that the page's difference makes of the server."""
    match = re.search(r"^\$ diff -U0 .*\n--- .*\n\+\+\+ .*\n((?:[@+-].*\n)+)", PAGE, re.MULTILINE)
    assert match is not None
    path = directory / "my-laptop.toml"
    path.write_text("\n".join(patched(SERVER.read_text("utf-8").splitlines(), match[1].splitlines())) + "\n")
    return load_device(path)


def test_the_difference_that_is_shown_makes_the_device(tmp_path: Path) -> None:
    made = laptop(tmp_path)
    assert made == load_device(LAPTOP)
    server = load_device(SERVER)
    assert (made.name, made.unit_count, server.unit_count) == ("my-laptop", 8, 64)
    assert made.teu == server.teu and made.limits == server.limits
    assert made.peak_flops("float32") * 8 == server.peak_flops("float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    "operator",
    [
        {"op": "matmul", "m": 512, "n": 512, "k": 512},
        {"op": "conv2d", "n": 1, "c": 32, "h": 28, "w": 28, "f": 64, "kh": 3, "kw": 3, "padding": 1},
        {"op": "softmax", "shape": [64, 128]},
    ],
    ids=lambda each: each["op"],
)
def test_its_programs_are_for_its_vectors_and_cores(operator: dict[str, Any], tmp_path: Path) -> None:
    construction = construct(kernel_form(operator_from_data(operator)), laptop(tmp_path), 5)
    for rank, program in enumerate(construction.programs, start=1):
        # A register file of sixteen vectors of eight lanes, of which one is on its way.
        assert program.estimate.registers <= 16 * 8
        assert program.schedule.grid_blocks(construction.form.sizes) >= 8
        assert "of 8 cores" in explain(Programs.of(construction, top_k=5), rank)


def test_tables_of_the_page_have_the_rows_that_it_shows() -> None:
    rows = re.findall(r"^([\w/]+)\.py +(\w+) +\"([\w-]+)\": \(?\"?(\w+)", PAGE, re.MULTILINE)
    assert len(rows) >= 5
    for path, table, key, value in rows:
        found = getattr(importlib.import_module(path.replace("/", ".")), table)
        assert key in found and set(found) <= {*get_args(Lane), *get_args(CodeGenerator)}
        assert value in (ROOT / f"{path}.py").read_text("utf-8")


def test_fields_of_the_page_are_fields_of_the_spec() -> None:
    owners: dict[str, type[msgspec.Struct]] = {"teu": Teu, "layers": MemoryLayer}
    named = re.findall(r"^\| `(\w+)\.(\w+)` \|", PAGE, re.MULTILINE)
    assert len(named) >= 5
    for owner, field in named:
        assert field in owners[owner].__struct_fields__


# Nothing tells devices apart by what they are called


#: What a device may be called, and kinds of devices.
NAMES = {THIS_CPU, *get_args(Kind)} | {
    name.casefold() for device in all_devices() for name in (device.name, device.vendor, *device.aliases)
}


def comparisons(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.match_case):
            yield node


def tells_devices_apart(text: str) -> list[int]:
    """Lines with a comparison with a device's name or kind, and those that ask a device for its kind."""
    tree = ast.parse(text)
    lines = [
        part.lineno
        for node in comparisons(tree)
        for part in ast.walk(node)
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.casefold() in NAMES
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("kind", "vendor"):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name in ("device", "spec", "board"):
                lines.append(node.lineno)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("package", ["sokoban", "roller"])
def test_no_code_asks_which_device_it_is(package: str) -> None:
    found = {
        str(path.relative_to(ROOT)): lines
        for path in sorted((ROOT / package).rglob("*.py"))
        if (lines := tells_devices_apart(path.read_text("utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        'if device.kind == "cpu": pass',
        'x = 1 if name != "v100" else 2',
        'if name in ("cpu", None): pass',
        "x = TABLE[self.device.kind]",
        'match name:\n    case "gpu":\n        pass',
        'if device.vendor == "NVIDIA": pass',
    ],
)
def test_the_check_sees_what_it_looks_for(text: str) -> None:
    assert tells_devices_apart(text)


def test_tables_by_lane_and_kinds_of_operators_are_no_offence() -> None:
    assert not tells_devices_apart('x = MODELS[device.teu.lane]\nif form.kind == "rows": pass\ny = {"cpu": 1}')
