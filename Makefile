# make demo and make test work on a fresh clone: both set up .venv first.
SHELL := /bin/bash
BASE_PYTHON ?= python3
VENV ?= .venv
# Installed first, and pinned, so that the resolver does not choose another build of torch.
TORCH ?= torch==2.13.0
# More arguments for pytest, e.g. make test PYTEST_ARGS="-m slow".
PYTEST_ARGS ?=
# Processes that share the tests, one thread each.
WORKERS ?= auto

PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CODE := src tests examples benchmarks docs

.PHONY: help setup lint types docs test demo bench coverage format clean

help:
	@echo "make demo      mortality on real clinical data: resonators, network, boosting"
	@echo "make test      lint, types, import direction, documentation and tests"
	@echo "make docs      the documentation as HTML in build/docs"
	@echo "make bench     speed of the attention operator, quick version"
	@echo "make coverage  tests with a coverage report"
	@echo "make format    format the code in place"
	@echo "make setup     create $(VENV) only; make clean removes it"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(BASE_PYTHON) -c 'import sys; sys.exit("osciformer needs Python 3.11 or later; set BASE_PYTHON" if sys.version_info < (3, 11) else 0)'
	test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV)
	$(PYTHON) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' \
		|| $(PYTHON) -m pip install -q -c constraints.txt "$(TORCH)"
	$(PYTHON) -m pip install -q -c constraints.txt -e ".[test]"
	@touch $@

lint: setup
	$(PYTHON) -m ruff check $(CODE)
	$(PYTHON) -m ruff format --check $(CODE)
	$(PYTHON) -m codespell_lib $(CODE) *.md
	$(VENV)/bin/lint-imports

types: setup
	$(PYTHON) -m mypy

# Warnings are errors, and -n refuses links that lead nowhere; -E, lest a page be taken from a failed build.
docs: setup
	$(PYTHON) -m sphinx -q -E -W --keep-going -n -b html docs build/docs

# Two at a time: types and documentation take a core each for most of a minute.
test: setup
	$(MAKE) -j2 lint types docs
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal --durations=10 $(PYTEST_ARGS)

demo: setup
	$(PYTHON) -m osciformer demo

bench: setup
	$(PYTHON) -m osciformer.bench speed --quick --json

coverage: setup
	$(PYTHON) -m pip install -q -c constraints.txt "coverage[toml]"
	$(PYTHON) -m coverage run -m pytest -q $(PYTEST_ARGS)
	$(PYTHON) -m coverage report

format: setup
	$(PYTHON) -m ruff check --fix $(CODE)
	$(PYTHON) -m ruff format $(CODE)

clean:
	rm -rf $(VENV) build dist .coverage docs/notebooks/.ruff_cache .hypothesis .import_linter_cache src/.import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests examples docs -name __pycache__ -type d -prune -exec rm -rf {} +
