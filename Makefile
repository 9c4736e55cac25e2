# Two commands do everything from a fresh clone: `make demo` and `make test`. Both build .venv first.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
OUT ?= out
# The build of torch to use. It is installed before the package, whose open requirement (torch>=2.11) is then met
# and fetches no newer build. Pip prefers a +cpu build of this version where one is on offer; where none is, any
# build works, but the usual one for Linux brings several gigabytes of GPU libraries.
CPU_TORCH ?= torch==2.13.0
STAMP := $(VENV)/.installed

# Two halves of the suite, run side by side on two cores: tests of commands and of several ranks, and all others.
RANKS := $(addprefix tests/,cases cli dispatch distributed parallel pipeline_model pipelining planning recompute training)
PYTEST := $(PY) -m pytest -m "not gpu" -p no:cacheprovider --durations=5

.DEFAULT_GOAL := help
.PHONY: help demo test test-ranks test-rest lint install clean

help:
	@echo "make demo   train on real text under each recompute rule, compare, write $(OUT)/*.png"
	@echo "make test   lint, type check and CPU test suite"
	@echo "make lint   lint and type check only"
	@echo "make clean  remove .venv, $(OUT) and caches"

demo: $(STAMP)
	$(PY) -m overlap demo --out $(OUT)

test: lint
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target --keep-going test-ranks test-rest

test-ranks: $(STAMP)
	$(PYTEST) $(RANKS)

test-rest: $(STAMP)
	$(PYTEST) tests $(addprefix --ignore=,$(RANKS))

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

install: $(STAMP)

# The stamp is written last, so an interrupted install is taken up again, and re-runs cost nothing.
$(STAMP): pyproject.toml
	test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "$(CPU_TORCH)"
	$(PY) -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) $(OUT) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
