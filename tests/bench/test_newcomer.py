"""The README's commands read, and their outputs compared."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench import newcomer

PAGE = """\
```console
$ cd /
$ echo one \\
    two
one two
```

```text
$ not a command
```
"""


def as_it_is(text: str) -> str:
    return text


def test_commands_come_with_what_is_shown_below_them() -> None:
    assert newcomer.commands_of(PAGE) == [
        newcomer.Command("cd /", ""),
        newcomer.Command("echo one \\\n    two", "one two\n"),
    ]


def test_the_readme_is_installed_before_anything_is_shown() -> None:
    commands = newcomer.commands_of((newcomer.ROOT / "README.md").read_text("utf-8"))
    shown = [command.text.split()[0] for command in commands if command.shown]
    assert shown == ["roller", "daydream", "daydream"]
    assert [command.shown for command in commands[:2]] == ["", ""]
    assert commands[1].text == "pip install ."


@pytest.mark.parametrize(
    ("shown", "output", "same"),
    [("", "anything", True), ("a\n", "a  \n\n", True), ("a\n", "b\n", False), ("a\n...\n", "a\nb\n", True)],
)
def test_outputs_are_compared_up_to_dots(shown: str, output: str, same: bool) -> None:
    assert newcomer.agrees(shown, output, as_it_is) is same


def test_a_session_is_one_shell_with_an_empty_home() -> None:
    with newcomer.session(Path(sys.executable)) as run:
        assert run("export PLACE=here") == (0, "")
        assert run("echo $PLACE; ls -A ~; test -f README.md") == (0, "here\n")
        assert run("false")[0] == 1


def test_the_first_result_is_what_is_shown_first() -> None:
    results = [
        newcomer.Tried(newcomer.Command(text, shown), seconds, 0, shown, True)
        for text, shown, seconds in (("pip install .", "", 20.0), ("roller", "x\n", 5.0), ("daydream", "y\n", 7.0))
    ]
    assert newcomer.first_result_seconds(results) == 25.0
