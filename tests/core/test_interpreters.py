"""A script in a fork of an interpreter that has imported torch ends as in a process of its own."""

from __future__ import annotations

import subprocess
import sys

from tests.kit.ranks.interpreters import RunScript

SCRIPT = """
import atexit, sys, threading, time
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.1), print("of a thread"))).start()
print(sys.argv[1:])
sys.exit(3)
"""


def test_it_ends_as_one_of_its_own(run_script: RunScript) -> None:
    alone = subprocess.run([sys.executable, "-c", SCRIPT, "a b"], capture_output=True, text=True, check=False)
    found = run_script(SCRIPT, "a b")
    assert (found.returncode, found.stdout, found.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_an_error_is_told_with_its_trace_and_the_next_script_runs(run_script: RunScript) -> None:
    found = run_script("def fail():\n    raise KeyError('in it')\nfail()")
    assert (found.returncode, found.stderr.splitlines()[-1]) == (1, "KeyError: 'in it'")
    assert run_script("print(1)").stdout == "1\n"
