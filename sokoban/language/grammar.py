"""Text of the tensor-expression language -> syntax tree: the grammar, its limits, its syntax errors."""

from __future__ import annotations

from functools import cache

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from hal.support.errors import InputError

Node = Tree[Token] | Token

#: Longest program in bytes, deepest nesting of brackets and operators, and most statements.
MAX_TEXT_BYTES = 64 * 1024
MAX_NESTING = 100
MAX_STATEMENTS = 256

GRAMMAR = r"""
// The tensor-expression language. Statements are separated by ";" or a line break outside brackets.
start: _SEPARATOR* statement (_SEPARATOR+ statement)* _SEPARATOR*

statement: NAME "[" arguments "]" "=" disjunction

?disjunction: conjunction
            | disjunction "or" conjunction -> or_
?conjunction: negation
            | conjunction "and" negation -> and_
?negation: comparison
         | "not" negation -> not_
?comparison: additive
           | additive COMPARISON additive -> compare
?additive: product
         | additive "+" product -> add
         | additive "-" product -> sub
?product: unary
        | product "*" unary -> mul
        | product "/" unary -> div
?unary: power
      | "-" unary -> neg
      | "+" unary -> pos
?power: atom
      | atom "**" unary -> pow
?atom: NUMBER -> number
     | NAME -> name
     | NAME "[" arguments pad? "]" -> load
     | NAME "(" _argument ("," _argument)* ")" -> call
     | "(" disjunction ")"

_argument: disjunction | axis_list
axis_list: "[" NAME ("," NAME)* "]"
         | "(" NAME ("," NAME)+ ")"
arguments: disjunction ("," disjunction)*
pad: "|" "pad" "=" SIGN? (NUMBER | INF)

COMPARISON: "<=" | ">=" | "==" | "!=" | "<" | ">"
INF: "inf"
SIGN: "+" | "-"
NUMBER: /([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?/
NAME: /[A-Za-z_][A-Za-z0-9_]*/
_SEPARATOR: /[;\n]/
%ignore /[ \t\r]+/
"""

_TERMINAL_TEXT = {
    "LSQB": "'['", "RSQB": "']'", "LPAR": "'('", "RPAR": "')'", "COMMA": "','", "EQUAL": "'='",
    "NUMBER": "a number", "NAME": "a name", "PAD": "'pad'", "INF": "'inf'", "SIGN": "a sign", "VBAR": "'|'",
}  # fmt: skip


def parse_tree(text: str) -> Tree[Token]:
    """The syntax tree of a program.

    Raises:
        InputError: not a program of the language, longer than :data:`MAX_TEXT_BYTES`, or nested too deep.
    """
    if len(text) > MAX_TEXT_BYTES or len(text.encode("utf-8", "replace")) > MAX_TEXT_BYTES:
        raise InputError(
            "expr", f"{len(text)} characters; at most {MAX_TEXT_BYTES} bytes are read", "split the program"
        )
    if not text.strip("; \t\r\n"):
        raise InputError("expr", "is empty", "write a statement such as C[i,j] = sum(k, A[i,k] * B[k,j])")
    try:
        tree = _parser().parse(_join_bracketed_lines(text))
    except UnexpectedInput as error:
        raise _syntax_error(text, error) from None
    _check_depth(tree)
    if len(tree.children) > MAX_STATEMENTS:
        raise InputError("expr", f"{len(tree.children)} statements; at most {MAX_STATEMENTS} are read", "split it")
    return tree


@cache
def _parser() -> Lark:
    return Lark(GRAMMAR, parser="lalr", maybe_placeholders=False)


def _join_bracketed_lines(text: str) -> str:
    """Line breaks inside brackets become spaces, so that columns stay; too many open brackets are refused."""
    characters = list(text)
    depth = 0
    for position, character in enumerate(characters):
        if character in "([":
            depth += 1
            if depth > MAX_NESTING:
                raise _too_deep()
        elif character in ")]":
            depth = max(depth - 1, 0)
        elif character == "\n" and depth:
            characters[position] = " "
    return "".join(characters)


def _check_depth(tree: Tree[Token]) -> None:
    """Refuses trees that recursive functions could not walk (long operator chains nest as deep as brackets)."""
    pending: list[tuple[Tree[Token], int]] = [(tree, -2)]  # the program and its statements are no nesting
    while pending:
        node, depth = pending.pop()
        if depth > MAX_NESTING:
            raise _too_deep()
        pending.extend((child, depth + 1) for child in node.children if isinstance(child, Tree))


def _too_deep() -> InputError:
    return InputError("expr", f"nested deeper than {MAX_NESTING} levels", "split it into several statements")


def _syntax_error(text: str, error: UnexpectedInput) -> InputError:
    expected: set[str] = set()
    unexpected = "end of text"
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        if error.token.type != "$END":
            unexpected = _quote(str(error.token))
    elif isinstance(error, UnexpectedCharacters):
        unexpected = _quote(error.char)
    is_at_end = unexpected == "end of text"
    position = len(text) if is_at_end else min(getattr(error, "pos_in_stream", None) or 0, len(text))
    line_start = text.rfind("\n", 0, position) + 1
    line = text.count("\n", 0, position) + 1
    place = (
        f"column {position - line_start + 1}"
        if "\n" not in text
        else f"line {line}, column {position - line_start + 1}"
    )
    names = sorted(_TERMINAL_TEXT.get(terminal, "") for terminal in expected)
    remedy = f"expected {' or '.join(names)}" if 0 < len(names) <= 3 and all(names) else ""
    return InputError("expr", f"syntax error at {place}: unexpected {unexpected}", remedy)


def _quote(text: str) -> str:
    return "a line break" if text == "\n" else f"'{text[:30]}'"


def source_text(node: Node) -> str:
    """The text of a subtree, with brackets wherever a part is compound."""
    if isinstance(node, Token):
        return str(node)
    parts = [source_text(child) for child in node.children]
    sign = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**", "neg": "-", "pos": "+"}.get(str(node.data))
    if sign and len(parts) == 1:
        return f"{sign}{parts[0]}"
    if sign:
        compound = [isinstance(child, Tree) and len(child.children) > 1 for child in node.children]
        if node.data not in ("add", "sub"):
            parts = [f"({part})" if wide else part for part, wide in zip(parts, compound, strict=True)]
        return sign.join(parts)
    if node.data == "compare":
        return "".join(parts)
    if node.data in ("and_", "or_", "not_"):
        word = str(node.data).rstrip("_")
        return f" {word} ".join(parts) if len(parts) == 2 else f"{word} {parts[0]}"
    if node.data == "load":
        return f"{parts[0]}[{parts[1]}]"
    return f"{parts[0]}({','.join(parts[1:])})" if node.data == "call" else ",".join(parts)
