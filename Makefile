# Everything here works from a bare clone; Python 3.11 or newer is all that must be there.
#   make PYTHON=python3.12 demo      another interpreter (used once, when .venv is made)
#   make JOBS=8 test                 more test processes

PYTHON ?= python3
JOBS ?= 2
BIN := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help install demo test torture laws laws-full clean

help: ## print these lines
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## make .venv with Partita and its development tools in it

demo: $(STAMP) ## sample, save and report the posterior of a small network on the bundled digits
	@$(BIN)/partita run digits

test: export OMP_NUM_THREADS := 1
test: export MKL_NUM_THREADS := 1
test: $(STAMP) ## style, format, types, then the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(JOBS) --dist worksteal

torture: $(STAMP) ## kill, damage and starve run folders, the long form of tests/test_store_faults.py
	@$(BIN)/python tests/torture_store.py

laws: $(STAMP) ## every sampler, mask and history against its known answer, the short table
	@$(BIN)/partita laws

laws-full: $(STAMP) ## the same with long chains, written to docs/laws-full.md
	@$(BIN)/partita laws --full --out docs/laws-full.md

clean: ## remove caches and build output (.venv and runs/ stay)
	rm -rf build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Partita needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." \
	       "Name another one: make PYTHON=python3.12 $(or $(MAKECMDGOALS),install)" >&2; exit 1; }
	@echo "Installing Partita into .venv (once, about a minute) ..."
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
