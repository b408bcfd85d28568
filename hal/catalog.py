"""Devices by name or from a file, and where their numbers come from.

The shipped devices are the ``devices/*.toml`` files beside this module; a file of the user's own has the same format,
as TOML or JSON. ``device_schema`` describes it for editors.
"""

from __future__ import annotations

import functools
import os
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from hal.device import WARP_GROUPS, DeviceSpec
from hal.errors import InputError, listed
from hal.keypaths import leaves, source_of

FILE_LIMIT_BYTES = 1 << 20
"""Device files are a few KiB; anything above this is some other file."""

THIS_CPU = "cpu"
"""The name under which this machine's own cores are a device."""

_SUFFIXES = (".toml", ".json")


def load_device(name_or_path: str | os.PathLike[str]) -> DeviceSpec:
    """The device of that name or alias (upper or lower case), or the one described in that file.

    ``cpu`` is this machine's own processor, measured when it is first asked for (`hal.cpu`). Text is taken for a path
    when it ends in ``.toml`` or ``.json`` or has a path separator in it. Shipped devices are read once; a file is read
    every time.
    """
    text = os.fspath(name_or_path)
    if "\0" in text:
        raise InputError("device", f"no device is called {text!r}", "`roller devices` lists the names")
    separators = [separator for separator in (os.sep, os.altsep) if separator]
    if isinstance(name_or_path, os.PathLike) or text.lower().endswith(_SUFFIXES) or any(s in text for s in separators):
        return _load_file(Path(text))
    wanted = _folded(text)
    if wanted == THIS_CPU:
        from hal.cpu import this_cpu

        return this_cpu()
    if wanted in device_names():
        return _shipped(wanted)
    name = _names_by_alias().get(wanted)
    if name is None:
        raise _unknown(text)
    return _shipped(name)


@functools.cache
def device_names() -> tuple[str, ...]:
    """Names of the shipped devices, sorted."""
    from importlib.resources import files

    entries = files("hal").joinpath("devices").iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


def all_devices() -> tuple[DeviceSpec, ...]:
    """The shipped devices, in order of name."""
    return tuple(_shipped(name) for name in device_names())


def device_aliases() -> dict[str, str]:
    """Every alias of a shipped device, as its file spells it, to the name of the device."""
    return {alias: device.name for device in all_devices() for alias in device.aliases}


def device_schema() -> dict[str, Any]:
    """The JSON Schema of a device file."""
    schema = msgspec.json.schema(DeviceSpec)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Roller device file", **schema}


def provenance_of(device: DeviceSpec, key_path: str) -> str:
    """Where a number of the device comes from, in words.

    ``key_path`` is that of one number (``layers.dram.bandwidth_bytes_per_second``), or of several with one source
    (``limits``); a leading ``device.`` is dropped.
    """
    path = key_path.removeprefix("device.")
    paths = [known for known, _ in leaves(device)]
    text = source_of(device.provenance, path)
    if text is None or not any(known == path or known.startswith(f"{path}.") for known in paths):
        import difflib

        close = difflib.get_close_matches(path, paths, n=1)
        raise InputError(
            f"device.{path}",
            f"{device.name} has no source under this key path",
            f"did you mean {close[0]}?" if close else "use a path such as layers.dram.bandwidth_bytes_per_second",
        )
    return text


@functools.cache
def _shipped(name: str) -> DeviceSpec:
    from importlib.resources import files

    file_name = f"{name}.toml"
    device = _decoded(files("hal").joinpath("devices", file_name).read_bytes(), file_name)
    if device.name != name:
        raise InputError(f"{file_name}: device.name", f"got {device.name!r}, expected {name!r}", "rename the file")
    return device


@functools.cache
def _names_by_alias() -> dict[str, str]:
    found: dict[str, str] = {}
    for alias, name in device_aliases().items():
        key = _folded(alias)
        owner = key if key in device_names() else found.setdefault(key, name)
        if owner != name:
            raise InputError(f"{name}.toml: device.aliases", f"{alias!r} already names another device", "remove it")
    return found


def _folded(name: str) -> str:
    """``NVIDIA A100 80GB PCIe`` and ``nvidia_a100-80gb-pcie`` are one name."""
    return re.sub(r"[\s_-]+", "-", name.strip().casefold())


