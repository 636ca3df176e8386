# make run       install what a study needs, then run the example
# make test      install the rest; the quick tier: laws, the command line, no Ray (under 3 minutes on two idle cores)
# make test-all  everything that .ci/run runs: the quick tier, the targets below but for test-lowest, test-newest and test-long, and the checks
# make test-slow        laws and commands that take longer: ranks, real step times, live terminals, trainings
# make test-ray         the runners' contract over Ray Tune, drivers that are killed
# make test-cluster     Ray jobs, Slurm scripts, PostgreSQL, mixed machines, listening ports
# make test-browser     the report and the dashboard in headless Chromium
# make test-frameworks  exports and adapters with the real Hugging Face, Lightning and others
# make test-docs        the commands and the notebook of the documentation
# make test-lowest      before a release: the quick tier with the lowest versions that pyproject.toml allows
# make test-newest      before a release: the quick tier on the newest Python that is installed (NEWEST=path names another)
# make test-long        before a release: long roads that a shorter test takes too, stand-ins of devices, attacks, and every fault once
# make rough    all attacks: other people's folders, streams, names and enemies, and a table of what broke (BEFORE=commit tries that one too)
# make mutants   small faults drawn from all rooms, and those that no test notices: an hour, or MUTANTS="--count 20"
# make faults    two hundred random kills, and a table of them
# make benchmark-public  bsearch and its peers on public problems, each peer in its own environment: hours; it resumes
# make docs      the documentation as a site, in .cache/site/index.html
# make lint      format, lint, types, layers, docs
# make check     the same, known vulnerabilities of dependencies, and the wheel
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What a study needs, and what the tests need beside it.
RUNS := $(VENV)/.runs
STAMP := $(VENV)/.installed
# Tests and studies keep to their own threads; Ray does not report usage.
export RAY_USAGE_STATS_ENABLED := 0
export OMP_NUM_THREADS := 1
# Material's notice of what comes after MkDocs 1 is not about these pages.
export NO_MKDOCS_2_WARNING := 1
# Modules are compiled once, when they are first imported: hundreds of processes of the tests import torch.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install run test test-all test-rest test-slow test-ray test-cluster test-browser test-frameworks test-docs test-lowest test-newest test-long rough mutants faults benchmark-public docs check audit lint clean
install: $(STAMP)

# uv installs in half a minute what takes pip minutes.
UV = $(BIN)/uv pip install --python
EVERYTHING := .[dev,dashboard,notebook,postgres,huggingface,language,lightning,mcp,tracking,docs]

# The stamps follow pyproject.toml: a change of dependencies installs again, anything else reuses the environment.
$(RUNS): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -x $(BIN)/uv || $(BIN)/python -m pip install --quiet uv
	$(UV) $(BIN)/python --editable .
	touch $@

$(STAMP): $(RUNS)
	$(UV) $(BIN)/python --quiet --editable "$(EVERYTHING)"
	touch $@

# The newest Python that is installed here, and the lowest versions of what pyproject.toml names.
NEWEST ?= $(lastword $(PYTHON) $(sort $(wildcard $(HOME)/.pyenv/versions/3.1?.*/bin/python3)))
$(VENV)/newest/.installed: $(STAMP)
	$(NEWEST) -m venv $(VENV)/newest
	$(UV) $(VENV)/newest/bin/python --editable "$(EVERYTHING)"
	touch $@

$(VENV)/lowest/.installed: $(STAMP)
	$(PYTHON) -m venv $(VENV)/lowest
	$(UV) $(VENV)/lowest/bin/python --resolution lowest-direct --editable "$(EVERYTHING)"
	touch $@

run: $(RUNS)
	$(BIN)/bsearch run examples/digits.yaml

# Two at a time, whatever they are: while one waits for Ray or a browser, the other computes. Files stay whole, so that fixtures
# of a module are made once.
TWO := $(BIN)/pytest -n 2 --dist loadfile --durations 25
# They wait more: three at a time.
THREE := $(BIN)/pytest -n 3 --dist loadfile --durations 40
# With real Rays, browsers, queues: each has a target of its own.
HEAVY := ray or packaging or cluster or browser or frameworks or docs or rough
# A release's.
LONG := long or faults
QUICK := not (slow or $(HEAVY) or $(LONG))

test: install
	$(TWO) -m "$(QUICK)"

test-lowest test-newest: test-%: $(VENV)/%/.installed
	$(VENV)/$*/bin/pytest -n 2 --dist loadfile --hypothesis-profile few -m "$(QUICK)"

test-all: test test-rest

test-rest: install
	$(THREE) -m "(slow or $(HEAVY)) and not ($(LONG) or rough)"
	$(MAKE) lint

test-slow: install
	$(TWO) -m "slow and not ($(HEAVY) or $(LONG))"

test-ray: install
	$(TWO) -m "ray and not (cluster or $(LONG))"

test-cluster: install
	$(TWO) -m "cluster and not ($(LONG))"

test-browser: install
	$(TWO) -m browser

test-frameworks: install
	$(TWO) -m frameworks

test-docs: install
	$(TWO) -m "docs and not ($(LONG))"

test-long: install
	$(TWO) -m "(long or rough) and not faults"
	$(BIN)/pytest -m faults

rough: install
	$(BIN)/python tests/rough/table.py $(BEFORE)

mutants: install
	$(BIN)/python benchmarks/mutants.py $(MUTANTS)

faults: install
	$(BIN)/python tests/faults/chaos.py --kills 200

benchmark-public: install
	$(UV) $(BIN)/python --editable ".[benchmark]"
	$(BIN)/python benchmarks/public/run.py
	$(BIN)/python benchmarks/public/run.py --page

# Strict: a broken link, a missing anchor or a page outside the navigation is an error.
docs: install
	$(BIN)/mkdocs build --quiet --strict

check: lint audit
	$(BIN)/pytest -m packaging

# Known vulnerabilities of what is installed, where the registry of packages tells of them; bandit's rules are ruff's S, in lint.
audit: install
	$(BIN)/uv tool run --quiet pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

lint: install docs .cache/typing/bsearch
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# mypy looks for the package by its installed name, which the root folder does not bear.
.cache/typing/bsearch:
	mkdir -p .cache/typing
	ln -sfn ../.. $@

clean:
	rm -rf $(VENV) .cache build dist *.egg-info results examples/results
