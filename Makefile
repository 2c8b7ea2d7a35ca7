# Two commands are all a newcomer needs: make train, make test. Each installs what it needs first.
VENV ?= .venv
PYTHON ?= python3
CONSTRAINTS := constraints.txt

# Another torch or Python has an environment of its own: make test TORCH=2.15.0 PYTHON=python3.13
ifdef TORCH
override VENV := $(VENV)/torch-$(TORCH)-python$(shell $(PYTHON) -c 'import platform; print(platform.python_version())')
CONSTRAINTS := $(VENV)/constraints.txt
$(CONSTRAINTS): constraints.txt | $(VENV)/bin/pip
	sed 's/^torch==.*/torch==$(TORCH)/' $< > $@
endif

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
INSTALLED_BENCH := $(VENV)/.installed-bench
INSTALLED_DOCS := $(VENV)/.installed-docs

.PHONY: help train test thorough bits attack chaos cluster test-gpu test-fp8 check format docs sweep bench bench-link bench-gpu bench-graphs install clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(INSTALLED) ## install, then train a small GPT on real text: 2 ranks, stage 2, under 3 minutes on 2 cores
	$(BIN)/python launch.py launch.nproc_per_node=2

# Each process that a test starts would compile zerotrain anew where nothing compiled may be written.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED_DEV) ## install, then run the tests; TORCH=2.15.0, PYTHON=python3.13 for others, beside the usual environment
	$(BIN)/python -m pytest -n 4 --dist worksteal

bits: $(INSTALLED_DEV) ## one sha256: ranks x stages x precisions x how to train, and each setting that breaks it; under 7 minutes
	$(BIN)/python -m pytest -n 2 --dist worksteal --all-rows tests/bits

thorough: $(INSTALLED_DEV) ## the tests with each row of their products, of which `make test` leaves out some; before a release
	$(BIN)/python -m pytest -n 4 --dist worksteal --all-rows

attack: $(INSTALLED_DEV) ## wrong commands, folders and machines, killed ranks, sweeps cut off; a checkpoint of each placement loads into every other
	$(BIN)/python -m pytest -n 4 --dist worksteal --all-rows tests/attack tests/sweep

KILLS ?= 200
SEED ?= 0
chaos: $(INSTALLED_DEV) ## kill -9 of a rank, the parent or all at each place of a run, 200 times, and restarts; KILLS, SEED; under 12 minutes
	$(BIN)/python -m tests.chaos --kills $(KILLS) --seed $(SEED)
	$(BIN)/python -m tests.chaos.starting --kills 100 --seed $(SEED)

cluster: $(INSTALLED_DEV) ## a real Slurm of three nodes on this machine, and hosts that lose their cable, come and go; needs root, slurm-wlm, iproute2
	$(BIN)/python -m pytest -rs tests/cluster

check: $(INSTALLED_DEV) ## lint, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED_DEV) ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED_DOCS) ## the site of docs/ into site/, each link of it followed; REPOSITORY_URL: where links to the code lead
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --clean

sweep: $(INSTALLED) ## the parity sweep: all stages, two bucket sizes, one rank and two: 16 runs, one sha256
	$(BIN)/python launch.py -m zero.stage=0,1,2,3 zero.bucket_mb=0.25,25 launch.nproc_per_node=1,2 \
	    train.virtual_ranks=2 launch.threads_per_rank=1 train.max_steps=20

bench: $(INSTALLED_BENCH) ## our engine beside DDP, FSDP2 and DeepSpeed: 5 rounds, 16 minutes on 2 cores; ENGINES=zero0,zero2
	$(BIN)/python -m benchmarks --out outputs/bench/loopback $(if $(ENGINES),--engines $(ENGINES)) $(OPTIONS)

bench-link: $(INSTALLED_BENCH) ## the same on two hosts (network namespaces) joined by a link of 1 Gbit/s
	$(BIN)/python -m benchmarks --link 1gbit --out outputs/bench/link