def _unknown(text: str) -> InputError:
    import difflib

    spellings = {_folded(spelling): spelling for spelling in (*device_aliases(), *device_names(), THIS_CPU)}
    close = [spellings[key] for key in difflib.get_close_matches(_folded(text), spellings, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(filter(None, [', '.join(close[:-1]), close[-1]]))}? " if close else ""
    where = "`roller devices` lists the names; a path to a .toml file works too"
    return InputError("device", f"no device is called {text!r}", hint + where)


def _load_file(path: Path) -> DeviceSpec:
    shown = str(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(shown, f"got a file ending in {path.suffix!r}, expected .toml or .json", "rename the file")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(shown, "is not a regular file", "give the path of a device file")
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise InputError(
            shown, "there is no such file", "`roller devices` lists the devices that need no file"
        ) from None
    except OSError as error:
        raise InputError(shown, f"cannot be read: {error.strerror}", "give the path of a device file") from None
    if len(data) > FILE_LIMIT_BYTES:
        raise InputError(
            shown, f"is larger than {FILE_LIMIT_BYTES} bytes", "a device file has a few KiB; check the path"
        )
    return _decoded(data, shown)


def _decoded(data: bytes, shown: str) -> DeviceSpec:
    raw = _json(data, shown) if shown.lower().endswith(".json") else _toml(data, shown)
    try:
        return msgspec.convert(raw, DeviceSpec)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        problem = cause if isinstance(cause, InputError) else _explained(str(error), raw)
        raise InputError(f"{shown}: {problem.field}", problem.problem, problem.remedy) from None


def _text(data: bytes, shown: str) -> str:
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(f"{shown}: line {line}", "is not UTF-8 text", "save the file as UTF-8") from None


def _toml(data: bytes, shown: str) -> Any:
    import tomllib

    text = _text(data, shown)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, _, place = str(error).partition(" (at ")
        found = re.match(r"line (\d+)", place)
        line = found[1] if found else "the last" if place.startswith("end") else "unknown"
        raise InputError(f"{shown}: line {line}", f"is not TOML: {message}", "correct the line") from None
    except (RecursionError, ValueError):
        raise InputError(shown, "is not TOML: nested too deeply or a number too long", "correct the file") from None


def _json(data: bytes, shown: str) -> Any:
    text = _text(data, shown)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        found = re.fullmatch(r"(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?", str(error), re.DOTALL)
        message, offset = (found[1].partition(" - at ")[0], found[2]) if found else (str(error), None)
        end = len(text) if offset is None else int(offset)
        line = text.encode().count(b"\n", 0, end) + 1
        raise InputError(f"{shown}: line {line}", f"is not JSON: {message}", "correct the line") from None
    except RecursionError:
        raise InputError(shown, "is not JSON: nested too deeply", "correct the file") from None


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `\$?(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[^.\[\]]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


_IN_WORDS = {"int": "a whole number", "float": "a number", "str": "text", "array": "an array", "object": "a table"}


def _explained(message: str, raw: Any) -> InputError:
    """msgspec's complaint about ``$.layers[3].capacity_bytes``, with the key path and the value as we show them."""
    found = _PATH.match(message)
    what, steps = (found["what"], found["path"] or "") if found else (message, "")
    path, value = _followed(steps, raw)
    if field := re.fullmatch(r"Object missing required field `(.*)`", what):
        return InputError(f"{path}.{field[1]}", "is missing", "add it; docs/devices.md describes every key")
    if field := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        return _unknown_key(path, field[1])
    if re.match(r"Invalid enum value", what):
        expected = f"one of {', '.join(_choices(steps))}"
    elif length := re.match(r"Expected `array` of length (\d+)", what):
        expected = f"an array of {length[1]}"
    else:
        wanted = re.sub(r"^Expected `(.*?)`.*$", r"\1", what).removesuffix(" | null")
        expected = _IN_WORDS.get(wanted, wanted)
    return InputError(path, f"got {_brief(value)}, expected {expected}")


def _followed(steps: str, raw: Any) -> tuple[str, Any]:
    """The key path and the value that ``.layers[3].capacity_bytes`` leads to; list entries go by their own names."""
    path, value = "device", raw
    for step in _STEP.finditer(steps):
        if step["key"] is not None:
            path, value = f"{path}.{step['key']}", value[step["key"]]
        elif step["index"] is not None:
            value = value[int(step["index"])]
            path = f"{path}.{_entry_name(value)}" if _entry_name(value) else f"{path}[{step['index']}]"
        else:
            key, value = next(((key, item) for key, item in value.items() if not isinstance(item, str)), ("", value))
            path = f"{path}.{key}"
    return path, value


def _entry_name(entry: Any) -> str:
    if not isinstance(entry, dict):
        return ""
    if "input_dtype" in entry:
        groups = f"-{WARP_GROUPS}" if entry.get("name") == WARP_GROUPS else ""
        return f"{entry['input_dtype']}-{entry.get('accumulate_dtype', '?')}{groups}"
    return str(entry.get("dtype") or (entry.get("name") if "capacity_bytes" in entry or "shared_by" in entry else ""))


@functools.cache
def _struct_fields() -> dict[str, dict[str, Any]]:
    """Properties of every struct of the schema, by struct name."""
    definitions: dict[str, Any] = device_schema()["$defs"]
    return {name: definition.get("properties", {}) for name, definition in definitions.items()}


_STRUCT_AT = {
    "": "DeviceSpec",
    "teu": "Teu",
    "layers": "MemoryLayer",
    "limits": "Limits",
    "clocks": "Clocks",
    "throughput": "Throughput",
    "matrix_instructions": "MatrixInstruction",
    "framework": "Framework",
}


def _choices(steps: str) -> list[str]:
    keys = [step["key"] for step in _STEP.finditer(steps) if step["key"] is not None]
    field = _struct_fields()[_STRUCT_AT[keys[0] if len(keys) > 1 else ""]].get(keys[-1], {})
    variants = [field, *field.get("anyOf", ())]
    options: list[Any] = next((variant["enum"] for variant in variants if "enum" in variant), [])
    return [repr(option) for option in options]


def _unknown_key(path: str, key: str) -> InputError:
    import difflib

    table = path.removeprefix("device").removeprefix(".").partition(".")[0].partition("[")[0]
    known = list(_struct_fields()[_STRUCT_AT.get(table, "DeviceSpec")])
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    remedy = f"did you mean {close[0]}?" if close else f"the keys here are {listed(known)}"
    return InputError(f"{path}.{key}", "is not a key of a device file", remedy)


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
