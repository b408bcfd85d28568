"""Operators as JSON data -> tensor expressions (``docs/operators.md`` describes every one).

A named operator (``{"op": "matmul", ...}``) is shorthand: its class in :mod:`sokoban.language.named` writes the text of
the expression language, and everything goes through :func:`sokoban.language.parser.parse_program`. Nothing in the data
is ever executed.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from hal.support.errors import InputError, listed
from sokoban.language.checks import (
    MAX_AXIS_SIZE,
    MAX_NAME_LENGTH,
    check_accumulate,
    check_dtype,
    check_shape,
    check_sizes,
    shown,
)
from sokoban.language.collectives import is_collective
from sokoban.language.expression import TensorExpr
from sokoban.language.grammar import parse_tree
from sokoban.language.launch_size import MOST_KEY, MULTIPLE_KEY, taken_out, with_launch_size
from sokoban.language.layers import (
    BLOCK,
    EIGHT_BITS_IN_BLOCKS,
    SIXTEEN_BITS,
    GroupedMatmul,
    ScaledMatmul,
    is_layer,
    layer_from_data,
)
from sokoban.language.named import NAMED_OPERATORS
from sokoban.language.named.base import (
    Accumulate,
    AnyDType,
    BiasAdd,
    EpilogueStep,
    Operator,
    Program,
    ResidualAdd,
    Scale,
    Shape,
    Size,
    by,
    tag_of,
    taken_name,
    with_epilogue,
)
from sokoban.language.named.expressions import program_expression
from sokoban.language.parser import parse_program
from sokoban.language.recognition import recognised

#: Largest file of operators that is read.
MAX_FILE_BYTES = 32 * 1024 * 1024

PadValue = float | Literal["inf", "-inf"]


class Expr(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """An operator written in the expression language."""

    expr: str
    sizes: dict[str, Size]
    dtypes: dict[str, AnyDType] = {}
    shapes: dict[str, Shape] = {}
    pad: dict[str, PadValue] = {}
    name: str | None = None
    dtype: AnyDType = "float32"
    accumulate: Accumulate | None = None
    allow_tf32: bool = False
    epilogue: tuple[EpilogueStep, ...] = ()


# One JSON value -> one expression

_T = typing.TypeVar("_T", bound=Struct)


def operator_from_data(data: object) -> TensorExpr:
    """One decoded JSON object -> its expression; ``name`` is the given or the derived one.

    Raises:
        InputError: ``field`` is the path inside the object (``stride``, ``sizes.k``), empty for the object itself.
    """
    if not isinstance(data, dict):
        raise InputError("", f"expected an object, got {_json_type(data)}", 'write {"op": ...} or {"expr": ...}')
    data, at_launch = taken_out(data)
    expr = _from_data(data)
    if at_launch and is_layer(data):
        raise InputError(next(iter(at_launch)), "cannot be left to the launch", "write the most that there is")
    for path, value in at_launch.items():
        expr = with_launch_size(expr, path, value, partial(_axis_sizes, data, path))
    return expr


def _axis_sizes(data: dict[str, Any], path: str, size: int) -> Mapping[str, int]:
    """Sizes of an operator's axes with another size by a key."""
    key = path.removeprefix("sizes.")
    if path != key:
        return {**data["sizes"], key: size}
    changed = {**data, path: size}
    if (place := re.fullmatch(r"shape\[(\d+)\]", path)) is not None:
        changed = {**data, "shape": [*data["shape"][: int(place[1])], size, *data["shape"][int(place[1]) + 1 :]]}
    return _convert(changed, NAMED_OPERATORS[data["op"]]).program().sizes


