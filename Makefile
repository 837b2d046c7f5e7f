# `make demo` and `make test` need nothing but Python 3.11 and make: they set up `.venv` themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build: a looser requirement would bring a CUDA build of several gigabytes. Where a GPU is to be used, install
# your own torch into `.venv` first, and set TORCH to its version.
TORCH ?= torch==2.13.0

# Threads that wait for others do not keep a shared core busy.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/relay/train.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.installed: setup.cfg pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test,lint]"
	touch $@

clean:
	rm -rf $(VENV) .cache outputs
