"""`python -m shardckpt_cli`, for launchers such as torchrun."""

import os
import sys

try:
    if sys.path[0] in {"", os.getcwd()}:
        del sys.path[0]  # the working directory may be a checkpoint: import nothing from there
except OSError:
    pass  # it was removed

from shardckpt_cli.start import main

main()
