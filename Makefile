# make demo and make test need nothing but Python (3.11 or newer) and make; both set up .venv by themselves.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
WORKERS ?= 2
FUZZ_S ?= 60
NFS_ROUNDS ?= 5
VIEWERS := tests/viewers/node_modules/.package-lock.json

.DEFAULT_GOAL := help
.PHONY: help demo test test-nfs lint docs notebooks viewers bench fuzz clean

help:
	@echo 'make demo   train a small U-Net without a cache, with MONAI'\''s and with zcache; one table (4 minutes and 2 GB the first time)'
	@echo 'make test   ruff, mypy, the import contract, the documentation, pytest, the notebooks'
	@echo 'make test-nfs  two hosts on real kernel NFS in a User-Mode-Linux kernel: the long form, with figures (10 minutes; root)'
	@echo 'make stress  processes killed at random moments, DataLoader starts by each method: the long form, with figures (half an hour)'
	@echo 'make lint   the same without pytest and notebooks'
	@echo 'make docs   the documentation site, into build/site; without network'
	@echo 'make notebooks  run notebooks/ and write them back with their outputs (two minutes)'
	@echo 'make viewers  the JavaScript packages that open a cache in tests/viewers (npm; 70 MB); make test does it too'
	@echo 'make bench  the benchmark behind the tables in README.md (half an hour, 4 GB of disk)'
	@echo 'make fuzz   mutate entries of a cache for FUZZ_S seconds (60) and count crashes, hangs and wrong reads'
	@echo 'make clean  remove .venv, build products and the caches of demo and benchmark'

demo: $(VENV)/demo.stamp
	@$(BIN)/python -m benchmarks.demo

test: lint viewers
	@echo '== pytest'
	@$(BIN)/python -m pytest -q -n $(WORKERS)
	@echo '== notebooks'
	@$(BIN)/python -m pytest -q -n $(WORKERS) --nbmake notebooks

# Without npm, or without network, the tests in tests/viewers are skipped; in continuous integration they fail.
viewers: $(if $(shell command -v npm),$(VIEWERS))

$(VIEWERS): $(addprefix tests/viewers/,package.json package-lock.json .npmrc ikonate/package.json)
	@echo 'Installing the JavaScript packages of tests/viewers ...'
	@cd tests/viewers && npm ci --loglevel=error || { \
		rm -rf node_modules; echo 'npm failed: the tests in tests/viewers cannot run' >&2; test "$$CI" != true; }

# Gets the Debian packages that are not installed (45 MB), installs none of them.
test-nfs: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.nfs.packages
	@ZCACHE_NFS_ROUNDS=$(NFS_ROUNDS) $(BIN)/python -m pytest -q tests/nfs

# How long: ZCACHE_STRESS_ROUNDS (400), ZCACHE_STRESS_STARTS (200 per method), ZCACHE_STRESS_EXAMPLES (300).
stress: $(VENV)/dev.stamp
	@$(BIN)/python -m tests.stress.long

lint: $(VENV)/dev.stamp
	@echo '== ruff'
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@echo '== mypy --strict'
	@$(BIN)/mypy --strict zcache
	@echo '== import contract'
	@$(BIN)/lint-imports
	@$(MAKE) --no-print-directory docs

docs: $(VENV)/dev.stamp
	@echo '== documentation'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

notebooks: $(VENV)/dev.stamp
	@$(BIN)/python notebooks/execute.py

bench: $(VENV)/dev.stamp
	@$(BIN)/python -m benchmarks.epochs

fuzz: $(VENV)/dev.stamp $(VENV)/fuzz.stamp
	@$(BIN)/python -m tests.hostile.fuzz_entry $(FUZZ_S)

clean:
	rm -rf $(VENV) tests/viewers/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo 'zcache: no $(PYTHON) here; name another with make PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "zcache needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
			"Name another with make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo 'zcache: $(PYTHON) has no venv module. On Debian and Ubuntu: apt install python3-venv' >&2; exit 1; }
	@echo 'Creating $(VENV) ...'
	@$(PYTHON) -m venv $(VENV)

# The large packages come first and apart, so that one sees what a slow download is busy with.
$(VENV)/%.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo 'Installing PyTorch ...'
	@$(PIP) install -q -c constraints.txt torch
	@echo 'Installing zcache with the packages for "$*" ...'
	@$(PIP) install -q -c constraints.txt -e '.[$*]'
	@touch $@
