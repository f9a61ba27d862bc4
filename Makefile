# make demo: everything from a bare checkout to a report.   make test: install and run the tests.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
RUN_DIR ?= runs/demo
# A Linux user without a GPU avoids the CUDA download with
#   make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
TORCH := torch==2.13.0

.PHONY: demo test test-fast test-e2e lint install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml .ci/constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH)"
	$(BIN)/pip install --quiet --constraint .ci/constraints-cpu.txt --editable ".[verl,retriever,lab,dev]"
	touch $@

demo: install
	$(BIN)/verl-credit train --config-name lab run_dir=$(RUN_DIR) $(ARGS)

test: lint test-fast test-e2e

test-fast: install
	$(BIN)/python -m pytest -m "not e2e"

test-e2e: install
	$(BIN)/python -m pytest -m e2e

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
