"""The text of a device file, TOML or JSON, to a checked device: what is wrong in it is named by its key path."""

from __future__ import annotations

import functools
import re
import stat
from pathlib import Path
from typing import Any

import msgspec

from hal.spec.device import DeviceSpec
from hal.spec.parts import rate_key
from hal.support.errors import InputError, listed

#: Device files are a few KiB; anything above this is some other file.
FILE_LIMIT_BYTES = 1 << 20

#: File names with these endings are device files.
DEVICE_SUFFIXES = (".toml", ".json")


def device_schema() -> dict[str, Any]:
    """The JSON Schema of a device file."""
    schema = msgspec.json.schema(DeviceSpec)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Roller device file", **schema}


def read_device(path: Path) -> DeviceSpec:
    """The device that a file of the user's own describes, read anew at every call.

    Raises:
        InputError: the file cannot be read, is too large, or describes no device; the error names the key path.
    """
    return device_from_text(file_bytes(path, "device"), str(path))


def file_bytes(path: Path, what: str) -> bytes:
    """The bytes of a user's file about a device or a node (`what`).

    Raises:
        InputError: the file has another ending, cannot be read or is too large.
    """
    shown = str(path)
    if path.suffix.lower() not in DEVICE_SUFFIXES:
        raise InputError(shown, f"got a file ending in {path.suffix!r}, expected .toml or .json", "rename the file")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InputError(shown, "is not a regular file", f"give the path of a {what} file")
        with path.open("rb") as file:
            data = file.read(FILE_LIMIT_BYTES + 1)
    except FileNotFoundError:
        raise InputError(
            shown, "there is no such file", f"`roller devices` lists the {what}s that need no file"
        ) from None
    except OSError as error:
        raise InputError(shown, f"cannot be read: {error.strerror}", f"give the path of a {what} file") from None
    if len(data) > FILE_LIMIT_BYTES:
        raise InputError(
            shown, f"is larger than {FILE_LIMIT_BYTES} bytes", f"a {what} file has a few KiB; check the path"
        )
    return data


def device_from_text(data: bytes, shown: str) -> DeviceSpec:
    """The device in the bytes of a file called `shown`: JSON where the name ends in ``.json``, else TOML.

    Raises:
        InputError: the text is malformed or describes no device; the error names line or key path.
    """
    raw = table_from_text(data, shown)
    try:
        return msgspec.convert(raw, DeviceSpec)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        problem = cause if isinstance(cause, InputError) else _explained(str(error), raw)
        raise InputError(f"{shown}: {problem.field}", problem.problem, problem.remedy) from None


def table_from_text(data: bytes, shown: str) -> Any:
    """Table in the bytes of a file called `shown`: JSON where the name ends in ``.json``, else TOML.

    Raises:
        InputError: the text is malformed; the error names the line.
    """
    return _json(data, shown) if shown.lower().endswith(".json") else _toml(data, shown)


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
        match = re.match(r"line (\d+)", place)
        line = match[1] if match else "the last" if place.startswith("end") else "unknown"
        raise InputError(f"{shown}: line {line}", f"is not TOML: {message}", "correct the line") from None
    except (RecursionError, ValueError):
        raise InputError(shown, "is not TOML: nested too deeply or a number too long", "correct the file") from None


def _json(data: bytes, shown: str) -> Any:
    text = _text(data, shown)
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        match = re.fullmatch(r"(?:JSON is malformed: )?(.*?)(?: \(byte (\d+)\))?", str(error), re.DOTALL)
        message, offset = (match[1].partition(" - at ")[0], match[2]) if match else (str(error), None)
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
    match = _PATH.match(message)
    what, steps = (match["what"], match["path"] or "") if match else (message, "")
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
        return rate_key(str(entry.get("name")), str(entry["input_dtype"]), str(entry.get("accumulate_dtype", "?")))
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
    keys = list(_struct_fields()[_STRUCT_AT.get(table, "DeviceSpec")])
    close = difflib.get_close_matches(key, keys, n=1, cutoff=0.75)
    remedy = f"did you mean {close[0]}?" if close else f"the keys here are {listed(keys)}"
    return InputError(f"{path}.{key}", "is not a key of a device file", remedy)


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
