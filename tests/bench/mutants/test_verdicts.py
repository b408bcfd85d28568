"""Mutants are run as verification runs kernels: wrong ones are noticed, those that do the same are harmless."""

from __future__ import annotations

import random
import threading
from dataclasses import replace

import pytest

import bench.mutants.verdicts
from bench.mutants.corpus import Specimen, cases_of, specimens_of, with_other_edges
from bench.mutants.mutations import KINDS, SYNC_KINDS, Mutation
from bench.mutants.verdicts import Batch, batches_of, counted, drawn, outcomes_of
from bench.suites import suite_path
from sokoban.language.operators import load_operators

pytestmark = pytest.mark.usefixtures("emulator")


@pytest.fixture(scope="module")
def product() -> Specimen:
    """A product that stages its operands in two buffers."""
    expr = next(expr for expr in load_operators(suite_path("mutants")) if expr.name == "product_float32")
    (case,) = cases_of([expr], "v100", 1)
    (specimen,) = specimens_of(case)
    return specimen


def test_a_kernel_knows_whose_it_is(product: Specimen) -> None:
    assert (product.kind, product.label) == ("pipelined", "product_float32, v100, rank 1")
    assert {"barrier", "shared index", "global index", "stage", "trip count"} <= {
        each.kind for each in product.mutations
    }


def test_the_sample_takes_all_synchronizations_and_kinds_in_turn(product: Specimen) -> None:
    few = drawn(product, KINDS, 4, random.Random(1))
    syncs = [each for each in product.mutations if each.kind in SYNC_KINDS]
    assert few[: len(syncs)] == syncs and len({each.kind for each in few[len(syncs) :]}) == 4
    assert few == drawn(product, KINDS, 4, random.Random(1))
    assert len(drawn(product, KINDS, 0, random.Random(1))) == len(product.mutations)
    assert sum(len(batch.mutations) for batch in batches_of(product, product.mutations)) == len(product.mutations)


def test_mutants_are_noticed_or_shown_to_be_harmless(product: Specimen, monkeypatch: pytest.MonkeyPatch) -> None:
    first = {kind: next(each for each in product.mutations if each.kind == kind) for kind in ("barrier", "stage")}
    load = next(each for each in product.mutations if each.kind == "global index" and each.change.startswith("A_ptr"))
    same = replace(load, text=f"(({product.kernel.source[load.start : load.end]}) + 0)")
    monkeypatch.setattr(bench.mutants.verdicts, "with_other_edges", lambda specimen: None)
    batch = Batch(specimen=product, mutations=(first["barrier"], first["stage"], load, same))
    barrier, stage, moved, harmless = outcomes_of(batch, threading.Lock())
    assert (barrier.verdict, barrier.by) == ("noticed", "race")
    assert barrier.line == product.text.line_of(first["barrier"].start)
    assert stage.verdict == moved.verdict == "noticed"
    assert (harmless.verdict, harmless.by) == ("harmless", "same accesses and values, on the one problem of this text")
    assert counted([barrier, stage, moved, harmless]) == {"noticed": 3, "harmless": 1, "needless": 0, "missed": 0}


def test_another_problem_of_the_kernel_has_the_same_mutations(product: Specimen) -> None:
    other = with_other_edges(product)
    assert other is not None
    assert dict(other.case.form.sizes) != dict(product.case.form.sizes)
    kinds: list[list[tuple[str, int]]] = [
        [(each.kind, each.site) for each in specimen.mutations] for specimen in (product, other)
    ]
    assert kinds[0] == kinds[1]


def test_a_loop_without_end_is_noticed(product: Specimen) -> None:
    text = product.kernel.source
    start = text.index("++step")
    endless = Mutation(kind="trip count", change="never", start=start, end=start + len("++step"), text="step += 0")
    (outcome,) = outcomes_of(Batch(specimen=product, mutations=(endless,)), threading.Lock())
    assert outcome.verdict == "noticed"
