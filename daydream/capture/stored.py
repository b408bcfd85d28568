"""Captured steps of libraries' models kept between runs, by all that they follow from: a known one needs no PyTorch.

Files of the user's own are captured anew in every run, since what they import is not known before they have run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from daydream.capture.captured import Capture
from hal.support.store import Store, cache_folder, code_digest, decoded, digest, stamps

#: Folder of the user's cache that holds the steps.
FOLDER = "captures"

#: What steps follow from in this project.
_CODE = ("hal/support", "sokoban/language", "daydream")

#: Libraries whose models are known by their names or configurations, by what stands in front of those.
_LIBRARIES = {"hf": "transformers", "timm": "timm"}

#: What begins names of environment variables that PyTorch and the libraries read.
_VARIABLES = ("HF_", "PYTORCH_", "TIMM_", "TORCH_", "TRANSFORMERS_", "USE_")


@dataclass(frozen=True)
class StoredStep:
    """A captured step.

    Attributes:
        capture: of a model with all its blocks or a few of them.
        blocks: equal blocks of the model where the capture has fewer, else None.
    """

    capture: Capture
    blocks: int | None = None


def known_or_captured(model: object, asked: object, make: Callable[[], StoredStep]) -> StoredStep:
    """The step of a model as it was captured before, else captured now and kept.

    Args:
        model: as :func:`daydream.capture.sources.load_subject` takes it; what is no text of a library's model is
            captured anew.
        asked: every option of the capture, whose ``repr`` tells it from others.
        make: captures it.
    """
    key = key_of(model, asked) if isinstance(model, str) else None
    if key is None:
        return make()
    store = Store(cache_folder(FOLDER))
    known: StoredStep | None = decoded(store.read(key), StoredStep)
    if known is not None:
        return known
    step = make()
    store.write(key, msgspec.msgpack.encode(step))
    store.trim()
    return step


def key_of(model: str, asked: object) -> str | None:
    """The key of a model's step; None where what it follows from cannot be known, or ``ROLLER_CACHE`` is 0."""
    kind, _, name = model.partition(":")
    if kind not in _LIBRARIES or not name or os.environ.get("ROLLER_CACHE") == "0":
        return None
    contents = b""
    if kind == "hf":
        path = Path(name)
        try:
            contents = (path / "config.json" if path.is_dir() else path).read_bytes()
        except (OSError, ValueError):
            return None  # The capture says so.
    surroundings = _surroundings(_LIBRARIES[kind])
    return None if surroundings is None else digest(surroundings, model, contents, repr(asked))


@cache
def _surroundings(library: str) -> str | None:
    """A digest of this project's code, of a library's files, of all that is installed, and of the environment."""
    spec = find_spec(library)
    if spec is None or not spec.submodule_search_locations:
        return None
    files = [file for place in spec.submodule_search_locations for file in stamps(place, (".py",))]
    installed = [path.name for entry in sys.path for path in Path(entry or ".").glob("*.dist-info")]
    variables = [item for item in os.environ.items() if item[0].startswith(_VARIABLES)]
    return digest(
        sys.version, repr(sorted(files)), repr(sorted(installed)), repr(sorted(variables)), code_digest(*_CODE)
    )
