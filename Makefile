# Two commands: `make demo` and `make test`. Both set everything up in .venv first, and both can
# be run again at any time. Needs Python 3.11+, git and make; nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One more than processors, for many tests wait; at most four, for each holds a gigabyte.
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 3 ? n + 1 : 4)))
SOURCES := $(shell find src -type f -not -name '*.pyc' 2>/dev/null) README.md LICENSE

.PHONY: help setup demo test test-changed test-nightly lint tests docs dev clean

help:
	@echo "make setup   make .venv with everything in it; then: . .venv/bin/activate"
	@echo "make demo    set up, profile a slow link, plan, train with DDP and as recommended, report"
	@echo "make test    set up, lint, check types, build the docs, run the tests of every change"
	@echo "make test-changed  the tests of what git says was changed (SINCE=main: since then)"
	@echo "make test-nightly  all tests, the long ones too, with many new random cases: hours"
	@echo "make dev     as set-up, but with the package installed in editable form"
	@echo "make docs    build the pages and the reference into build/site; warnings are errors"
	@echo "make clean   remove the environment and everything that was built"

setup: $(VENV)/.wheel

$(VENV)/.dependencies: pyproject.toml constraints.txt tools/set_up.py
	@command -v $(PYTHON) >/dev/null || { echo "error: $(PYTHON) was not found"; \
	  echo "hint: install Python 3.11 or newer, or run: make PYTHON=/path/to/python3 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) tools/set_up.py --venv $(VENV) dependencies
	@touch $@

$(VENV)/.wheel: $(VENV)/.dependencies $(SOURCES)
	@$(BIN)/python tools/set_up.py --venv $(VENV) wheel
	@touch $@

demo: setup
	@$(BIN)/fivefold demo

# Side by side, all of it whatever the first finds.
test: setup
	@$(MAKE) --no-print-directory --keep-going -j 3 lint docs tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What pytest compiles is kept for the next run, also where Python is told to keep nothing.
tests test-changed test-nightly: export PYTHONDONTWRITEBYTECODE =
tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not nightly"

# The tests of what was changed, in about a minute: from git, the imports, and what tests take.
test-changed: $(VENV)/.dependencies
	@PYTHONPATH=src $(BIN)/python tools/changed_tests.py $(if $(SINCE),--since $(SINCE)) --run -n $(WORKERS)

# Everything, with a thousand new examples for each property; then, one by one, what must not be
# disturbed (marker `alone`); then with the kernels of other processors: hours, before a release.
test-nightly: setup
	@failed=0; set -x; \
	$(BIN)/python -m pip install -q -c constraints.txt torchtitan==0.3.0 torch_remat==0.2.2 || failed=1; \
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not alone" --hypothesis-profile=nightly --timeout 7200 || failed=1; \
	$(BIN)/pytest -m alone --hypothesis-profile=nightly --timeout 7200 || failed=1; \
	for kernels in "ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41" \
	  "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2"; do \
	  env $$kernels $(BIN)/pytest -n $(WORKERS) --dist worksteal -m "not nightly" || failed=1; \
	done; \
	exit $$failed

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dev: $(VENV)/.dependencies
	@$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	@touch $(VENV)/.wheel

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
