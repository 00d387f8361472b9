# Both commands set up their own .venv from pinned requirements; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.ready

.PHONY: demo test lint types mutate clean

demo: $(STAMP)
	$(PY) -m megamoe demo

test: $(STAMP) lint types
	$(PY) -m pytest -n auto

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

# Weakens each synchronisation call of the kernels in turn, in the simulator; fails when nothing notices a new one.
mutate: $(STAMP)
	$(PY) -m megamoe sim mutate --survivors tests/mutation_survivors.json

$(STAMP): requirements/dev.txt pyproject.toml
	@echo 'Setting up $(VENV) from requirements/dev.txt: once, a few minutes'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q -r requirements/dev.txt
	$(PY) -m pip install -q --no-deps --no-build-isolation -e .
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
