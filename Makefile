# Two commands need nothing but git, make and Python: `make demo` and `make test`.

PYTHON ?= python3
VENV   ?= .venv
VENV_INTEGRATIONS ?= .venv-integrations
JOBS   ?= 3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

.DEFAULT_GOAL := help
PARTS  := $(addprefix test-,unit-data others unit-others model faults contract unit-engine)
.PHONY: help demo test $(PARTS) test-integrations test-all model coverage environment-integrations azurite parity-table
.PHONY: docs docs-links lint test-python test-torch newest lowest dist dist-check bench bench-quick clean

# Without bytecode each of some hundred interpreters that tests start would compile headrace again, in half a second.
unexport PYTHONDONTWRITEBYTECODE

help: ## show what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile

demo: $(VENV)/.demo ## the main job: stream images from a local object store, train, compare with torch
	$(BIN)/python examples/demo

test: $(VENV)/.dev ## every test, but for those of training programs
	@# In an order that fills three processes evenly: one more than two cores, as many tests wait for
	@# time-outs, servers and killed processes.
	@rm -f .durations
	@HEADRACE_DURATIONS=$(CURDIR)/.durations $(MAKE) --no-print-directory --jobs=$(JOBS) --keep-going \
		--output-sync=target $(PARTS); status=$$?; echo "The slowest 50:"; sort -rn .durations | head -50; exit $$status

# The parts of `make test`; those named "others" run what the rest leaves, so that no file is forgotten.
ENGINE := tests/unit/engine tests/unit/streams
DATA   := tests/unit/consumer tests/unit/datasets
APART  := tests/unit tests/faults tests/model tests/contract tests/examples tests/integrations

test-faults:
	@$(BIN)/python -m pytest tests/faults

test-unit-engine:
	@$(BIN)/python -m $(MEASURE)pytest $(ENGINE)

test-unit-data:
	@$(BIN)/python -m $(MEASURE)pytest $(DATA)

test-unit-others:
	@$(BIN)/python -m $(MEASURE)pytest tests/unit $(addprefix --ignore=,$(ENGINE) $(DATA))

# Other programs in each run; the seed is printed, and HEADRACE_MODEL_SEED repeats a run.
test-model:
	@$(BIN)/python -m pytest -rP --show-capture=stdout tests/model

test-others:
	@$(BIN)/python -m pytest $(addprefix --ignore=,$(APART))

test-contract:
	@$(BIN)/python -m pytest tests/contract tests/examples

test-integrations: ## real training programs: Lightning, accelerate, transformers, Ray Train and others, on one and two ranks
	@# Not a prerequisite, after which make would start this part last of all.
	@$(MAKE) --no-print-directory environment-integrations
	@HEADRACE_TEST_TIMEOUT=300 $(VENV_INTEGRATIONS)/bin/python -m pytest tests/integrations tests/test_public_api.py tests/unit/test_errors.py

test-all: ## every test: `make test` and `make test-integrations`, side by side
	@$(MAKE) --no-print-directory PARTS="test-integrations $(PARTS)" test

MODEL_PROGRAMS  ?= 8000
MODEL_PROCESSES ?= 2000

model: $(VENV)/.dev ## thousands of random programs, against the reference in tests/model: half an hour
	$(BIN)/python -m tests.model.run --count $(MODEL_PROGRAMS) --processes $(MODEL_PROCESSES)

coverage: $(VENV)/.dev ## `make test`, and the branch coverage of the unit tests
	@rm -f .coverage .coverage.*
	@$(MAKE) --no-print-directory MEASURE="coverage run --parallel-mode -m " test
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

# Most of the 24,000 files of its packages are never imported: bytecode is made at the first import of each.
environment-integrations:
	@$(MAKE) --no-print-directory VENV=$(VENV_INTEGRATIONS) INSTALL=--no-compile $(VENV_INTEGRATIONS)/.trainers

# Outside the clone: 186 MB of JavaScript, which no tool has to look through. tests/contract/places.py finds it there.
AZURITE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/headrace-tests/azurite

azurite: ## the emulator of Azure that some tests need, by npm; without it they are skipped
	@mkdir -p $(AZURITE) && echo '{"private": true}' > $(AZURITE)/package.json
	@npm install --prefix $(AZURITE) --no-audit --no-fund --loglevel=error azurite@3.35.0

parity-table: $(VENV)/.dev ## docs/parity.md, from the tests that prove it
	@$(BIN)/python -m tests.parity.table

docs: $(VENV)/.dev ## the site, into out/site; runs the examples that have changed; a warning is an error
	@# One thread for torch: on busy cores several wait for each other, and their sums differ in the last bit.
	@OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going docs out/site

docs-links: $(VENV)/.dev ## whether the site's links to other sites lead somewhere; needs the network
	@HEADRACE_DOCS_ONLINE=1 $(BIN)/python -m sphinx --quiet --keep-going -b linkcheck -D plot_gallery=0 docs out/links

lint: $(VENV)/.dev ## ruff, mypy, and the check of words
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/check_language.py

