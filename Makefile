# One command each: `make demo` shows Shoal at work, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test test-slow check format bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11") if sys.version_info < (3, 11) else 0'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,report]'
	touch $(READY)

demo: setup
	$(BIN)/shoal doctor
	$(BIN)/shoal run -np 2 --strategy all-reduce examples/train_digits.py --epochs 5
	$(BIN)/shoal run -np 2 --strategy neighbor examples/train_digits.py --epochs 5
	$(BIN)/python examples/train_with_experts.py
	$(BIN)/shoal bench transport --short --report shoal-reports/demo.json
	$(BIN)/shoal report shoal-reports/demo.json -o demo-report.html

test: setup
	$(BIN)/python tools/halves.py -m "not slow"

test-slow: setup
	$(BIN)/python -m pytest -m slow

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/law.py src/shoal

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/shoal bench transport
	$(BIN)/shoal bench collectives --short
	$(BIN)/shoal bench training --short

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