def _from_data(data: dict[str, Any]) -> TensorExpr:
    """One JSON object whose sizes are all numbers -> its expression."""
    if ("op" in data) == ("expr" in data):
        problem = "has both op and expr" if "op" in data else "has neither op nor expr"
        raise InputError("", problem, 'write {"op": ...} or {"expr": ...}')
    if "expr" in data:
        return _from_expr(data)
    op = data["op"]
    if is_collective(data):
        raise InputError(
            "op", f"{op!r} is a collective of several boards and no kernel of one",
            "roller estimate --implementation library prices it",
        )  # fmt: skip
    if is_layer(data):
        return _layer_products(data)
    if not isinstance(op, str) or op not in NAMED_OPERATORS:
        close = difflib.get_close_matches(str(op), NAMED_OPERATORS, 1) if isinstance(op, str) else []
        operator_names = ", ".join(NAMED_OPERATORS)
        shown = repr(op) if isinstance(op, str) else _json_type(op)
        raise InputError(
            "op",
            f"unknown operator {shown}",
            (f"did you mean {close[0]!r}? " if close else "") + f"known: {operator_names}",
        )
    operator = _convert(data, NAMED_OPERATORS[op])
    _check_operator_name(operator.name)
    program = with_epilogue(operator.program(), operator.epilogue)
    stem = typed_stem(program.stem, operator)
    check_accumulate(operator.accumulate or "float64", operator.dtype)
    try:
        expr = program_expression(operator, operator.name or _short(stem))
    except InputError as error:  # the text is ours, so what is wrong with it is the operator as a whole
        tensor = f"tensor {error.field.removeprefix('shapes.')}: " if error.field.startswith("shapes.") else ""
        field = "output_dtype" if error.field.startswith("dtypes.") else error.field
        field = field if field in ("accumulate", "output_dtype") else ""
        raise InputError(field, tensor + error.problem, error.remedy) from error
    if operator.allow_tf32:
        _check_tf32(expr)
    return expr


def _layer_products(data: dict[str, Any]) -> TensorExpr:
    """A layer that is one kernel of ours: products of eight bits with scales, or grouped ones of 16 bits, or of eight
    bits with scales of blocks.

    Raises:
        InputError: it is another layer, or of other numbers.
    """
    layer = layer_from_data(data)
    _check_operator_name(layer.name)
    remedy = "roller estimate --implementation library prices it"
    if not isinstance(layer, GroupedMatmul | ScaledMatmul):
        problem = f"{data['op']!r} is a layer of several kernels of a library and no kernel of ours"
        raise InputError("op", problem, remedy)
    is_grouped = isinstance(layer, GroupedMatmul)
    able = (*((SIXTEEN_BITS,) if is_grouped else _SCALED), EIGHT_BITS_IN_BLOCKS)
    if layer.precision not in able:
        problem = f"{layer.precision} needs several kernels of a library: those of ours multiply {listed(able)}"
        raise InputError("precision", problem, remedy)
    name = layer.name or _short(layer.stem)
    if layer.precision == EIGHT_BITS_IN_BLOCKS:
        _check_blocks(layer)
        return _grouped_blocks(layer, name) if isinstance(layer, GroupedMatmul) else _products_of_blocks(layer, name)
    return _grouped_products(layer, name) if isinstance(layer, GroupedMatmul) else _scaled_products(layer, name)


def _grouped_products(layer: GroupedMatmul, name: str) -> TensorExpr:
    """Products of tiles of rows that have a group each."""
    sizes = {"b": layer.tiles, "r": layer.tile, "n": layer.n, "k": layer.k}
    return parse_program(
        "Y[b,r,n] = sum(k, X[b,r,k] * W[G[b],n,k])",
        sizes,
        {"G": "int32"},
        name=name,
        shapes={"W": [layer.group_count, layer.n, layer.k]},
        default_dtype=layer.precision,
    )


def _check_blocks(layer: GroupedMatmul | ScaledMatmul) -> None:
    """Raises InputError unless the weights are whole blocks."""
    for field in ("n", "k"):
        if (size := getattr(layer, field)) % BLOCK:
            problem = f"{size} is no multiple of {BLOCK}, the elements that have a scale in common"
            raise InputError(field, problem, f"pad the weights to {-(-size // BLOCK) * BLOCK}")


#: Element types of products with scales.
_SCALED_DTYPES = {"SX": "float32", "SW": "float32", "Y": SIXTEEN_BITS}


#: Precisions whose scales do not change along the depth: type of the operands, and where the scales of both stand.
_SCALED = {
    "fp8-rowwise": ("float8_e4m3fn", "m", "n"),
    "fp8-tensorwise": ("float8_e4m3fn", "0", "0"),
    "int8-rowwise": ("int8", "m", "n"),
}


def _scaled_products(layer: ScaledMatmul, name: str) -> TensorExpr:
    """The product of a layer with a scale for every row of both operands, or one for each of them."""
    dtype, row, column = _SCALED[layer.precision]
    return parse_program(
        f"C[m,n] = sum(k, X[m,k] * W[n,k]); Y[m,n] = C[m,n] * SX[{row}] * SW[{column}]",
        {"m": layer.m, "n": layer.n, "k": layer.k},
        _SCALED_DTYPES,
        name=name,
        default_dtype=dtype,
    )


