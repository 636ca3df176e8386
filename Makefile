# make run    install, then the example study
# make test   the tests that need no Ray (six minutes on two cores)
# make test-ray      the same contract over Ray Tune, drivers that are killed (eight minutes)
# make test-cluster  Ray jobs, Slurm's script, PostgreSQL, mixed machines, who may listen (under 5 minutes)
# make test-browser  the report and the dashboard in a headless Chromium
# make test-frameworks  exports and adapters with the real Hugging Face, Lightning and their kin
# make test-docs    what the pages say to type (three minutes)
# make test-faults  every fault once: killed drivers, workers, machines (under 4 minutes)
# make faults       a hundred random kills, and a table of them
# make docs   the pages of docs/ as a site, in .cache/site/index.html
# make check  format, lint, types, layers, wheel, docs
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Tests and studies keep to their own threads; Ray does not report usage.
export RAY_USAGE_STATS_ENABLED := 0
export OMP_NUM_THREADS := 1
# Material's notice of what comes after MkDocs 1 is not about these pages.
export NO_MKDOCS_2_WARNING := 1

.PHONY: install run test test-ray test-cluster test-browser test-frameworks test-docs test-faults faults docs check clean
install: $(STAMP)

# The stamp follows pyproject.toml: a change of dependencies installs again, anything else reuses the environment.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[dev,dashboard,postgres,huggingface,lightning,docs]"
	touch $@

run: install
	$(BIN)/bsearch run examples/digits.yaml

test: install
	$(BIN)/pytest -n 2 -m "not ray and not packaging and not cluster and not faults and not browser and not frameworks and not docs"

test-ray: install
	$(BIN)/pytest -m "ray and not cluster and not faults"

test-cluster: install
	$(BIN)/pytest -m "cluster and not faults"

test-browser: install
	$(BIN)/pytest -m browser

test-frameworks: install
	$(BIN)/pytest -n 2 -m frameworks

test-docs: install
	$(BIN)/pytest -n 2 -m docs

test-faults: install
	$(BIN)/pytest -m faults

faults: install
	$(BIN)/python tests/faults/chaos.py --kills 100

# Strict: a broken link, a missing anchor or a page outside the navigation is an error.
docs: install
	$(BIN)/mkdocs build --quiet --strict

check: install docs .cache/typing/bsearch
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/pytest -m packaging

# mypy looks for the package by its installed name, which the root folder does not bear.
.cache/typing/bsearch:
	mkdir -p .cache/typing
	ln -sfn ../.. $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info results examples/results
