# One command each: `make demo` shows Shoal at work, `make test` passes the tests. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INTEGRATED := $(VENV)/.ready-integrations
DOCUMENTED := $(VENV)/.ready-docs
DEMO := shoal-reports/demo

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit("Shoal needs Python 3.11 or newer, this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.11") if sys.version_info < (3, 11) else 0'

.PHONY: setup docs figures demo test test-fast test-slow test-gpu check format bench clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,report]'
	touch $(READY)

demo: setup
	$(BIN)/shoal doctor
	$(BIN)/shoal bench accuracy --task digits --np 4 --strategies all-reduce,neighbor,pair,local-sgd --device cpu \
		--splits iid --seeds 1 --report $(DEMO)/1-training.json
	$(BIN)/python examples/train_with_experts.py
	$(BIN)/shoal bench experts --preset minimalistic --hidden-dim 256 --report $(DEMO)/2-experts.json
	$(BIN)/shoal bench dht --num-peers 64 --num-experts 256 --report $(DEMO)/3-dht.json
	$(BIN)/shoal bench transport --short --report $(DEMO)/4-transport.json
	$(BIN)/shoal compare --task digits --workers 4 --strategies all-reduce,neighbor,pair,local-sgd --profile home \
		--report $(DEMO)/5-home-network.json
	$(BIN)/shoal report $(DEMO)/*.json -o report.html
	$(BIN)/shoal report $(DEMO)/5-home-network.json -o $(DEMO)/home-network.html --picture home-network.svg \
		--title "Four workers behind simulated 20 Mbit/s lines learn to read digits" > /dev/null
	@echo "Open report.html in a browser: $(CURDIR)/report.html"
	@echo "Accuracy over time in the last of them, as a picture: $(CURDIR)/home-network.svg"

test: setup
	$(BIN)/python tools/halves.py -m "not slow"

# for the loop of a developer: what fits into a minute
test-fast: setup
	$(BIN)/python tools/halves.py --fast -m "not slow" -q

# the libraries that Shoal works with are large, and only slow tests need them
$(INTEGRATED): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[integrations]'
	touch $(INTEGRATED)

test-slow: $(INTEGRATED)
	$(BIN)/python tools/halves.py --slow

# tests that need a GPU, and what groups and strategies promise, with tensors there
test-gpu: setup
	$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no GPU here: see what shoal doctor says.")'
	$(BIN)/python -m pytest -m gpu
	SHOAL_TEST_DEVICE=cuda $(BIN)/python -m pytest --timeout 180 -m "not slow" tests/contracts/test_group.py tests/contracts/test_strategy.py

# the documentation as a site, in site/; a broken link or a public name without a page fails. It is made of the
# source alone: neither torch nor Shoal has to be installed
$(DOCUMENTED): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		$$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $(DOCUMENTED)

docs: $(DOCUMENTED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open site/index.html in a browser: $(CURDIR)/site/index.html"

# the tables of docs/which-strategy.md and the picture of the README: half an hour on two cores
figures: setup
	$(BIN)/python tools/figures.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/law.py src/shoal
	$(BIN)/python tools/packaging_checks.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/shoal bench transport
	$(BIN)/shoal bench collectives --short
	$(BIN)/shoal bench training --short

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
