# `make demo` and `make test` start from nothing but Python and pip; the virtual environment is made once.
PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# Tests start the command a hundred times: each would compile the whole package anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-repeat test-slow check format clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

# Each worker takes a part of the files in order, then tests that others have not begun: all end together. Three of them
# keep two cores busy, for a fifth of the time tests wait: for ranks that are gone, stores that do not answer, disks.
WORKERS ?= 3
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

# The whole suite N times, whatever fails, without retries; BUSY=1 keeps every core busy with a loop beside it.
N ?= 10
BUSY ?= 0
test-repeat: $(STAMP)
	$(BIN)/python tests/repeat.py --runs $(N) $(if $(filter-out 0,$(BUSY)),--busy) -- -n $(WORKERS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

# What starts every peer of every benchmark, and the full product of what the engine may be told, of which `make test`
# brings every three settings together: run it when a benchmark, what it measures, or the engine changed.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mkdocs build --quiet --strict --site-dir build/site
	$(BIN)/python .githooks/commit-msg

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

# Anew whenever what is to be installed changes; the stamp is written last, so that a broken install is not taken for a whole one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[test,docs]'
	touch $(STAMP)
