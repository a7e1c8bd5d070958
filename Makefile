# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer: no GPU, no model hub, no token.
PYTHON ?= python3
VENV ?= .venv
export GPTOSS_VENV := $(VENV)
BIN := $(VENV)/bin

# Every one of hundreds of processes would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# One more than two cores, because tests wait. Of six thousand tests, many with kills and clocks, one to three failed in
# a third of all runs and passed alone: a failed test runs once more, and the summary lists it as RERUN.
WORKERS ?= 3
PYTEST = "$(BIN)/python" -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --tb=short
PYTEST += --reruns=1 -raR
COVERAGE ?=
ifneq ($(COVERAGE),)
PYTEST += --cov --cov-report=term:skip-covered
endif

DURATIONS ?=
ifneq ($(DURATIONS),)
export GPTOSS_DURATIONS := 1
endif

.PHONY: demo serve test contract test-gpu check soak mutants lint environment environment-test environment-soak model clean

demo: environment       ## serve the bundled small gpt-oss with real vLLM and ask it a question
	@exec "$(BIN)/python" -m demo.run --end-with-parent

PORT ?= 8000
serve: environment      ## the same server, kept running on port 8000, or `make serve PORT=8123`
	@exec "$(BIN)/python" -m demo.run --end-with-parent --keep --port "$(PORT)"

test: environment-test lint  ## everything that needs no GPU; COVERAGE=1 counts lines too
	@"$(BIN)/python" scripts/vllm_source.py
	@$(PYTEST) --durations=40 --durations-min=5 $(ARGS)

contract: environment-test  ## what a vLLM release changes: VLLM="0.34.0 a.whl https://….whl folder"
	@"$(BIN)/python" scripts/vllm_source.py
	@"$(BIN)/python" -m tests.contract.report $(VLLM)

test-gpu:               ## everything that a GPU can run, with $(PYTHON), which has vLLM for CUDA; keeps a record
	@"$(PYTHON)" -m tests.gpu.suite $(ARGS)

check: lint             ## what needs no engine: lint, types, and the tests of less than a second
	@$(PYTEST) -m "not vllm and not serve and not slow and not soak and not gpu" $(ARGS)

soak: environment-soak  ## the long tests in full: a million streams, thousands of conversations
	@GPTOSS_SOAK=1 "$(BIN)/python" -m pytest -m soak $(ARGS)

mutants: environment-test  ## which single changes of risky code no test notices; continues where it stopped
	@"$(BIN)/python" -m scripts.mutants run $(ARGS)

lint: environment-test
	@"$(BIN)/ruff" check . && "$(BIN)/ruff" format --check . && "$(BIN)/mypy"
	@"$(BIN)/clang-format" --dry-run --Werror $$(find vllm_gptoss/engine/kernels/cuda -name '*.cu*')

environment:
	@"$(PYTHON)" scripts/environment.py demo

environment-test:
	@"$(PYTHON)" scripts/environment.py test

environment-soak:
	@"$(PYTHON)" scripts/environment.py soak

clean:                  ## remove what the above made, but not what they downloaded elsewhere
	rm -rf "$(VENV)" "$(VENV).underway" .cache .coverage .mypy_cache .pytest_cache .ruff_cache
