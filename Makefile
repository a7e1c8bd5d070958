# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer: no GPU, no model hub, no token.
PYTHON ?= python3
VENV ?= .venv
export GPTOSS_VENV := $(VENV)
BIN := $(VENV)/bin

.PHONY: demo serve test lint environment model clean

demo: environment       ## serve the bundled small gpt-oss with real vLLM and ask it a question
	@$(BIN)/python -m demo.run

serve: environment      ## the same server, kept running
	@$(BIN)/python -m demo.run --keep

test: environment-test lint  ## everything that needs no GPU
	@$(BIN)/python scripts/vllm_source.py
	@$(BIN)/python -m pytest --cov --cov-report=term:skip-covered $(ARGS)

lint: environment-test
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

environment:
	@$(PYTHON) scripts/environment.py demo

environment-test:
	@$(PYTHON) scripts/environment.py test

clean:                  ## remove what the above made, but not what they downloaded elsewhere
	rm -rf $(VENV) $(VENV).underway .cache .coverage .mypy_cache .pytest_cache .ruff_cache
