"""One bundle for many sizes: its rule, its kernels as the runtime launches them, and what says so."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from codegen.bundle.reader import read_bundle
from codegen.bundle.records import Bundle, SizeRecord
from codegen.runtime.gpu import GpuOperator
from codegen.runtime.load import load
from hal.catalog import load_device
from hal.spec.device import DeviceSpec
from hal.support.errors import InputError
from roller.compile.bundles import write_bundle
from roller.compile.pipeline import compile_operators, verify_operators
from roller.explain.launch_sizes import explained
from roller.size_grids import fine_sizes, size_grid
from roller.sizes import LONGEST, SizedPrograms
from sokoban.language.expression import LaunchSize
from sokoban.language.operators import operator_from_data
from tests.codegen import fake_cupy
from tests.support.executors import InTurn

#: Small enough for the emulator, with splits of the reduction for few rows.
PRODUCT = {"op": "matmul", "m": {"up to": 96}, "n": 32, "k": 256, "name": "product"}


def board(name: str) -> DeviceSpec:
    """A board whose kernels stay source, which takes no compiler of NVIDIA's."""
    return msgspec.structs.replace(
        load_device(name), code_generator="cuda-source", code_generator_reason="the test compiles nothing"
    )


@pytest.fixture(scope="module")
def product() -> SizedPrograms:
    """The product's candidates, of which a test takes a copy if it changes them."""
    return SizedPrograms.of(operator_from_data(PRODUCT), board("v100"), "roller")


@pytest.fixture(scope="module")
def bundle(emulator: None, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The product's, all of its kernels proved."""
    expr, folder = operator_from_data(PRODUCT), tmp_path_factory.mktemp("bundles")
    (result,) = compile_operators([expr], board("v100"), top_k=1, verify=1, pool=InTurn(), method="roller")
    return read_bundle(write_bundle(result, board("v100"), folder).directory)


def record_of(bundle: Bundle) -> SizeRecord:
    record = bundle.manifest.launch_size
    assert record is not None
    return record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "multiple", "columns", "sizes"),
    [(48, 1, 32, (1, 2, 3, 17, 31, 40, 48)), (128, 8, 512, (8, 16, 24, 64, 104, 128))],
    ids=["any number of few rows", "multiples up to many rows"],
)
def test_every_size_has_a_kernel_near_the_best_candidate(
    most: int, multiple: int, columns: int, sizes: Sequence[int]
) -> None:
    expr = operator_from_data({**PRODUCT, "m": {"up to": most, "multiple": multiple}, "n": columns, "k": 512})
    programs = SizedPrograms.of(expr, load_device("v100"), "roller")
    rule = programs.rule()
    assert rule.ranges[0].first == 1 and rule.ranges[-1].last == most
    assert all(before.last + 1 == after.first for before, after in zip(rule.ranges, rule.ranges[1:], strict=False))
    for size in sizes:
        prices = programs.prices(size)
        price = rule.price(size, dict(zip(programs.candidates, prices.tolist(), strict=True)))
        assert price <= 1.1 * prices.min(), size
    assert len(rule.choices) < len(rule.ranges) + 1 and len(explained(programs, rule)) > len(rule.ranges)


