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
