"""The documentation says what the program does: schemas, examples, links, commands, shown output, fields, files."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from codegen.bundle.manifest import read_manifest
from codegen.bundle.records import Argument, KernelRecord, Manifest, VerificationRecord
from hal.catalog import all_devices
from roller.cli import main
from roller.command.schemas import schema, schema_text
from sokoban.language.collectives import collective_from_data, is_collective
from sokoban.language.operators import load_operators, operators_from_json
from sokoban.schedule.files import load_schedules
from tests.support.shown import shown_blocks, update

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), ROOT / "bench" / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
PACKAGES = ("hal", "sokoban", "codegen", "roller", "daydream", "bench")
EXAMPLES = sorted((ROOT / "examples").glob("*.json"))
COMMANDS = sorted(main.commands)


def identifier(path: Path) -> str:
    return str(path.relative_to(ROOT))


def fenced(page: Path, language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


# Schemas


@pytest.mark.parametrize("kind", ("operator", "device", "manifest", "schedule"))
def test_a_published_schema_is_what_the_command_prints(kind: str) -> None:
    result = CliRunner().invoke(main, ["schema", kind])
    assert result.output == schema_text(kind)
    stored = (ROOT / "roller" / "command" / "schemas" / f"{kind}.schema.json").read_text("utf-8")
    assert stored == result.output, f"roller schema {kind} > roller/command/schemas/{kind}.schema.json"


@pytest.mark.parametrize("path", EXAMPLES, ids=identifier)
def test_an_example_is_valid_by_the_published_schema(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "roller" / "command" / "schemas" / "operator.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    document = json.loads(path.read_text("utf-8"))
    assert list(jsonschema.Draft202012Validator(schema).iter_errors(document)) == []


def test_every_shipped_device_is_valid_by_the_published_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((ROOT / "roller" / "command" / "schemas" / "device.schema.json").read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    for device in all_devices():
        document = json.loads(msgspec.json.encode(device))
        assert list(jsonschema.Draft202012Validator(schema).iter_errors(document)) == []


# Examples


@pytest.mark.parametrize("path", EXAMPLES, ids=identifier)
def test_an_example_file_loads(path: Path) -> None:
    assert load_operators(path)


def test_the_example_schedules_load() -> None:
    (expr,) = load_operators(ROOT / "examples" / "matmul.json")
    (group,) = load_schedules(ROOT / "examples" / "schedules.jsonl", expr)
    assert group.table.count == 4


def operator_blocks() -> list[Any]:
    """The JSON of the pages that holds operators."""
    blocks = []
    for page in PAGES:
        for number, text in enumerate(fenced(page, "json"), start=1):
            if '"op"' in text or '"expr"' in text:
                blocks.append(pytest.param(text, id=f"{identifier(page)}-{number}"))
    return blocks


@pytest.mark.parametrize("text", operator_blocks())
def test_an_operator_in_the_pages_loads(text: str) -> None:
    data = json.loads(text)
    assert collective_from_data(data) if is_collective(data) else operators_from_json(text.encode(), "page.json")


def test_the_walkthrough_shows_the_example_file() -> None:
    text = next(fenced(ROOT / "docs" / "walkthrough.md", "json"))
    assert text == (ROOT / "examples" / "matmul.json").read_text("utf-8")


#: Writes down what a launch was given.
CUPY_STAND_IN = """
import json

class RawModule:
    def __init__(self, path):
        self.image = open(path, "rb").read()

    def get_function(self, name):
        assert name.encode() in self.image
        return launch

def ones(shape, dtype):
    return [shape, dtype]

def launch(grid, block, arguments, shared_mem):
    print(json.dumps({"grid": grid, "block": block, "arguments": arguments, "shared_mem": shared_mem}))
"""


@pytest.mark.usefixtures("device_compiler")
def test_the_launch_example_launches_what_the_manifest_says(tmp_path: Path) -> None:
    (script,) = fenced(ROOT / "docs" / "tour.md", "python")
    (tmp_path / "cupy.py").write_text(CUPY_STAND_IN)
    (tmp_path / "example.py").write_text(script)
    command = ["compile", str(ROOT / "examples" / "matmul.json"), "--device", "v100", "--top-k", "1", "--verify", "0"]
    compiled = CliRunner().invoke(main, [*command, "--jobs", "1", "--out", str(tmp_path / "out")])
    assert compiled.exit_code == 0, compiled.output
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    best = read_manifest(tmp_path / "out" / "matmul_4096x1024x1024").kernels[0]
    assert json.loads(done.stdout) == {
        "grid": list(best.grid),
        "block": list(best.block),
        "arguments": [[[4096, 1024], "float32"], [[1024, 1024], "float32"], [[4096, 1024], "float32"]],
        "shared_mem": best.dynamic_shared_bytes,
    }


# Links, commands, files and fields


def headings(page: Path) -> set[str]:
    """The anchors of a page as forges derive them: ``## manifest.json`` is ``manifestjson``."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), target


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_in_the_tour_and_tells_how_to_use_it(command: str) -> None:
    assert f"roller {command}" in (ROOT / "docs" / "tour.md").read_text("utf-8")
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert result.output.startswith("Usage: ")


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_only_commands_and_options_that_exist_are_shown(page: Path) -> None:
    for line in re.findall(rf"\broller ((?:{'|'.join(COMMANDS)})\b[^\n`|]*)", page.read_text("utf-8")):
        words = line.split()
        known = {option for parameter in main.commands[words[0]].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known | {"--help"}, line


def test_every_page_is_two_clicks_from_the_readme() -> None:
    def linked(page: Path) -> set[Path]:
        return {
            (page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text("utf-8"))
        }

    first = linked(ROOT / "README.md")
    second = set().union(*(linked(page) for page in first if page.suffix == ".md"))
    assert [identifier(page) for page in PAGES if page not in first | second | {ROOT / "README.md"}] == []


def test_the_readme_is_two_screens() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_the_version_is_reported_once() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {version} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    pages = "".join((ROOT / name).read_text("utf-8") for name in ("README.md", "CONTRIBUTING.md"))
    shown = set(re.findall(r"(?:`|\$ )make ([a-z]+)", pages))
    assert {"check", "test", "lint", "docs", "bench", "suite"} <= shown <= targets


def rooms() -> dict[str, str]:
    """Every folder inside the packages, and the first sentence of its docstring."""
    found = {}
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("*/__init__.py")):
            text = ast.get_docstring(ast.parse(init.read_text("utf-8"))) or ""
            found[identifier(init.parent)] = text.partition("\n\n")[0].replace("\n", " ").replace("``", "`")
    return found


