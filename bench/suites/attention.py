"""``python -m bench.suites.attention FILE``: attention operators drawn by a seed, or gradients of such ones.

Heads from 1 to 64, fewer heads of keys, widths from 64 to 256, odd lengths, causal masks, windows, decoding, keys of
another length than the queries.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import click

HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MASKS = ("none", "causal", "window", "decode", "other keys")
#: Tokens of a page, and pages of a pool that no sequence needs.
PAGES, MORE_PAGES = (1, 5, 8, 16, 16, 32, 64, 128), 3


def drawn(
    count: int, seed: int, dtypes: tuple[str, ...], gradients: bool = False, pages: bool = False, lengths: bool = False
) -> list[dict[str, Any]]:
    """``count`` operators as ``roller compile`` reads them; ``gradients`` of queries and of keys in turns, some with
    slopes where those of 16 bits fill whole pieces, or keys and values in ``pages``, or of sequences with ``lengths``
    of their own, or both.

    >>> [each["head_dim"] in HEAD_DIMS for each in drawn(2, 0, ("float16",))]
    [True, True]
    """
    source = random.Random(seed)
    operators = [_operator(source, dtypes[number % len(dtypes)]) for number in range(count)]
    if pages:
        operators = [_in_pages(source, operator) for operator in operators]
    if lengths:
        operators = [operator | {"lengths": True} for operator in operators]
    if pages or lengths:
        return operators
    if not gradients:
        return operators
    subjects = ("queries", "keys")
    return [
        operator
        | {"op": "attention_gradient", "of": subjects[number // len(dtypes) % 2]}
        | ({"slopes": True} if number % 3 and operator["queries"] % 8 == 0 and "float32" not in dtypes else {})
        for number, operator in enumerate(operators)
    ]


def _operator(source: random.Random, dtype: str) -> dict[str, Any]:
    heads = source.choice(HEADS)
    queries = source.choice([source.randint(1, 700), 64 * source.randint(1, 16)])
    operator = {
        "op": "attention", "b": source.choice([1, 1, 2, 3, 5]), "heads": heads,
        "kv_heads": source.choice([some for some in range(1, heads + 1) if heads % some == 0]), "queries": queries,
        "head_dim": source.choice(HEAD_DIMS), "dtype": dtype,
    }  # fmt: skip
    mask = source.choice(MASKS)
    if mask == "other keys":
        return operator | {"keys": source.randint(1, 1500)}
    if mask == "decode":
        return operator | {"queries": source.choice([1, 1, 1, 2, 4]), "keys": source.randint(16, 6000), "causal": True}
    if mask == "window":
        return operator | {"causal": True, "window": source.randint(1, queries)}
    return operator | ({"causal": True} if mask == "causal" else {})


def _in_pages(source: random.Random, operator: dict[str, Any]) -> dict[str, Any]:
    """An operator whose keys and values lie in pages of a pool."""
    page, keys = source.choice(PAGES), operator.get("keys", operator["queries"])
    return operator | {"page": page, "pool": operator["b"] * -(-keys // page) + MORE_PAGES}


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--count", type=click.IntRange(1), default=300, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "float16", "bfloat16"]), multiple=True, default=("float16", "bfloat16"),
    show_default=True, help="Element types, in turns.",
)  # fmt: skip
@click.option("--gradients", is_flag=True, help="Gradients of queries and of keys in turns.")
@click.option("--pages", is_flag=True, help="Keys and values in pages of a pool.")
@click.option("--lengths", is_flag=True, help="Sequences with numbers of keys of their own.")
def main(
    file: Path, count: int, seed: int, dtype: tuple[str, ...], gradients: bool, pages: bool, lengths: bool
) -> None:
    """Write COUNT attention operators to FILE."""
    if gradients and (pages or lengths):
        raise click.UsageError("gradients have no keys in pages, and no lengths: give --gradients alone")
    operators = drawn(count, seed, dtype, gradients, pages, lengths)
    file.write_text("[\n" + ",\n".join(json.dumps(each) for each in operators) + "\n]\n")


if __name__ == "__main__":
    main()
