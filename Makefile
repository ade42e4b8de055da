# Two commands need nothing but git, make and Python: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
.PHONY: help demo test test-waiting test-others coverage azurite parity-table lint bench clean

help: ## show what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

demo: $(VENV)/.demo ## the main job: stream images from a local object store, train, compare with torch
	$(BIN)/headrace demo

test: $(VENV)/.dev ## every test
	@# Two processes for two cores: some tests wait and start processes, the others compute. About as long as each other.
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-waiting test-others

WAITING := tests/faults tests/contract tests/examples

test-waiting:
	@$(BIN)/python -m pytest $(WAITING)

test-others:
	@$(BIN)/python -m $(MEASURE)pytest $(addprefix --ignore=,$(WAITING))

coverage: MEASURE := coverage run -m #
coverage: $(VENV)/.dev ## every test, and the branch coverage of those that mostly compute, in one process; it must not fall
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

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean: ## remove the environment and what tools left behind
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage
