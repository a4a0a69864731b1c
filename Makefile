# Everything runs in .venv, which each target makes and fills by itself.
#   make serve          the server on the bundled model, http://127.0.0.1:8000
#   make test           the CPU test suite (< 8 minutes on 2 cores)
# Variables: PYTHON (>= 3.11), TORCH (requirement), TORCH_INDEX (another index for torch), ARGS,
# JOBS.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
# Test processes; each computes with one thread.
JOBS ?= 2
TORCH_INDEX ?=
# Without a GPU a CPU build of torch is enough; the plain requirement pulls gigabytes of CUDA.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
TORCH ?= $(if $(HAS_GPU),torch>=2.10,torch==2.13.0)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: install install-dev serve test test-fast test-all test-gpu check format bench coverage clean

install: $(VENV)/.runtime
install-dev: $(VENV)/.dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python >= 3.11 is needed; set PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/python
	@echo "Installing torch and the other packages into $(VENV): a minute or two."
	$(PIP) install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(PIP) install --quiet --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.runtime
	$(PIP) install --quiet --editable ".[dev]"
	@touch $@

# Tests of routers are skipped where these have no build for the machine.
$(VENV)/.routers: pyproject.toml $(VENV)/.dev
	-$(PIP) install --quiet --editable ".[routers]"
	@touch $@

serve: install
	$(BIN)/radix-mla serve $(ARGS)

test: install-dev
	$(BIN)/python -m pytest -n $(JOBS) -m "not gpu and not slow and not stress" $(ARGS)

test-fast: install-dev
	$(BIN)/python -m pytest -n $(JOBS) -m "not gpu and not slow and not stress and not e2e" $(ARGS)

test-all: install-dev $(VENV)/.routers
	$(BIN)/python -m pytest -n $(JOBS) -m "not gpu" --timeout 3600 $(ARGS)

test-gpu: install-dev
	$(BIN)/python -m pytest -m gpu $(ARGS)

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install-dev
	@for script in tests/bench/bench_*.py; do $(BIN)/python $$script || exit 1; done

coverage: install-dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(JOBS) -m "not gpu and not slow and not stress" --timeout 900 $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
