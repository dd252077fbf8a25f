# Every target sets up what it needs (all three houses); a fresh machine needs only Python >= 3.11 with venv, make and g++.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-fast test-all test-sglang mutants check format wheel clean

demo: $(STAMP)
	$(BIN)/treeverify demo

test: check
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not gpu and not sglang"

test-fast: check
	$(BIN)/python -m pytest -n 2 --dist loadscope -m "not gpu and not slow and not sglang"

# Every specialisation for every target, with the resource gate; tests compile the common targets only.
test-all: test
	$(BIN)/python -m treeverify.jit.aot --targets all

# Real SGLang 0.5.23 in Triton's interpreter, in an environment of its own, kept outside the checkout (2.5 GB).
SGLANG_VENV ?= .cache/sglang
test-sglang:
	PYTHON=$(PYTHON) scripts/sglang_cpu_env.sh $(SGLANG_VENV)
	PYTHONPATH= TRITON_INTERPRET=1 $(SGLANG_VENV)/bin/python -m pytest -m sglang tests/integrations

# Do the tests of the DDTREE step notice faults that are planted in it?
mutants: $(STAMP)
	$(BIN)/python scripts/mutants.py

# A wheel with the compiled libraries of every target (some ten minutes on two cores, 10 MB).
wheel: $(STAMP)
	rm -rf build/prebuilt
	$(BIN)/python -m treeverify.jit.aot --targets all --into build/prebuilt
	$(BIN)/python -m pip wheel --disable-pip-version-check -q --no-deps -w dist .

check: $(STAMP)
	$(BIN)/ruff format --check src tests training benchmarks scripts
	$(BIN)/ruff check src tests training benchmarks scripts
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/deptry src training

format: $(STAMP)
	$(BIN)/ruff format src tests training benchmarks scripts
	$(BIN)/ruff check --fix src tests training benchmarks scripts

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	test -n "$$CUDA_HOME" || command -v nvcc >/dev/null || test -x /usr/local/cuda/bin/nvcc || \
		$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[build]"
	touch $@

clean:
	rm -rf $(VENV) build dist .cache
