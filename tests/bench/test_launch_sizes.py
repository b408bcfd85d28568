"""Bundles of many sizes against the best kernel of each."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from bench.launch_sizes import main


def test_no_size_takes_much_longer_than_alone(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"op": "matmul", "m": {"up to": 12}, "n": 64, "k": 64, "name": "small"}))
    result = CliRunner().invoke(main, [str(path), "--device", "v100", "--rows", "2"])
    assert result.exit_code == 0, result.output
    *_, last = result.output.splitlines()
    ratio = float(last.split("at most ")[1].split()[0])
    assert 1.0 <= ratio <= 1.1 and "of 11 sizes" in last


def test_sizes_that_are_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"op": "matmul", "m": 12, "n": 64, "k": 64, "name": "small"}))
    result = CliRunner().invoke(main, [str(path)])
    assert "small: has no size that is known at launch" in str(result.exception)
