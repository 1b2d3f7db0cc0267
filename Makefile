# make run   train on the embedded default, evaluate, show the table
# make test  everything the checks need, then format, lint, types, tests
# make attack  ten thousand random bad inputs, servers, run folders and flags (SEED=1 CASES=10000)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

SEED  ?= 1
CASES ?= 10000

.PHONY: run test attack install install-dev clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

run: install
	$(BIN)/python train_query_mutator.py --backend embedded --config examples/first_run.json

test: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/vulture --min-confidence 80 query_mutator ppo *.py
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

attack: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack --cases $(CASES) --seed $(SEED) --journal build/attack-$(SEED).jsonl

clean:
	rm -rf $(VENV) build *.egg-info