def test_the_architecture_page_has_every_room_and_no_other() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    shown = dict(re.findall(r"^\| `((?:%s)/[\w/]+)` \| (.*) \|$" % "|".join(PACKAGES), page, re.MULTILINE))  # noqa: UP031
    assert shown == rooms()


def test_the_files_the_architecture_page_names_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    named = re.findall(r"`((?:%s)/[\w/]+\.py)`" % "|".join(PACKAGES), page)  # noqa: UP031
    assert named and [path for path in named if not (ROOT / path).is_file()] == []


def test_every_key_of_a_schedule_and_every_field_of_a_score_is_explained() -> None:
    page = (ROOT / "docs" / "schedules.md").read_text("utf-8")
    cells = " ".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))
    for key in schema("schedule")["$defs"]["Schedule"]["properties"]:
        assert f"`{key}`" in cells
    result = CliRunner().invoke(
        main,
        [
            "score", str(ROOT / "examples" / "matmul.json"), "--device", "v100", "--json",
            "--schedules", str(ROOT / "examples" / "schedules.jsonl"),
        ],
    )  # fmt: skip
    for line in result.output.splitlines():
        assert all(f"`{field}`" in cells for field in json.loads(line))


@pytest.mark.parametrize("record", (Manifest, Argument, KernelRecord, VerificationRecord), ids=lambda r: r.__name__)
def test_every_field_of_a_manifest_is_explained(record: Any) -> None:
    cells = " ".join(re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "bundles.md").read_text("utf-8"), re.MULTILINE))
    for field in record.__dataclass_fields__:
        assert f"`{field}`" in cells


def test_the_compilers_that_bundles_depend_on_are_the_pinned_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {dependency for dependency in project["dependencies"] if "==" in dependency}
    assert set(re.findall(r"`([\w-]+==[\w.]+)`", (ROOT / "docs" / "bundles.md").read_text("utf-8"))) == pinned


# Shown output


#: Blocks that take a second or less; the others build dozens of kernels.
QUICK = (
    "explain", "score", "estimate", "estimate-library", "estimate-llama", "devices", "schema", "device-numbers",
    "statements", "kernel-form", "construction", "program", "prediction", "reasons", "stages", "rivals", "constants",
    "vector-constants", "vector-prediction", "laptop", "laptop-explain",
)  # fmt: skip


def test_every_block_of_output_has_a_command_behind_it_and_is_filled() -> None:
    blocks = shown_blocks()
    assert set(blocks) == set(update().BLOCKS)
    assert all(text.strip() for text in blocks.values())
    for path in PAGES:
        page = path.read_text("utf-8")
        assert page.count("<!-- output:") == len(update().blocks_of(page))
        assert not update().blocks_of(page) or identifier(path) in update().PAGES


@pytest.mark.parametrize("page", PAGES, ids=identifier)
def test_no_output_is_wider_than_a_hundred_columns(page: Path) -> None:
    for block in fenced(page, "console"):
        # A difference of files is as wide as they are.
        wide = [] if block.startswith("$ diff") else [line for line in block.splitlines() if len(line) > 100]
        assert wide == []


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.slow
def test_shown_output_is_what_the_program_prints(name: str) -> None:
    assert shown_blocks()[name] == update().BLOCKS[name](), "out of date; run python docs/update.py"


#: One depends on the machine; one captures a model of a billion parameters for many batches, which takes half a minute.
UNCHECKED = ("doctor", "tutorial-largest")


@pytest.mark.parametrize("page", ["getting-started", "kernel", "what-if", "boards"])
@pytest.mark.usefixtures("opencl", "pytorch")
@pytest.mark.slow
def test_tutorials_show_what_the_programs_print(page: str) -> None:
    (path,) = (path for path in PAGES if path.stem == page)
    steady = update().steady
    for name, text in update().blocks_of(path.read_text("utf-8")).items():
        if name not in UNCHECKED:
            assert steady(text) == steady(update().BLOCKS[name]()), f"{name}: run python docs/update.py"


@pytest.mark.usefixtures("opencl")
@pytest.mark.slow
def test_the_first_output_of_the_readme_is_real() -> None:
    steady = update().steady
    assert steady(shown_blocks()["compile"]) == steady(update().BLOCKS["compile"]()), "run python docs/update.py"
