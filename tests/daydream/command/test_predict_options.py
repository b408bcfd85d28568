"""Options of ``daydream predict``: boards, batch sizes, prices; and what is refused in one line."""

from __future__ import annotations

import pytest

from daydream.command.predict import batch_sizes, chosen_devices, has_flash_attention, hourly_prices
from hal.catalog import load_device
from hal.support.errors import InputError


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        (None, [None]),
        ("8", [8]),
        ("1,2,4", [1, 2, 4]),
        ("8..64", [8, 16, 32, 64]),
        ("8..60", [8, 16, 32]),
        ("8..32+8", [8, 16, 24, 32]),
        ("4, 4 ,2", [4, 2]),
    ],
)
def test_batch_sizes_are_lists_and_ranges(text: str | None, sizes: list[int | None]) -> None:
    assert batch_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "8..4", "-1", "many", "1..8+0", "1..999999999+1", "1,,2", "2**3"])
def test_what_is_no_batch_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--batch"):
        batch_sizes(text)


def test_boards_are_named_once_and_run_cuda() -> None:
    assert [spec.name for spec in chosen_devices("v100, t4,v100")] == ["v100-sxm2-16gb", "t4"]
    everything = chosen_devices("all")
    assert len(everything) > 15 and all(spec.compute_capability is not None for spec in everything)
    with pytest.raises(InputError, match="mi50 runs no CUDA"):
        chosen_devices("mi50")
    with pytest.raises(InputError, match="names no board"):
        chosen_devices(" ,")


def test_prices_belong_to_boards_that_are_asked_for() -> None:
    boards = [load_device("h100"), load_device("t4")]
    assert hourly_prices(("h100=2.5,t4=0.35",), boards) == {"h100-sxm-80gb": 2.5, "t4": 0.35}
    for text in ("h100", "h100=", "h100=0", "h100=nan", "v100=1"):
        with pytest.raises(InputError, match="--price"):
            hourly_prices((text,), boards)


def test_flash_attention_is_for_boards_that_have_it() -> None:
    assert [has_flash_attention(load_device(name)) for name in ("h100", "a100", "v100", "p4")] == [
        True,
        True,
        False,
        False,
    ]
