"""Runs examples one after the other, each in a fork of this process, which has imported what most of them need.

python tests/examples/forking.py: a line of JSON on stdin, `{"file", "arguments", "folder"}`, gives one on stdout,
`{"code", "out", "err"}`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests.kit`

import torch._dynamo  # noqa: F401  what an optimizer imports at its first step
import transformers  # noqa: F401
from transformers import LlamaForCausalLM, Trainer  # noqa: F401

from tests.kit.ranks.forks import make_forks_cheap


def be_example(file: str, arguments: list[str], folder: str, out: int, err: int) -> None:
    """Become an example as `python FILE ARGUMENTS` in a folder would be one; the process ends with it."""
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(folder)
    sys.argv, sys.path[0] = [file, *arguments], str(Path(file).parent)
    code = 0
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            sys.stderr.write(error.code)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Serve until stdin ends."""
    make_forks_cheap()
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                be_example(asked["file"], asked["arguments"], asked["folder"], out.fileno(), err.fileno())
            _, status = os.waitpid(child, 0)
            out.seek(0)
            err.seek(0)
            told = {"code": os.waitstatus_to_exitcode(status), "out": out.read(), "err": err.read()}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
