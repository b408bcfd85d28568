"""Configurations of other tuners: read as schedules, with their times, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hal.support.errors import InputError
from roller.cli import main
from roller.estimate.tuners import TunerFile, read_tuner_file
from sokoban.language.operators import operator_from_data
from sokoban.schedule.files import schedules_from_json

PRODUCT = {"expr": "C[n,m] = sum([k], A[k,m] * B[k,n])", "sizes": {"n": 512, "m": 1024, "k": 256}}
HALVES = {"op": "matmul", "m": 1024, "n": 512, "k": 256, "dtype": "float16", "accumulate": "float32"}
FLOATS = {"op": "matmul", "m": 1024, "n": 512, "k": 256}
IMAGE = {"expr": "Y[y,x] = sum([i,j], X[y+i,x+j] * 0.5)", "sizes": {"y": 256, "x": 512, "i": 3, "j": 3}}

CLBLAST = {
    "MWG": 128, "NWG": 64, "KWG": 32, "MDIMC": 16, "NDIMC": 8, "MDIMA": 32, "NDIMB": 16, "KWI": 2, "VWM": 4, "VWN": 2,
    "STRM": 0, "STRN": 0, "SA": 1, "SB": 1,
}  # fmt: skip
TRITON = {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8, "num_warps": 4, "num_stages": 3}
CUTLASS = {"cta_m": 256, "cta_n": 128, "cta_k": 32, "warps_m": 4, "warps_n": 2, "inst_m": 16, "stages": 3}


def read(operator: Any, *configurations: Any) -> TunerFile:
    text = "\n".join(map(json.dumps, configurations)).encode()
    file = read_tuner_file(text, operator_from_data(operator), "c.jsonl")
    assert file is not None
    schedules_from_json(b"\n".join(file.schedules), operator_from_data(operator))
    return file


def schedule(operator: Any, configuration: Any) -> Any:
    return json.loads(read(operator, configuration).schedules[0])


def test_clblast_says_how_wide_a_thread_reads_and_what_it_copies() -> None:
    found = schedule(PRODUCT, CLBLAST)
    assert (found["block"], found["threads"], found["thread"]) == (
        {"m": 128, "n": 64}, {"m": 16, "n": 8}, {"m": 8, "n": 8},
    )  # fmt: skip
    assert sorted(found["cached"]) == ["A", "B"] and found["pieces"] == {"A": 4, "B": 4}
    # B lies behind A in shared memory, with A's alignment.
    assert found["vector"] == {"A": 4, "B": 2, "C": 4} and found["reads"] == {"A": 4, "B": 4}
    assert schedule(PRODUCT, CLBLAST | {"SA": 0, "VWM": 8})["reads"] == {"A": 4, "B": 2}
    assert schedule(PRODUCT, CLBLAST | {"STRM": 1})["thread"] == {"m": 4, "n": 8}
    assert (found["inner_step"], found["unroll"]) == ({"k": 2}, 8 * 8 * 2)


def test_triton_lays_out_its_warps_by_its_own_rule() -> None:
    found = schedule(HALVES, TRITON)
    # 128x64 are eight by four fragments: down first, then across where as many are left.
    assert found["thread"] == {"m": 32, "n": 64} and found["instruction"] == "mma_16x8x16"
    assert (found["stages"], found["raster"], found["step"]) == (3, 8, {"k": 32})
    assert schedule(HALVES, {"kwargs": TRITON, "num_warps": 8})["thread"] == {"m": 32, "n": 32}
    scalar = schedule(FLOATS, TRITON | {"GROUP_M": 1})
    assert scalar["thread"] == {"m": 4, "n": 4} and scalar["threads"] == {"m": 8, "n": 16} and scalar["asynchronous"]


def test_cutlass_by_the_columns_of_its_profiler() -> None:
    assert schedule(HALVES, CUTLASS)["thread"] == {"m": 64, "n": 64}
    scalar = schedule(FLOATS, CUTLASS | {"cta_m": 128, "warps_m": 2, "inst_m": 1, "stages": 2})
    # Lanes 8 by 4 of warps of 64 by 64 would be 4 by 8: no side is longer.
    assert scalar["threads"] == {"m": 8, "n": 16} and scalar["thread"] == {"m": 4, "n": 4}


def tuned(x: int, y: int, across: int, down: int, **words: int) -> Any:
    sizes = {"block_size_x": x, "block_size_y": y, "tile_size_x": across, "tile_size_y": down}
    return schedule(IMAGE, sizes | words)


def test_kernel_tuner_counts_elements_a_block_apart() -> None:
    found = tuned(32, 4, 2, 1, use_shmem=0)
    assert found == {
        "threads": {"x": 32, "y": 4}, "vthreads": {"x": 2, "y": 1}, "thread": {"x": 1, "y": 1}, "cached": [],
        "unroll": 18,
    }  # fmt: skip


def test_reads_of_tuned_windows_take_what_their_text_makes_of_them() -> None:
    assert tuned(32, 4, 2, 1, use_shmem=0, read_only=1)["address"] == {"X": 2}
    # 96 columns overhang an image of 512: no element shares what it has checked.
    checked = tuned(32, 4, 3, 1, use_shmem=0, read_only=1)
    assert checked["address"] == {"X": 3} and checked["vthreads"] == {"x": 1, "y": 1} and checked["unroll"] == 9


def test_tuned_tiles_are_loaded_by_rows_and_padded_where_their_ends_would_meet() -> None:
    # 4 * 2 + 2 rows by four at a time; 48 * 2 + 2 columns by 48: three, each by itself.
    assert tuned(48, 4, 2, 2)["waits"] == {"X": 3 * 3} and "padding" not in tuned(48, 4, 2, 2)
    assert tuned(16, 1, 8, 1)["waits"] == {"X": 3 * (2 + 1)}
    # 48 + 2 beyond the lanes that begin a row: fourteen more make a multiple of 32.
    assert tuned(48, 4, 2, 2, use_padding=1)["padding"] == {"X": 14}
    assert tuned(64, 4, 2, 2, use_padding=1)["padding"] == {}


def test_bodies_that_are_too_long_are_unrolled_along_one_axis() -> None:
    assert tuned(32, 4, 16, 16)["unroll"] == 9 * 256 and tuned(32, 4, 32, 32)["unroll"] == 3 * 1024


@pytest.mark.parametrize("ending", ["}}", ",", ""])
def test_a_cache_is_read_with_its_times_also_unfinished(ending: str) -> None:
    entries = {"a": CLBLAST | {"time": 2.5}, "b": CLBLAST | {"MWG": 64, "time": "InvalidConfig"}}
    head = '{"device_name": "board", "tune_params_keys": ["MWG"], "cache": {\n'
    text = head + ",\n".join(f'"{key}": {json.dumps(value)}' for key, value in entries.items()) + ending
    file = read_tuner_file(text.encode(), operator_from_data(PRODUCT), "cache.json")
    assert file is not None and file.tuner == "CLBlast" and len(file.schedules) == 2
    assert file.measured[0] == 2.5e-3 and np.isnan(file.measured[1])


def test_results_by_the_schema_of_tuners() -> None:
    results = {"results": [{"configuration": CLBLAST, "measurements": [{"name": "time", "value": 3.0}]}]}
    file = read_tuner_file(json.dumps(results).encode(), operator_from_data(PRODUCT), "r.json")
    assert file is not None and file.measured.tolist() == [3e-3]


def test_schedules_of_ours_are_none_of_a_tuner() -> None:
    assert read_tuner_file(b'{"block": {"m": 64}}', operator_from_data(PRODUCT), "s.jsonl") is None
    assert read_tuner_file(b"no json", operator_from_data(PRODUCT), "s.jsonl") is None


@pytest.mark.parametrize(
    ("operator", "configuration", "message"),
    [
        (PRODUCT, {k: v for k, v in CLBLAST.items() if k != "NDIMC"}, "c.jsonl[1].NDIMC: is missing"),
        (PRODUCT, CLBLAST | {"MWG": "wide"}, "c.jsonl[1].MWG: 'wide' is no count"),
        (PRODUCT, CLBLAST | {"GEMMK": 1}, "kernel 0"),
        (HALVES, TRITON | {"SPLIT_K": 4}, "c.jsonl[1].SPLIT_K: 4 is more than a schedule says"),
        (HALVES, CUTLASS | {"warps_k": 2}, "warps_k"),
        (IMAGE, CLBLAST, "is no product"),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(operator: Any, configuration: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        read(operator, configuration)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text", ['{"cache": 3, "tune_params_keys": []}', '{"tune_params_keys": [}', '[{"configuration": 1}]']
)
def test_broken_caches_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"^cache\.json"):
        read_tuner_file(text.encode(), operator_from_data(PRODUCT), "cache.json")


def test_the_command_ranks_and_holds_times_against_predictions(tmp_path: Path) -> None:
    operator, cache = tmp_path / "operator.json", tmp_path / "cache.json"
    operator.write_text(json.dumps(PRODUCT))
    narrow = CLBLAST | {"MWG": 16, "NWG": 16, "MDIMC": 8, "MDIMA": 16, "VWM": 1, "VWN": 1}
    entries = {"a": narrow | {"time": 1.0}, "b": CLBLAST | {"time": 0.2}, "c": CLBLAST | {"VWN": 1, "time": "Failed"}}
    cache.write_text(json.dumps({"tune_params_keys": [], "cache": entries}))
    arguments = ["score", str(operator), "--device", "rtx-3090", "--schedules", str(cache), "--ranked"]
    result = CliRunner().invoke(main, [*arguments, "--json"])
    records = [json.loads(line) for line in result.stdout.splitlines()]
    assert [record["seconds"] for record in records] == sorted(record["seconds"] for record in records)
    assert records[-1]["schedule"] == 1 and records[-1]["measured_seconds"] == 1e-3
    assert {record["schedule"]: record["measured_seconds"] for record in records}[3] is None
    table = CliRunner().invoke(main, arguments).stdout
    assert "measured" in table and "the first choice takes 1.00 of the best" in " ".join(table.split())
