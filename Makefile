# make demo | test | test-thorough | test-fast | gate | compat | lowest | families | lint | docs | scale | format | bench | peers | clean
#
# The first target that runs creates .venv and installs everything, in about a minute.

PYTHON ?= python3
# torch is installed first and by itself, so that no other package chooses its build. Without a GPU that is the CPU
# build, which saves several GB of CUDA libraries. If PyTorch's own index cannot be reached, the default index is used.
TORCH ?= torch==2.13.0
# Triton, for its compiler and interpreter; with other packages that have to fit to it.
TRITON ?= triton
# For the tests of its engine. It installs without building anything; it is not needed otherwise.
DEEPSPEED ?= deepspeed==0.19.8
# For the tests of its models.
DIFFUSERS ?= diffusers==0.42.1
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
TEST_DEADLINE_S ?= 3000
PYTEST_ARGS ?=
BENCH_ARGS ?=

BIN := .venv/bin
# uv installs the same packages in a quarter of pip's time. It does not read pip's settings, such as a private index:
# if it fails, pip tries.
INSTALL := install() { $(BIN)/uv pip install --quiet --python $(BIN)/python "$$@" || \
  $(BIN)/python -m pip install --quiet "$$@"; }; install
READY := .venv/.ready
IN_THREE := --numprocesses 3 --dist loadfile --no-loadscope-reorder
# Many processes import the tests: with bytecode, only the first one compiles them.
PYTEST = PYTHONDONTWRITEBYTECODE= timeout --kill-after=10 $(TEST_DEADLINE_S) $(BIN)/python -m pytest

.PHONY: demo test test-thorough test-fast gate compat lowest families lint docs scale format bench peers clean

# Train a small model on one process and under every strategy on four, and compare the losses.
demo: $(READY)
	$(BIN)/seqpar demo

# In three processes (pytest-xdist), also on two cores: ranks wait for one another much of the time. Files in
# conftest.py's order. About six minutes on two cores.
test: $(READY)
	$(PYTEST) $(IN_THREE) -m "not thorough" $(PYTEST_ARGS)

# Further sizes, models and engines of the same tests: the cases that are marked thorough. About as long again.
test-thorough: $(READY)
	$(PYTEST) $(IN_THREE) -m thorough $(PYTEST_ARGS)

# The tests to run while writing code: everything that is not marked slow, and nothing that imports transformers.
test-fast: $(READY)
	$(PYTEST) $(IN_THREE) -m "not slow and not thorough" --ignore=tests/hf --ignore=tests/docs/test_examples.py $(PYTEST_ARGS)

# Compile every configuration of the Triton kernels for seven GPU architectures, and check registers, memory and matrix
# instructions. Needs no GPU; takes about 16 minutes of one core. `make test` compiles a few of them.
gate: $(READY)
	$(BIN)/python tools/gate.py --what all

# All Hugging Face tests with the oldest and the newest versions of transformers, accelerate, peft and TRL, each in
# an environment of its own. Writes the table in docs/hf-refused.md.
compat: $(READY)
	TORCH="$(TORCH)" CPU_INDEX="$(CPU_INDEX)" $(BIN)/python tests/hf/compat.py

# The commands with the lowest versions that pyproject.toml allows, except of torch.
lowest: $(READY)
	$(PYTHON) -m venv .compat/lowest
	.compat/lowest/bin/python -m pip install --quiet "$(TORCH)"
	$(BIN)/uv pip install --quiet --python .compat/lowest/bin/python --resolution lowest-direct "$(TORCH)" --editable ".[cli]"
	.compat/lowest/bin/seqpar plan --help > /dev/null
	.compat/lowest/bin/seqpar plan --model llama3-8b --seq-len 128k --gpus 8 --charts .compat/lowest/charts.png
	.compat/lowest/bin/seqpar doctor --no-measure --nproc 2

# Compare a tiny random model of every causal, masked and image-text class of the installed transformers with one
# process, on two ranks. Writes the table in docs/families.md. Takes about five minutes. ONLY=llama,gemma3 prints the rows
# of some models and writes nothing. Without ONLY, also compares diffusers' models and writes docs/diffusers.md.
families: $(READY)
	$(BIN)/python -m tests.hf.families $(if $(ONLY),--only $(ONLY))
	$(if $(ONLY),,$(BIN)/python -m tests.diffusers.table)

# Style, formatting and types.
lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation site, in site/. Any warning is an error (not with --quiet). `mkdocs serve` shows pages while you edit them.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The section on scale in docs/planning.md and its charts, from the planner. Takes a few minutes.
scale: $(READY)
	$(BIN)/python docs/scale.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Time kernels, masks, plans, collectives and the host, and compare with this machine's stored run. `seqpar bench`
# compares the strategies with each other and with other packages.
bench: $(READY)
	mkdir -p output
	$(BIN)/python -m pytest benchmarks/micro --quiet --benchmark-quiet --benchmark-max-time=0.3 \
	  --benchmark-json=output/micro.json $(BENCH_ARGS)

# The other packages of `seqpar bench` that install everywhere. DeepSpeed builds from source and needs torch for it.
peers: $(READY)
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-build-isolation -r benchmarks/peers/requirements.txt

$(READY): export DS_BUILD_OPS = 0
$(READY): pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	nvidia-smi -L >/dev/null 2>&1 || \
	  $(BIN)/python -m pip install --quiet --retries 0 --timeout 15 --no-compile --index-url $(CPU_INDEX) "$(TORCH)" || true
	$(BIN)/python -m pip install --quiet "$(TORCH)" uv
	$(INSTALL) --editable ".[dev,docs]" $(foreach package,$(TRITON),"$(package)")
# If it fails, the tests of DeepSpeed's engine are skipped.
	$(INSTALL) hjson msgpack ninja psutil py-cpuinfo pydantic || true
	$(INSTALL) --no-build-isolation --no-deps "$(DEEPSPEED)" || true
# What it needs is installed already. If it fails, the tests of its models are skipped.
	$(INSTALL) --no-deps "$(DIFFUSERS)" || true
	@touch $@

clean:
	rm -rf .venv .compat build dist site *.egg-info
