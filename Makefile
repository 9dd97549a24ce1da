# Two commands do all the set-up: `make demo` and `make test`. Both create what they need in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
QTOOL  := $(BIN)/qtool
READY  := $(VENV)/ready

.PHONY: demo test lint clean

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "torch==2.13.0"
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: $(READY)
	QTOOL=$(QTOOL) docs/demo.sh

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest

clean:
	rm -rf $(VENV) demo build *.egg-info