# A machine with a GPU may have neither a network nor a virtual environment: PYTHON is its own, and what it lacks comes
# along as wheels in a folder, which are unpacked onto PYTHONPATH. Our own engine needs these; msgspec is compiled for one
# version of Python, here for 3.12:
#     pip wheel --no-deps -c constraints.txt --wheel-dir FOLDER hydra-core omegaconf antlr4-python3-runtime
#     pip download --no-deps -c constraints.txt --python-version 3.12 --only-binary :all: --dest FOLDER msgspec
WHEELS ?=
CARRIED := $(CURDIR)/build/carried
WITH_WHEELS = $(if $(WHEELS),rm -rf $(CARRIED) && mkdir -p $(CARRIED) && \
    for wheel in $(WHEELS)/*.whl; do $(PYTHON) -m zipfile -e "$$wheel" $(CARRIED) || exit 1; done && \
    export PYTHONPATH=$(CARRIED)$${PYTHONPATH:+:$$PYTHONPATH};)

DEVICE ?= cuda
SIZES ?= gpt2
ENGINES ?=
OUT ?= outputs/bench/gpu
OPTIONS ?=
TIME_LIMIT ?= 440
bench-gpu: ## GPT-2 in bf16 on one GPU: eager, compiled, one rank of 8; SIZES, ENGINES, OUT, DEVICE, TIME_LIMIT, OPTIONS, WHEELS
	$(WITH_WHEELS) code=0; for size in $(SIZES); do \
	    $(PYTHON) -m benchmarks.gpu --size $$size --device $(DEVICE) --out $(OUT) --time-limit $(TIME_LIMIT) \
	        $(if $(ENGINES),--engines $(ENGINES)) $(OPTIONS) || code=$$?; \
	done; exit $$code

GRAPHS := zero0_graph,alone_graph,zero0,fsdp2_graph,ddp_graph,alone_bf16,ddp_bf16,fsdp2
bench-graphs: ## GPT-2 in bf16 on one GPU, compiled, beside peers that replay a CUDA graph: under 8 minutes; as bench-gpu
	$(MAKE) bench-gpu ENGINES=$(or $(ENGINES),$(GRAPHS)) OPTIONS="--part compiled $(OPTIONS)"

test-gpu: ## the tests for a GPU; PYTHON has torch and pytest, WHEELS is a folder with wheels of what else it lacks
	$(WITH_WHEELS) $(PYTHON) -m pytest -m gpu -rs tests/distributed/test_gpu.py tests/unit/device/test_cuda.py

# transformers and peft import torchao where it is installed, and it prints lines of its own: it has a folder of its own.
test-fp8: $(INSTALLED_DEV) $(VENV)/fp8 ## matrices in fp8, emulated on the CPU, beside torchao in plain PyTorch
	PYTHONPATH=$(VENV)/fp8 $(BIN)/python -m pytest tests/unit/engine/model/test_fp8.py

install: $(INSTALLED_DEV) ## install only, into .venv: what training, tests and checks need

# Python compiles what a command imports when it does; pip would compile ten times as much.
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS)
# A path, not setuptools' finder: with that, a script beside a clone called zerotrain would import the clone's folder.
EDITABLE = $(PIP) --config-settings editable_mode=compat -e

# What an interrupted command has left half made has no pip, and is made again.
$(BIN)/pip:
	@PYTHONPATH=. $(PYTHON) -c 'import zerotrain' # says so if the version is too old
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml setup.py $(CONSTRAINTS) | $(BIN)/pip
	$(EDITABLE) .
	@touch $@

# In one go, not after what training needs alone: pip would resolve and build twice.
$(INSTALLED_DEV): pyproject.toml setup.py $(CONSTRAINTS) | $(BIN)/pip
	$(EDITABLE) '.[dev]'
	@touch $(INSTALLED) $@

$(VENV)/fp8: $(CONSTRAINTS) | $(INSTALLED_DEV)
	$(PIP) --no-deps --target $@ torchao
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED_DEV)
	$(EDITABLE) '.[bench]'
	@touch $@

$(INSTALLED_DOCS): $(INSTALLED_DEV)
	$(EDITABLE) '.[docs]'
	@touch $@

clean: ## remove the environment, builds and caches (not the runs' outputs)
	rm -rf $(VENV) build site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
