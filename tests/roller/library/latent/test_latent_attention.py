"""Latent attention: products, attention and what is around them, absorbed where a backend does so."""

from __future__ import annotations

from typing import Any

import pytest

from hal.catalog import load_device
from hal.support.errors import InputError
from roller.library import library_time

H100, B200, L40S, A100 = (load_device(name) for name in ("h100", "b200", "l40s", "a100"))
MODULE = {"op": "latent_attention", "batch": 64, "tokens": 1, "context": 8192, "heads": 128}


def kernel(device: Any, **changed: Any) -> str:
    return str(library_time({**MODULE, **changed}, device).kernel)


def seconds(device: Any, **changed: Any) -> float:
    return library_time({**MODULE, **changed}, device).seconds


def test_decoding_reads_the_cache_once_for_all_heads() -> None:
    few, many = (seconds(H100, batch=256, context=32_768, heads=heads) for heads in (16, 64))
    cache = 256 * 32_768 * 576 * 2 / 3.02e12
    assert cache < few < many < 1.3 * cache


def test_a_cache_of_eight_bits_takes_half_as_long_to_read() -> None:
    wide, narrow = (seconds(B200, batch=256, context=65_536, cache=cache) for cache in ("bfloat16", "fp8"))
    assert narrow < 0.6 * wide


@pytest.mark.parametrize(
    ("device", "changed", "absorbed"),
    [
        (H100, {"tokens": 512, "context": 0}, True),
        (H100, {"tokens": 513, "context": 0}, False),
        (H100, {"tokens": 128, "context": 0, "cache": "fp8"}, False),
        (H100, {"tokens": 128, "context": 0, "cache": "fp8", "heads": 64}, True),
        (B200, {"tokens": 2, "context": 0}, False),
        (L40S, {}, True),
    ],
)
def test_few_tokens_are_absorbed(device: Any, changed: dict[str, Any], absorbed: bool) -> None:
    assert kernel(device, **changed) == "latent attention" + ", absorbed" * absorbed


def test_cached_tokens_are_made_into_keys_again_before_new_ones() -> None:
    first = seconds(B200, batch=1, tokens=4096, context=0)
    second = seconds(B200, batch=1, tokens=4096, context=4096)
    assert second > 1.2 * first


def test_queries_without_a_rank_take_one_product() -> None:
    assert seconds(H100, batch=1, heads=16, query_rank=0, hidden=2048) < seconds(H100, batch=1, heads=16)


def test_products_follow_the_precision() -> None:
    assert seconds(B200, batch=8, tokens=2048, precision="fp8-block") < seconds(B200, batch=8, tokens=2048)
    with pytest.raises(InputError, match=r"precision: .* has no matrix units for fp8-block"):
        seconds(A100, precision="fp8-block")
