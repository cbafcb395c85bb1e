# `make demo` and `make test` need only Python and pip. They create the virtual environment once.
PYTHON ?= python3
VENV ?= .venv
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable
BIN := $(VENV)/bin
PYTEST_ARGS ?=

# Tests start the command a hundred times, and each start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full test-repeat test-slow test-gpu matrix check format clean

# It needs torch and transformers; where the rest is installed, that has both.
demo: $(or $(wildcard $(STAMP)),$(DEMO_STAMP))
	$(BIN)/python examples/demo.py

# Each worker takes a part of the files in order, then tests that others have not begun: all end together. Four of them
# keep two cores busy, because tests wait for a part of their time: for ranks that are gone, slow stores, disks.
WORKERS ?= 4
test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not full and not slow and not gpu" $(PYTEST_ARGS)

# The same and the tests marked `full`, as `.ci/run` does: combinations of settings of which `make test` has each pair, examples,
# and tests that others show faster (tests/covering.py).
test-full: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(PYTEST_ARGS)

# Run the full suite N times without retries, even if tests fail. BUSY=1 runs a busy loop on every core.
N ?= 10
BUSY ?= 0
test-repeat: $(STAMP)
	$(BIN)/python tests/repeat.py --runs $(N) $(if $(filter-out 0,$(BUSY)),--busy) -- -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(PYTEST_ARGS)

# Tests of all peers of all benchmarks, and of all combinations of engine settings (`make test-full` covers all triples of them).
# Run it after changes of a benchmark, of the measured code, or of the engine.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

# Tests and benchmarks of one GPU, minutes; without a GPU they say so and pass. GPU_ARGS="--record" writes the figures into
# benchmarks/RESULTS.md.
GPU_ARGS ?=
test-gpu: $(STAMP)
	$(BIN)/python -m pytest -n 0 -m gpu tests/gpu/test_gpu.py $(PYTEST_ARGS) || [ $$? = 5 ]
	$(BIN)/python benchmarks/gpu.py $(GPU_ARGS)

# The suite with several versions of torch and of Python, each in an environment of several gigabytes below build/matrix: hours.
# Writes rows of the table in docs/compatibility.md. For one pair: make matrix PAIRS=3.11:2.6.0
PAIRS ?=
matrix: $(STAMP)
	$(BIN)/python tests/versions/matrix.py $(addprefix --pair ,$(PAIRS)) -- -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

# mkdocs counts the warnings that it prints: with --quiet, --strict lets all pass.
check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir build/site
	$(BIN)/python .githooks/commit-msg

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

# Anew whenever what is to be installed changes; the stamp is written last, so that a broken install is not taken for a whole one.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[test,docs]'
	touch $(STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[torch]' transformers
	touch $(DEMO_STAMP)
