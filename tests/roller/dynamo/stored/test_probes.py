"""Libraries that Inductor tries to load: asked once a machine, and again where the answer was no."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch._inductor import codecache
from torch._inductor.cpu_vec_isa import VecAVX512, VecISA

from roller.dynamo.stored.probes import remembered_probes


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Libraries that were really tried; those called ``no`` cannot be loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    libraries: list[str] = []

    def probe(_: VecISA, library: str) -> bool:
        libraries.append(Path(library).name)
        return not library.endswith("no")

    monkeypatch.setattr(VecISA, "_probe_load", probe)
    return libraries


def probed(path: Path, content: bytes) -> bool:
    """The answer about a library, as Inductor gets it."""
    path.write_bytes(content)
    with remembered_probes():
        return VecAVX512()._probe_load(str(path))


def test_a_library_that_loads_is_tried_once(asked: list[str], tmp_path: Path) -> None:
    assert [probed(tmp_path / name, b"instructions") for name in ("first", "second")] == [True, True]
    assert asked == ["first"]


def test_one_of_other_bytes_is_tried_itself(asked: list[str], tmp_path: Path) -> None:
    assert [probed(tmp_path / "first", content) for content in (b"vectors", b"tiles")] == [True, True]
    assert asked == ["first", "first"]


def test_one_that_does_not_load_is_tried_again(asked: list[str], tmp_path: Path) -> None:
    assert [probed(tmp_path / "no", b"instructions") for _ in range(2)] == [False, False]
    assert asked == ["no", "no"]


def test_a_compiled_header_is_looked_for_once_as_long_as_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compiled, made = tmp_path / "header.h", []

    def compile_header(header: str, command_line: str, **options: bool) -> str:
        made.append((header, command_line, options))
        compiled.write_text("#include")
        return str(compiled)

    monkeypatch.setattr(codecache, "_precompile_header", compile_header)

    def found() -> str:
        with remembered_probes():
            return codecache._precompile_header("torch.h", "g++ -O3", min_optimize=True)

    assert [found(), found()] == [str(compiled)] * 2 and len(made) == 1
    compiled.unlink()
    assert found() == str(compiled) and len(made) == 2


def test_inductor_has_its_own_method_afterwards(asked: list[str], tmp_path: Path) -> None:
    before = VecISA._probe_load
    probed(tmp_path / "first", b"instructions")
    assert VecISA._probe_load is before
