# make demo | test | lint | bench. The first of them sets up .venv, about two minutes with a warm pip cache.

PYTHON ?= python3
# torch goes in first, by itself, so that nothing else chooses its build. Without a GPU on Linux,
#   make TORCH_INDEX=https://download.pytorch.org/whl/cpu
# takes the CPU build and spares several GB of CUDA libraries.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
TEST_DEADLINE_S ?= 1500

BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo test lint format bench clean

demo: $(READY)
	$(BIN)/seqpar demo

test: $(READY)
	timeout --kill-after=10 $(TEST_DEADLINE_S) $(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)
	$(BIN)/python benchmarks/strategies.py

$(READY): pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info