def _products_of_blocks(layer: ScaledMatmul, name: str) -> TensorExpr:
    """The product of a layer whose activations have a scale for every row and block of the depth, its weights one for
    every block of both; scales of activations lie row by row within a block, as DeepGEMM has them."""
    columns, depth = layer.n // BLOCK, layer.k // BLOCK
    return parse_program(
        "Y[m,c,n] = sum((b, k), X[m,b,k] * W[c,n,b,k] * SX[b,m] * SW[c,b])",
        {"m": layer.m, "c": columns, "n": BLOCK, "b": depth, "k": BLOCK},
        _SCALED_DTYPES,
        name=name,
        default_dtype="float8_e4m3fn",
        external_shapes={"X": [layer.m, layer.k], "W": [layer.n, layer.k], "Y": [layer.m, layer.n]},
    )


def _grouped_blocks(layer: GroupedMatmul, name: str) -> TensorExpr:
    """Products as those of :func:`_products_of_blocks` of tiles of rows that have a group each."""
    tiles, groups, columns, depth = layer.tiles, layer.group_count, layer.n // BLOCK, layer.k // BLOCK
    return parse_program(
        "Y[t,r,c,n] = sum((b, k), X[t,r,b,k] * W[G[t],c,n,b,k] * SX[b,t,r] * SW[G[t],c,b])",
        {"t": tiles, "r": layer.tile, "c": columns, "n": BLOCK, "b": depth, "k": BLOCK},
        {**_SCALED_DTYPES, "G": "int32"},
        name=name,
        shapes={"W": [groups, columns, BLOCK, depth, BLOCK], "SW": [groups, columns, depth]},
        default_dtype="float8_e4m3fn",
        external_shapes={
            "X": [tiles, layer.tile, layer.k], "W": [groups, layer.n, layer.k], "Y": [tiles, layer.tile, layer.n],
        },
    )  # fmt: skip


def typed_stem(stem: str, operator: Operator | Expr) -> str:
    """A derived name with the types of the operator that are not the usual ones."""
    return stem + ("" if operator.dtype == "float32" else f"_{operator.dtype}") + "_tf32" * operator.allow_tf32


def _check_tf32(expr: TensorExpr) -> None:
    """Raise unless ``allow_tf32`` means something."""
    if expr.accumulate != "float32" or all(tensor.dtype != "float32" for tensor in expr.inputs):
        raise InputError("allow_tf32", "is about products of float32 tensors, and there are none", "remove it")


def _from_expr(data: dict[str, Any]) -> TensorExpr:
    if isinstance(data["expr"], str):
        parse_tree(data["expr"])  # first, so that text which is no program is called that
    _check_maps(data)
    operator = _convert(data, Expr)
    _check_operator_name(operator.name)
    pads = {tensor: float(value) for tensor, value in operator.pad.items()}
    tree = parse_tree(operator.expr)
    last = tree.children[-1]
    output, left = str(last.children[0]), last.children[1]  # type: ignore[union-attr]
    axes = tuple(str(index.children[0]) for index in left.children)  # type: ignore[union-attr]
    stem = f"expr_{output}_" + by([operator.sizes.get(axis, 0) for axis in axes])
    program = with_epilogue(
        Program(text=operator.expr, sizes=operator.sizes, output=output, axes=axes, stem=stem), operator.epilogue
    )
    stem = typed_stem(program.stem, operator)
    dtypes = dict(operator.dtypes)
    if program.output != output and output in dtypes:
        dtypes.setdefault(program.output, dtypes[output])
    expr = parse_program(
        program.text,
        operator.sizes,
        dtypes,
        accumulate=operator.accumulate,
        name=operator.name or _short(stem),
        shapes=operator.shapes,
        pads=pads,
        default_dtype=operator.dtype,
    )
    if operator.allow_tf32:
        _check_tf32(expr)
    return recognised(replace(expr, allow_tf32=operator.allow_tf32))


