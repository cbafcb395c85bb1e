#!/bin/sh
# Check the engine, states and saves on one GPU: any Python with torch, pytest and the base dependencies will do; nothing is
# installed. `tests/gpu/run.sh --device cpu` proves the script where there is no GPU. Options: `run.sh --help`.
cd "$(dirname "$0")/../.." || exit 1
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 exec "${PYTHON:-python3}" tests/gpu/run.py "$@"
