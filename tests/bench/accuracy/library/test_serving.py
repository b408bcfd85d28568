"""Layers of serving engines as kernels, and the errors on the measured ones."""

from __future__ import annotations

import pytest

from bench.accuracy.data import default_directory
from bench.accuracy.library.serving import BAR, Layer, layer_table, read_layers
from roller.library.calls import LibraryCall

PATH = default_directory() / "serving" / "layers.parquet"


def test_a_table_has_a_row_for_each_board_source_and_kind() -> None:
    call = LibraryCall(kind="rows", label="norm", sizes=(64, 4096, 0), dtype="float16", variant="vllm rms_norm")
    layers = [
        Layer(
            board=board,
            source="me",
            kind="norm",
            chosen_on=chosen_on,
            measured=1e-3,
            settled=False,
            cold=False,
            calls=(call,),
        )
        for board in ("a100", "h100")
        for chosen_on in (True, False)
    ]
    view = layer_table(layers)
    assert list(view.columns[3].cells) == ["2", "2"]
    assert list(view.columns[-1].cells) == [f"{BAR:g}%"] * 2


@pytest.mark.slow
def test_measured_kernels_of_rows_are_within_the_bar() -> None:
    pytest.importorskip("pyarrow.parquet")
    if not PATH.exists():
        pytest.skip("no measured layers")
    layers = [each for each in read_layers(PATH) if each.kind in ("rms_norm", "embedding") and each.board != "rtx4090"]
    errors = [float(str(cell).rstrip("%")) for cell in layer_table(layers).columns[4].cells]
    assert max(errors) <= BAR
