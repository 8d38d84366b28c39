# `make demo` runs the main job, `make test` checks everything. Both set themselves up in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Hundreds of processes are started by the tests; without compiled files each would compile our sources anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick lint docs clean

demo: $(READY)
	$(BIN)/drumline demo

# Much of it waits for other processes, so three at a time fill two cores; a file stays together, with what it sets up.
test: lint
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

quick: $(READY)
	$(BIN)/python -m pytest -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python docs/make_recipe_reference.py
	$(BIN)/python docs/make_method_table.py
	$(BIN)/python docs/make_architecture_map.py

clean:
	rm -rf $(VENV) build src/*.egg-info src/drumline/native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/drumline/native/*.[ch])
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Drumline needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "setuptools>=77" wheel
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@
