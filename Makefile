# `make report` and `make test` do everything on a machine that has Python 3.11 or 3.12: they make .venv, install
# what is pinned, and run. A second call installs nothing.

SUPPORTED := import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python; do \
	$$p -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $$p && break; done)
VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip --disable-pip-version-check --no-input
TESTS := $(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

.PHONY: report test test-all test-torches notebooks measure doctor clean

report: $(VENV)/installed fit.html
	$(RUN) -m helpers report

# Some two minutes: made only where it is missing; a test compares the one that is there with what `fit` says.
fit.html: | $(VENV)/installed
	$(RUN) -m helpers fit --page $@

test: $(VENV)/installed-tests
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports --no-cache
	$(TESTS) $(AGAIN)

# What `make test` leaves out: the notebooks and the report built anew, whole trials and guards of scripts, all loops,
# all solutions of the exercises.
test-all: test
	$(TESTS) -m long $(AGAIN)

# The tool and the pieces on each torch, installed into a folder outside of the project: some 6 GB a version.
TORCHES := 2.6.0 2.7.1 2.8.0 2.9.1 2.11.0 2.13.0 newest
TORCHES_FOLDER ?= $(HOME)/.cache/dlspeed-torches

test-torches: $(VENV)/installed
	$(RUN) tests/torches.py --install $(TORCHES_FOLDER) $(TORCHES)

# Executes the notebooks and keeps their outputs in them, too.
notebooks: $(VENV)/installed
	$(RUN) -m helpers report --save-notebooks

measure: $(VENV)/installed
	$(RUN) -m helpers measure

doctor: $(VENV)/installed
	$(RUN) -m helpers doctor

clean:
	rm -rf $(VENV)

$(VENV)/installed: requirements.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or 3.12 with its venv module; set PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }
	$(PIP) install -r requirements.txt
	touch $@

$(VENV)/installed-tests: $(VENV)/installed tests/requirements.txt tests/requirements-triton.txt
	$(PIP) install -r tests/requirements.txt
	$(RUN) -c 'import triton' 2>/dev/null || $(PIP) install -r tests/requirements-triton.txt
	touch $@