def _check_maps(data: dict[str, Any]) -> None:
    """Checks of ``sizes``, ``dtypes`` and ``shapes`` that name the key, which msgspec's messages do not."""
    for key in ("sizes", "dtypes", "shapes", "pad"):
        if not isinstance(data.get(key, {}), dict):
            raise InputError(key, f"expected an object, got {_json_type(data[key])}")
    check_sizes(data.get("sizes", {}))
    for tensor, dtype in data.get("dtypes", {}).items():
        check_dtype(dtype, f"dtypes.{tensor}")
    for tensor, shape in data.get("shapes", {}).items():
        if not isinstance(shape, list):
            raise InputError(f"shapes.{tensor}", f"expected a list of extents, got {_json_type(shape)}")
        check_shape(tensor, shape)
    for tensor, pad in data.get("pad", {}).items():
        if isinstance(pad, bool) or not (isinstance(pad, int | float) or pad in ("inf", "-inf")):
            raise InputError(f"pad.{tensor}", f"expected a number, got {shown(pad)}", 'write a number, "inf" or "-inf"')


def _convert(data: dict[str, Any], cls: type[_T]) -> _T:
    """``data`` as an instance of ``cls``; every complaint becomes an InputError with the key's path."""
    keys = [*cls.__struct_fields__, *(["op"] if cls is not Expr else [])]
    for key in data:
        if key not in keys:
            close = difflib.get_close_matches(key, keys, 1)
            remedy = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(keys)}"
            raise InputError("", f"unknown key {key!r}", remedy)
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        raise _validation_error(str(error), data, cls) from None
    except RecursionError:
        raise InputError("", "nested too deep") from None


def _validation_error(message: str, data: dict[str, Any], cls: type[Struct]) -> InputError:
    problem, _, path = message.partition(" - at `$")
    where = path.rstrip("`").lstrip(".")
    problem = problem.replace("`", "")
    missing = re.fullmatch(r"Object missing required field (\w+)", problem)
    if missing:
        key = missing[1]
        return InputError(f"{where}.{key}" if where else key, "is missing", f'add "{key}"')
    key = re.split(r"[.\[]", where)[0]
    if problem.startswith("Invalid "):
        options = _literals(typing.get_type_hints(cls).get(key)) or []
        given = re.search(r"'.*'|-?\d+$", problem)
        if key == "epilogue":
            steps = {tag_of(step): step for step in (BiasAdd, ResidualAdd, Scale)}
            word = given[0].strip("'") if given else ""
            if word in steps:
                fields = "".join(f', "{field}": ...' for field in steps[word].__struct_fields__)
                return InputError(where, f"{word!r} is no word by itself", f'write {{"function": "{word}"{fields}}}')
            if word in options and where.endswith(".function"):
                return InputError(where.removesuffix(".function"), f"{word!r} has no keys", f'write "{word}" by itself')
            options += steps
        if key == "padding":
            options += ["a number", "[top, left, bottom, right]"]
        unknown = f"unknown {key} {given[0] if given else ''}".strip()
        return InputError(where, unknown, f"use one of {', '.join(options)}" if options else "")
    return InputError(where, problem[:1].lower() + problem[1:])


def _literals(annotation: Any) -> list[str]:
    """The words that an annotation's Literals allow, wherever they are nested in it."""
    if typing.get_origin(annotation) is Literal:
        return [str(word) for word in typing.get_args(annotation)]
    return [word for part in typing.get_args(annotation) for word in _literals(part)]


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _check_operator_name(name: str | None) -> None:
    if name is None:
        return
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name) or len(name) > MAX_NAME_LENGTH:
        raise InputError(
            "name", f"{name!r} cannot name a folder",
            f"use 1 to {MAX_NAME_LENGTH} of A-Z a-z 0-9 . _ -, not starting with a dot",
        )  # fmt: skip


