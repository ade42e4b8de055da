# Two commands need nothing but git, make and Python: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
VENV_INTEGRATIONS ?= .venv-integrations
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-unit test-faults test-others test-contract test-integrations coverage azurite parity-table
.PHONY: trainers-table lint bench clean

help: ## show what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

demo: $(VENV)/.demo ## the main job: stream images from a local object store, train, compare with torch
	$(BIN)/headrace demo

test: $(VENV)/.dev ## every test
	@# In two processes for two cores, the longest parts first.
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target $(addprefix test-,unit faults others contract)

APART := tests/unit tests/faults tests/contract tests/examples tests/integrations

test-unit:
	@$(BIN)/python -m $(MEASURE)pytest tests/unit

test-faults:
	@$(BIN)/python -m pytest tests/faults

test-others:
	@$(BIN)/python -m pytest $(addprefix --ignore=,$(APART))

test-contract:
	@$(BIN)/python -m pytest tests/contract tests/examples

test-integrations: ## real training programs: Lightning, accelerate, transformers, Ray Train and others, on one and two ranks
	@$(MAKE) --no-print-directory VENV=$(VENV_INTEGRATIONS) $(VENV_INTEGRATIONS)/.trainers
	@$(VENV_INTEGRATIONS)/bin/python -m pytest tests/integrations

coverage: MEASURE := coverage run -m #
coverage: $(VENV)/.dev ## every test, and the branch coverage of the unit tests, which must not fall
	@rm -f .coverage
	@$(MAKE) --no-print-directory MEASURE="$(MEASURE)" test
	@$(BIN)/coverage report

# Outside the clone: 186 MB of JavaScript, which no tool has to look through. tests/contract/places.py finds it there.
AZURITE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/headrace-tests/azurite

azurite: ## the emulator of Azure that some tests need, by npm; without it they are skipped
	@mkdir -p $(AZURITE) && echo '{"private": true}' > $(AZURITE)/package.json
	@npm install --prefix $(AZURITE) --no-audit --no-fund --loglevel=error azurite@3.35.0

parity-table: $(VENV)/.dev ## docs/parity.md, from the tests that prove it
	@$(BIN)/python -m tests.parity.table

trainers-table: ## the tables of docs/trainers.md, from the tests that prove them
	@$(MAKE) --no-print-directory VENV=$(VENV_INTEGRATIONS) $(VENV_INTEGRATIONS)/.trainers
	@$(VENV_INTEGRATIONS)/bin/python -m tests.integrations.table

lint: $(VENV)/.dev ## ruff, mypy, and the check of words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_language.py

bench: $(VENV)/.bench ## every benchmark, each against its limit in the same run
	$(BIN)/python benchmarks/run_all.py

# One stamp for each set of extras; constraints.txt pins what is installed.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --constraint constraints.txt --editable ".[$*]"
	@touch $@

# torchtitan needs another release of `datasets` than the tests; of its dependencies, what is tested needs `tyro` alone.
$(VENV)/.trainers: $(VENV)/.integrations
	$(PIP) install --constraint constraints.txt --no-deps torchtitan
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) $(VENV_INTEGRATIONS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
