# make demo | test | lint | bench. The first of them sets up .venv, about two minutes with a warm pip cache.

PYTHON ?= python3
# torch goes in first, by itself, so that nothing else chooses its build: without a GPU the CPU build, which spares
# several GB of CUDA libraries; from the usual index where PyTorch's own cannot be reached.
TORCH ?= torch==2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
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
	nvidia-smi -L >/dev/null 2>&1 || \
	  $(BIN)/python -m pip install --quiet --retries 0 --timeout 15 --index-url $(CPU_INDEX) "$(TORCH)" || true
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info