def _short(stem: str) -> str:
    """A derived name cut to the allowed length, kept distinct by a hash of the whole."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", stem)
    limit = MAX_NAME_LENGTH - 4  # room for the number of a duplicate
    if len(stem) <= limit:
        return stem
    return f"{stem[: limit - 9]}_{hashlib.sha256(stem.encode()).hexdigest()[:8]}"


# Files


def load_operators(path: str | Path) -> list[TensorExpr]:
    """The operators of a JSON file: one object, or a list of them.

    Raises:
        InputError: the file cannot be read, or something in it cannot be used (``ops.json[3].stride``).
    """
    source = str(path)
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InputError(source, f"cannot be read: {error.strerror or error}", "") from None
    except ValueError as error:
        raise InputError(source, f"cannot be read: {error}", "") from None
    return operators_from_json(text, source)


def operators_from_json(text: bytes, source_name: str) -> list[TensorExpr]:
    """JSON text -> expressions with distinct names; ``source_name`` starts the field of every error.

    Raises:
        InputError: broken or too large JSON, or an operator that cannot be used.
    """
    data = _decode(text, source_name)
    if isinstance(data, list):
        if not data:
            raise InputError(source_name, "an empty list", "write at least one operator")
        items = [(f"{source_name}[{position}]", item) for position, item in enumerate(data)]
    else:
        items = [(source_name, data)]
    expressions: list[TensorExpr] = []
    given: dict[str, str] = {}
    for where, item in items:
        try:
            expression = operator_from_data(item)
        except InputError as error:
            raise error.within(where) from error.__cause__
        except RecursionError:
            raise InputError(where, "brackets nested too deep") from None
        if isinstance(item, dict) and item.get("name") is not None:
            if expression.name in given:
                raise InputError(
                    f"{where}.name",
                    f"{expression.name!r} is already used by {given[expression.name]}",
                    "rename one of them",
                )
            given[expression.name] = where
        expressions.append(expression)
    taken = set(given)
    for position, ((_, item), expression) in enumerate(zip(items, expressions, strict=True)):
        if item.get("name") is None:
            expressions[position] = replace(expression, name=taken_name(expression.name, taken))
    return expressions


def _decode(text: bytes, source_name: str) -> object:
    if len(text) > MAX_FILE_BYTES:
        raise InputError(source_name, f"larger than {MAX_FILE_BYTES // 2**20} MiB", "split the list into several files")
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise InputError(
            source_name, "brackets nested too deep", "an operator is an object, a suite a list of them"
        ) from None
    except UnicodeDecodeError as error:
        raise InputError(source_name, f"not UTF-8 text: {error.reason}", "save the file as UTF-8") from None
    except msgspec.DecodeError as error:
        message = str(error).removeprefix("JSON is malformed: ")
        place = re.search(r" \(byte (\d+)\)$", message)
        if not place and "truncated" not in message:
            raise InputError(source_name, f"broken JSON: {message.split(' - at ')[0].lower()}") from None
        position = int(place[1]) if place else len(text)
        line = text.count(b"\n", 0, position) + 1
        column = position - (text.rfind(b"\n", 0, position) + 1) + 1
        problem = message[: place.start()] if place else "it ends too early"
        raise InputError(source_name, f"broken JSON at line {line}, column {column}: {problem}") from None


#: A size as a JSON Schema: a number, and what may stand in its place.
_SIZE = {"type": "integer", "minimum": 1, "maximum": MAX_AXIS_SIZE}
_LAUNCH_SIZE = {
    "title": "Size that is known at launch",
    "type": "object",
    "properties": {MOST_KEY: _SIZE, MULTIPLE_KEY: {**_SIZE, "default": 1}},
    "required": [MOST_KEY],
    "additionalProperties": False,
}


def _allow_launch_sizes(components: dict[str, Any]) -> None:
    """Sizes of named operators, those of axes and extents of shapes may be known at launch."""
    either = {"anyOf": [_SIZE, {"$ref": "#/$defs/LaunchSize"}]}
    for operator in NAMED_OPERATORS.values():
        properties = components[operator.__name__]["properties"]
        properties.update({key: either for key, value in properties.items() if value == _SIZE})
        if properties.get("shape", {}).get("items") == _SIZE:
            properties["shape"] = {**properties["shape"], "items": either}
    components[Expr.__name__]["properties"]["sizes"]["additionalProperties"] = either
    components["LaunchSize"] = _LAUNCH_SIZE


def operator_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of an operator file."""
    hook: Callable[[type], dict[str, Any]] | None = None
    schemas, components = msgspec.json.schema_components(
        [*NAMED_OPERATORS.values(), GroupedMatmul, ScaledMatmul, Expr], schema_hook=hook,
        ref_template="#/$defs/{name}",
    )  # fmt: skip
    for layer, word in ((GroupedMatmul, "grouped_matmul"), (ScaledMatmul, "scaled_matmul")):
        components[layer.__name__]["properties"]["op"] = {"enum": [word]}
    components["Operator"] = {"anyOf": list(schemas)}
    _allow_launch_sizes(components)
    item = {"$ref": "#/$defs/Operator"}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Operators",
        "anyOf": [item, {"type": "array", "items": item, "minItems": 1}],
        "$defs": components,
    }
