# `make demo` and `make test` need only Python and pip. They create the virtual environment once.
PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
BIN := $(VENV)/bin
PYTEST_ARGS ?=
STREAM_VENV ?= build/venv-stream
STREAM_STAMP := $(STREAM_VENV)/.installed
STREAM_PINS := tests/integrations/vllm-requirements.txt

# Tests start the command a hundred times, and each start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-gpu test-stream check format release clean

# It needs torch and transformers; where the rest is installed, that has both.
demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))
	$(BIN)/python examples/demo.py

# Each worker takes a part of the files in order, then tests that others have not started: all end together. Four of them
# keep two cores busy, because tests wait for a part of their time: for ranks that are gone, slow stores, disks.
WORKERS ?= 4
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not full and not slow and not gpu" $(PYTEST_ARGS)

# All that `.ci/run` runs: also combinations of settings of which `make test` has each pair, examples, and tests that others
# show faster (tests/covering.py). tests/README.md has what runs rarely: slow tests, one GPU, other versions of torch.
test-all: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(PYTEST_ARGS)

# One GPU, at most eight minutes, without a virtual environment or a network: PYTHON needs torch and pytest.
test-gpu:
	PYTHON="$(PYTHON)" sh tests/gpu/run.sh

# vLLM on a CPU follows a stream, and TRL and verl publish to one. The environment takes 4 GB, needs Python 3.11 or later,
# and has no server for stores. verl's wheel has a package `tests`, which would hide ours.
test-stream: $(STREAM_STAMP)
	$(STREAM_VENV)/bin/python -m pytest --noconftest $(PYTEST_ARGS) $(addprefix tests/integrations/test_,vllm.py trl.py verl.py)

# mkdocs counts the warnings that it prints: with --quiet, --strict lets all pass.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site
	if [ -e .git ]; then $(BIN)/python .githooks/commit-msg; fi

# The archives and the notes of a release, built from the last commit and checked: CONTRIBUTING.md. DOCS is the address of
# the published documentation, for the links in the README.
release: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[release]'
	$(BIN)/python .ci/release.py --docs "$(DOCS)"

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

# Made again whenever what is to be installed changes; the stamp is written last, so that a broken install is not taken for a complete one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[test,docs]'
	touch $(STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[torch]' transformers
	touch $(DEMO_STAMP)

$(STREAM_STAMP): pyproject.toml $(STREAM_PINS)
	$(PYTHON) -m venv $(STREAM_VENV)
	$(STREAM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement $(STREAM_PINS) --editable .
	rm -rf $(STREAM_VENV)/lib/python*/site-packages/tests
	touch $(STREAM_STAMP)
