# Two commands are all a newcomer needs: make train, make test. Each installs what it needs first.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INSTALLED_BENCH := $(VENV)/.installed-bench

.PHONY: help train test check format sweep bench bench-link bench-gpu install clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(INSTALLED) ## install, then train a small GPT on real text: 2 ranks, stage 2, under 3 minutes on 2 cores
	$(BIN)/python launch.py launch.nproc_per_node=2

test: $(INSTALLED) ## install, then run the tests
	$(BIN)/python -m pytest -n 2

check: $(INSTALLED) ## lint, types and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(INSTALLED) ## put the code into the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

sweep: $(INSTALLED) ## the parity sweep: all stages, two bucket sizes, overlap on and off: 16 runs, one sha256
	$(BIN)/python launch.py -m zero.stage=0,1,2,3 zero.bucket_mb=0.25,25 zero.overlap=true,false \
	    launch.nproc_per_node=2 train.max_steps=20

bench: $(INSTALLED_BENCH) ## our engine beside DDP, FSDP2 and DeepSpeed: 5 rounds, under 10 minutes on 2 quiet cores
	$(BIN)/python -m benchmarks --out outputs/bench/loopback

bench-link: $(INSTALLED_BENCH) ## the same on two hosts (network namespaces) joined by a link of 1 Gbit/s
	$(BIN)/python -m benchmarks --link 1gbit --out outputs/bench/link

DEVICE ?= cuda
SIZES ?= gpt2 gpt2_medium gpt2_large
bench-gpu: ## GPT-2 sizes in bf16 on one GPU, eager and compiled; PYTHON has a CUDA build of torch and the extra bench
	set -e; for size in $(SIZES); do \
	    for compile in "" --compile; do \
	        $(PYTHON) -m benchmarks --device $(DEVICE) --ranks 1 --precision bf16 --size $$size $$compile \
	            --rounds 3 --steps 20 --out outputs/bench/gpu/$$size$$compile; \
	    done; \
	    $(PYTHON) -m benchmarks.fake_world --device $(DEVICE) --precision bf16 --size $$size --ranks 8 \
	        --engines zero0,zero1,zero2,zero3,fsdp2_kept,fsdp2; \
	done

install: $(INSTALLED) ## install only, into .venv

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(INSTALLED_BENCH): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	@touch $@

clean: ## remove what make and the runs made (not the runs' outputs)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
