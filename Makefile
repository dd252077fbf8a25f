# Every target sets up what it needs; a fresh machine needs only Python >= 3.11 with venv, make and g++.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-fast test-all check format wheel clean

demo: $(STAMP)
	$(BIN)/treeverify demo

test: check
	$(BIN)/python -m pytest -m "not gpu"

test-fast: check
	$(BIN)/python -m pytest -m "not gpu and not slow"

check: $(STAMP)
	$(BIN)/ruff format --check src tests training benchmarks
	$(BIN)/ruff check src tests training benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format src tests training benchmarks
	$(BIN)/ruff check --fix src tests training benchmarks

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist .cache