class _NoneForMany(SizedPrograms):
    """Every candidate is the best of three sizes, the last of all others; elsewhere it takes half as long again."""

    def prices(self, size: int, positions: Sequence[int] | None = None) -> NDArray[np.float64]:
        wanted = range(len(self.candidates)) if positions is None else positions
        return np.array([1.0 if min((size - 1) // 3, len(self.candidates) - 1) == each else 1.5 for each in wanted])


@pytest.mark.slow
def test_there_are_as_many_kernels_as_the_promise_takes(product: SizedPrograms) -> None:
    general = tuple(each for each in product.candidates if each.only is None and len(each.program.parts) == 1)[:20]
    programs = _NoneForMany(product.expr, product.device, general, product.last)
    rule = programs.rule()
    assert len(rule.choices) == len(general) == 20
    for size in range(1, 97):
        prices = programs.prices(size)
        by_candidate = dict(zip(general, prices.tolist(), strict=True))
        assert rule.price(size, by_candidate) <= LONGEST * prices.min(), size


@pytest.mark.slow
def test_refused_candidates_are_chosen_no_more(product: SizedPrograms) -> None:
    programs = SizedPrograms(product.expr, product.device, product.candidates, product.last)
    first = programs.rule().choices[-1].candidate
    programs.refused.add(first)
    assert first not in [choice.candidate for choice in programs.rule().choices]


def test_the_runtime_launches_the_kernel_of_the_size(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy)
    operator = load(bundle.directory)
    assert isinstance(operator, GpuOperator)
    sizes = record_of(operator.bundle).ranges
    generator = np.random.default_rng(0)
    b = generator.uniform(-1, 1, (256, 32)).astype(np.float32)
    for size in sorted({1, 2, 96, *(each.last for each in sizes[:4]), *(each.first for each in sizes[:4])}):
        a = generator.uniform(-1, 1, (size, 256)).astype(np.float32)
        c = np.asarray(operator(fake_cupy.asarray(a), fake_cupy.asarray(b)))
        assert c.shape == (size, 32) and np.allclose(c, a @ b, atol=1e-4), size
    with pytest.raises(InputError, match=r"product\.m: is 97; it takes 1 to 96"):
        operator(fake_cupy.asarray(np.zeros((97, 256), np.float32)), fake_cupy.asarray(b))
    with pytest.raises(InputError, match="rank: is chosen at launch, by m"):
        load(operator.bundle.directory, rank=1)


def test_all_kernels_of_a_bundle_are_proved(bundle: Bundle) -> None:
    assert all(kernel.verified for kernel in bundle.kernels)
    sized = [
        kernel.verification for kernel in bundle.kernels if kernel.launch or any(p.launch for p in kernel.launches)
    ]
    assert sized and all(check is not None and 1 in check.sizes and len(check.sizes) > 3 for check in sized)


@pytest.mark.usefixtures("emulator")
def test_kernels_are_proved_without_a_bundle() -> None:
    expr = operator_from_data({**PRODUCT, "m": {"up to": 20}})
    ((name, checks),) = verify_operators(
        [expr], board("v100"), top_k=1, pool=InTurn(), order_seeds=(0,), method="roller"
    )
    assert name == "product" and checks and all(check.passed for check in checks)


def test_a_manifest_whose_sizes_have_a_gap_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    folder = shutil.copytree(bundle.directory, tmp_path / "bundle")
    data = msgspec.json.decode((folder / "manifest.json").read_bytes())
    data["launch_size"]["ranges"][-1]["first"] += 1
    (folder / "manifest.json").write_bytes(msgspec.json.encode(data))
    with pytest.raises(InputError, match="is damaged: sizes"):
        read_bundle(folder)


@pytest.mark.parametrize("name", ["epyc-7763", "mi50"])
def test_other_boards_take_numbers(name: str) -> None:
    with pytest.raises(
        InputError, match=r"product: kernels of .* have no size that is known at launch; give m a number"
    ):
        SizedPrograms.of(operator_from_data(PRODUCT), load_device(name))


def test_operators_of_several_kernels_take_numbers() -> None:
    pair = "H[m,n] = sum(k, X[m,k] * A[n,k]); Y[m,p] = sum(n, relu(H[m,n]) * B[p,n])"
    expr = operator_from_data({"expr": pair, "sizes": {"m": {"up to": 64}, "k": 32, "n": 64, "p": 32}, "name": "pair"})
    with pytest.raises(InputError, match="pair: takes several kernels, whose sizes are all numbers"):
        SizedPrograms.of(expr, load_device("a100"))


def test_operators_along_an_axis_take_numbers() -> None:
    expr = operator_from_data({"op": "scan", "function": "sum", "shape": [{"up to": 64}, 32], "name": "sums"})
    with pytest.raises(InputError, match="sums: takes a kernel that goes along an axis, whose sizes are all numbers"):
        SizedPrograms.of(expr, load_device("v100"))


def test_grids_of_sizes_end_at_the_largest() -> None:
    size = LaunchSize("m", 1000, 8)
    for sizes in (size_grid(size, 1.5), fine_sizes(size)):
        assert sizes[0] == 8 and sizes[-1] == 1000 and sizes == sorted(set(sizes))
        assert all(each % 8 == 0 for each in sizes)
