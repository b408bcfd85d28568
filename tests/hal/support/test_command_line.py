"""Signals that reach a program of ours while Python cannot pass an exception on."""

import signal
import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
    import os, signal, time
    from hal.support.command_line import Program

    # A shell's background jobs ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    program = Program("example")

    class Destroyed:
        def __del__(self):
            os.kill(os.getpid(), {number})
            time.sleep(0)

    @program.command()
    def run():
        value = Destroyed()
        del value
        print("destroyed", flush=True)
        while True:
            time.sleep(60)

    program()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_whose_exception_is_lost_in_a_destructor_ends_the_program(number: signal.Signals, code: int) -> None:
    text = textwrap.dedent(PROGRAM).format(number=int(number))
    result = subprocess.run([sys.executable, "-c", text, "run"], capture_output=True, text=True, timeout=600)
    assert result.returncode == code
    assert result.stdout == "destroyed\n"
    assert result.stderr.strip() == ("example: interrupted" if number == signal.SIGINT else "")


ENDING = """
import atexit, sys
import click
from hal.support.command_line import Program

class Module:
    def __del__(self):
        print("taken apart")

kept = Module()
atexit.register(print, "waited for")
program = Program("program")

@program.command()
@click.argument("code", type=int)
def go(code):
    print("done")
    if code:
        sys.exit(code)

{call}
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_program_ends_after_what_waits_for_its_end_and_takes_nothing_apart(code: int) -> None:
    text = ENDING.format(call=f"sys.argv = ['program', 'go', '{code}']; program()")
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "done\nwaited for\n", "")


def test_a_command_that_another_program_calls_ends_nothing() -> None:
    text = ENDING.format(call="program(['go', '0']); print('going on')")
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert ended.returncode == 0 and ended.stdout.splitlines()[:3] == ["done", "going on", "waited for"]
