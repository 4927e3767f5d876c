# `make demo` and `make test` need nothing but Python 3.11 or newer: they make their own virtual environment in .venv.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,seqio,metrics
BIN = $(VENV)/bin
CORE = $(VENV)/.core-installed
TESTS = $(VENV)/.$(EXTRAS)-installed

.PHONY: demo test test-slow test-t5x tpu-report lint types format clean

demo: $(CORE)
	$(BIN)/specdec demo

test: $(TESTS)
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(TESTS)
	XLA_FLAGS= $(BIN)/python -m pytest -m slow

test-t5x: # with VENV=, an environment that has t5x, which is not on PyPI: see scripts/t5x/setup_tpu_vm.sh
	$(BIN)/python -c 'import t5x'
	$(BIN)/python -m pytest -m t5x -p no:hypothesispytest  # which imports at the end, where TensorFlow can make that fail

tpu-report: # the paper's setting on a TPU v4, by its compiler's estimate, into results/
	$(MAKE) EXTRAS=dev,tpu $(VENV)/.dev,tpu-installed
	$(BIN)/specdec tpu --table2 --largest --output results/tpu_xxl

lint: $(TESTS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TESTS)
	$(BIN)/pyright

format: $(TESTS)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "error: $(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(CORE): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(TESTS): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	touch $@