# What users install today, but for torch, whose newest release is gigabytes, and a part of the tests: a minute.
NEWEST   := $(VENV)/newest
REQUIRED := $(shell sed -n '/^dependencies/,/^]/s/^ *\("[^";]*\).*/\1"/p' pyproject.toml | grep -v '"torch')
WITH_NEWEST := test_loader.py transport/test_by_value.py transport/test_shared_pickle.py store/test_obstore_errors.py eventloop

newest: $(VENV)/.dev ## some tests with the newest release of each required dependency
	@rm -rf $(NEWEST)
	@$(PIP) install --upgrade --target $(NEWEST) $(REQUIRED)
	@newer=$$($(PIP) freeze --path $(NEWEST) | grep -vixFf constraints.txt | paste -sd " "); \
	echo "Newer than in constraints.txt: $${newer:-nothing}"; \
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest $(addprefix tests/unit/,$(WITH_NEWEST)) || \
	{ echo "That was with $${newer:-the releases of constraints.txt}"; exit 1; }

# What users get whose other packages hold the dependencies back. TORCH= adds a release of torch: gigabytes, unless
# UV_TORCH_BACKEND=cpu is set where the index of torch can be reached.
LOWEST := $(abspath $(VENV)/lowest)
UV     := $(BIN)/uv pip

$(BIN)/uv: | $(VENV)/.dev
	$(PIP) install --constraint constraints.txt uv

lowest: $(VENV)/.dev $(BIN)/uv ## the same tests, with the lowest releases that pyproject.toml allows; of torch with TORCH=2.6.0
	@rm -rf $(LOWEST)
	@printf '%s\n' $(REQUIRED) $(TORCH:%=torch==%) | \
		$(UV) compile --quiet --resolution lowest-direct --python $(BIN)/python --output-file $(VENV)/lowest.txt -
	@$(UV) install --quiet --python $(BIN)/python --target $(LOWEST) --requirements $(VENV)/lowest.txt
	@grep == $(VENV)/lowest.txt
	PYTHONPATH=$(LOWEST) $(BIN)/python -m pytest $(addprefix tests/unit/,$(WITH_NEWEST) torchcompat)

test-torch: $(VENV)/.dev $(BIN)/uv ## parity, and the private names of torch, with another release of torch: TORCH=2.9.1
	@rm -rf $(VENV)/torch
	@$(UV) install --quiet --python $(BIN)/python --target $(VENV)/torch torch==$(TORCH)
	PYTHONPATH=$(abspath $(VENV)/torch) $(BIN)/python -m pytest tests/unit/torchcompat tests/parity

# Parity with torch, processes, pickling, types and formats: what differs between releases of Python.
BY_PYTHON := tests/parity tests/test_typing.py tests/test_public_api.py tests/test_lazy_import.py
BY_PYTHON += $(addprefix tests/unit/,pool transport links datasets torchcompat test_next_python.py)

test-python: $(VENV)/.dev ## a third of the tests: those that another release of Python may break
	$(BIN)/python -m pytest $(BY_PYTHON)

DIST := out/dist

dist: ## sdist and wheel, into out/dist; checks both, and runs the README's first program in an empty environment
	@rm -rf $(DIST) out/packaging
	@$(PYTHON) -m venv out/packaging
	@out/packaging/bin/python -m pip install --quiet --constraint constraints.txt build twine
	@out/packaging/bin/python -m build --outdir $(DIST)
	@out/packaging/bin/python -m twine check --strict $(DIST)/*
	@rm -rf out/packaging
	@$(MAKE) --no-print-directory dist-check

dist-check: ## whether the wheel of out/dist works in an empty environment: the README's first program
	@rm -rf out/empty
	@$(PYTHON) -m venv out/empty
	@out/empty/bin/python -m pip install --quiet "$$(ls $(DIST)/*.whl)[image]"
	@out/empty/bin/python -m pip check
	@out/empty/bin/headrace --help >/dev/null
	@out/empty/bin/python tools/readme_program.py
	@rm -rf out/empty

bench: $(VENV)/.bench ## every benchmark, each against its limit in the same run
	$(BIN)/python benchmarks/run_all.py

bench-quick: $(VENV)/.bench ## every benchmark for some seconds: do they run, with correct bytes? Claims nothing
	$(BIN)/python benchmarks/run_all.py --quick

# One stamp for each set of extras; constraints.txt pins what is installed.
$(VENV)/.%: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install $(INSTALL) --constraint constraints.txt --editable ".[$*]"
	@touch $@

# torchtitan needs another release of `datasets` than the tests; of its dependencies, what is tested needs `tyro` alone.
$(VENV)/.trainers: $(VENV)/.integrations
	$(PIP) install $(INSTALL) --constraint constraints.txt --no-deps torchtitan
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

clean: ## remove the environment and what tools left behind
	rm -rf docs/gallery out/site $(DIST) out/packaging out/empty $(VENV) $(VENV_INTEGRATIONS) .pytest_cache .mypy_cache .ruff_cache .hypothesis .durations .coverage .coverage.*
