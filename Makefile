# The commands of a working day. Only Python 3.11 or newer is taken for granted; whatever else is missing is named
# together with the command that installs it.

PYTHON ?= python3
# uv from the PATH, else one of our own in .headrace/.
OWN_UV := .headrace/uv/bin/uv
UV := $(or $(shell command -v uv 2>/dev/null),$(OWN_UV))
RUN := $(UV) run --no-sync

# make's own variables for sub-makes must not reach the tools that are built here.
unexport MAKEFLAGS MFLAGS MAKELEVEL

.DEFAULT_GOAL := help
.PHONY: help setup demo test faults check clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(UV) ## the locked environment, the model and the local stack's programs (once)
	@$(PYTHON) -m infra.prepare $(UV)
	@case "$(UV)" in .headrace/*) echo 'uv is not on your PATH. To use it here: export PATH="$(CURDIR)/.headrace/uv/bin:$$PATH"';; esac

demo: setup ## the whole service at work on real parts; stops everything again
	@$(RUN) headrace demo

# Whole workers with the simulated engine and broken parts: minutes of waiting for time-outs, so a level of their own.
FAULTS := tests/integration/test_worker_cancel.py tests/integration/test_worker_deferred.py \
  tests/integration/test_worker_duplicates.py tests/integration/test_dead_letters.py tests/integration/test_reconcile.py \
  tests/integration/test_worker_overflow.py tests/integration/test_worker_spread.py \
  tests/integration/test_identity_modes.py tests/integration/test_load_fairness.py

# Two at once, each with a stack of its own: most of their time is waiting. Slowest first (tests/conftest.py).
SIDE_BY_SIDE := -n 2 --no-loadscope-reorder --durations=15

test: setup ## unit and integration tests, on real parts of their own
	@$(RUN) pytest tests/unit tests/integration $(addprefix --ignore=,$(FAULTS)) $(SIDE_BY_SIDE)

faults: setup ## kills, outages, cancels, copies, timed jobs, dead letters, reconcile
	@$(RUN) pytest $(FAULTS) tests/faults $(SIDE_BY_SIDE)

check: $(UV) ## style, types and the order of the rooms
	@$(PYTHON) -m infra.prepare $(UV) environment
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports

clean: ## stops the local stack and removes its data, logs and the environment; the cache in ~/.cache/headrace stays
	@if [ -x .venv/bin/headrace ]; then .venv/bin/headrace down; fi
	rm -rf .headrace .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(OWN_UV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "headrace: $(PYTHON) is older than 3.11; run: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "   python  installing uv into .headrace/uv (once)"
	@if $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null; then \
	  $(PYTHON) -m venv .headrace/uv && .headrace/uv/bin/python -m pip install --quiet --disable-pip-version-check 'uv>=0.9'; \
	elif $(PYTHON) -c 'import pip' 2>/dev/null; then \
	  $(PYTHON) -m pip install --quiet --disable-pip-version-check --target .headrace/uv 'uv>=0.9'; \
	else \
	  echo "headrace: $(PYTHON) has neither venv nor pip; run: apt-get install -y python3-venv, then the same command again" >&2; \
	  exit 1; \
	fi
