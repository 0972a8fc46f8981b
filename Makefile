# kvpolicy. `make help` lists the targets. Everything is installed into .venv; a second call is instant.

PYTHON      ?= python3
VENV        ?= .venv
TORCH_INDEX ?=
DRYRUN_PYTHONS ?= 3.12 3.14
ARGS        ?=

# cuda where an NVIDIA GPU answers, else cpu. `make DEVICE=cpu ...` decides otherwise.
DEVICE      ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
DEVICE      := $(DEVICE)

BIN         := $(VENV)/bin
CONSTRAINTS := constraints/$(DEVICE).txt
CPU_INDEX   := https://download.pytorch.org/whl/cpu
PIP          = $(BIN)/python -m pip install -qq --constraint $(CONSTRAINTS)

export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Exit status 0 if the address answers within five seconds.
PROBE := import os, sys, threading, urllib.request as u; \
  t = threading.Timer(5, os._exit, (1,)); t.daemon = True; t.start(); \
  u.urlopen(sys.argv[1]).close()

# install-torch PYTHON: the torch wheel alone; what it needs comes from pip's own index with the rest.
# On Linux PyPI's torch is the CUDA build of several GB, so a machine without a GPU asks PyTorch's CPU index.
define install-torch
	@index='$(TORCH_INDEX)'; \
	if [ -z "$$index" ] && [ "$(DEVICE)" = cpu ] && [ "$$(uname -s)" = Linux ]; then \
	  if $(1) -c '$(PROBE)' $(CPU_INDEX)/torch/ >/dev/null 2>&1; then index=$(CPU_INDEX); \
	  else echo "$(CPU_INDEX) does not answer: torch comes from pip's own index,"; \
	    echo "where it may be the CUDA build of several GB. TORCH_INDEX=URL names another index."; fi; \
	fi; \
	torch=$$(grep '^torch==' $(CONSTRAINTS)); \
	echo "Installing $$torch for $(DEVICE) from $${index:-pip's own index}"; \
	$(1) -m pip install $$([ -t 1 ] || echo -qq) --no-deps $${index:+--index-url "$$index"} "$$torch"
endef

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-full lint typecheck dryrun wheel-check clean

help:
	@echo "make install      kvpolicy into $(VENV), editable, with exact versions from constraints/"
	@echo "make demo         install with matplotlib, then the demonstration: kvpolicy demo"
	@echo "make test         install with the test tools, then the tests (ARGS='-k name' goes to pytest)"
	@echo "make test-full    the same with the long forms"
	@echo "make lint         ruff"
	@echo "make typecheck    mypy --strict on an installed copy"
	@echo "make dryrun       do constraints/*.txt agree with the ranges in pyproject.toml?"
	@echo "make wheel-check  build the wheel, install it into a new environment, run it from elsewhere"
	@echo "make clean        remove $(VENV), build outputs and caches (not runs/)"
	@echo
	@echo "PYTHON=$(PYTHON)   the Python to use, 3.11 or newer"
	@echo "DEVICE=$(DEVICE)       cpu or cuda; found by asking nvidia-smi"
	@echo "TORCH_INDEX=URL   where torch comes from. Default: PyTorch's CPU index on Linux without a GPU"
	@echo "                  if it answers, else pip's own index (PyPI)"

# ---- the environment, by stamps ---------------------------------------------------------------------------------

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null 2>&1 || \
	  { echo "kvpolicy needs Python 3.11 or newer; there is no '$(PYTHON)'. Use make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "kvpolicy needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Use make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch-$(DEVICE): $(CONSTRAINTS) | $(VENV)/.created
	@for stamp in $(VENV)/.torch-*; do \
	  if [ -e "$$stamp" ] && [ "$$stamp" != "$@" ]; then \
	    echo "$(VENV) was made for $${stamp##*-}, not for $(DEVICE): run make clean first" >&2; exit 1; fi; \
	done
	$(call install-torch,$(BIN)/python)
	@touch $@

$(VENV)/.base: pyproject.toml $(VENV)/.torch-$(DEVICE)
	@echo "Installing kvpolicy"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch-$(DEVICE)
	@echo "Installing kvpolicy and the test tools"
	@$(PIP) --editable '.[dev]'
	@touch $(VENV)/.base $(VENV)/.plot $@

# With matplotlib, for the picture that the demonstration ends with.
$(VENV)/.plot: pyproject.toml $(VENV)/.torch-$(DEVICE)
	@echo "Installing kvpolicy and matplotlib"
	@$(PIP) --editable '.[plot]'
	@touch $(VENV)/.base $@

install: $(VENV)/.base

# ---- use and tests ----------------------------------------------------------------------------------------------

demo: $(VENV)/.plot
	@$(BIN)/kvpolicy demo $(ARGS)

# Files of tests are dealt out to so many processes, each with one thread of torch: more wait for each other.
WORKERS ?= 2

test: $(VENV)/.dev
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/pytest -n $(WORKERS) --dist loadfile $(ARGS)

test-full: $(VENV)/.dev
	$(BIN)/pytest --full $(ARGS)

# ---- checks -----------------------------------------------------------------------------------------------------

lint: $(VENV)/.dev
	$(BIN)/ruff check .

# A copy, because mypy cannot follow the mapping env/ -> kvpolicy/env; from inside it, because the folder
# kvpolicy/ of the checkout would hide the copy. build/ goes first: setuptools would pack stale files of build/lib.
typecheck: $(VENV)/.dev
	@rm -rf build
	@$(BIN)/python -m pip install -qq --no-deps --target build/typecheck .
	cd build/typecheck && $(abspath $(BIN))/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p kvpolicy

dryrun: $(VENV)/.dev
	$(BIN)/python constraints/check.py cpu
	$(BIN)/python constraints/check.py cuda --python $(DRYRUN_PYTHONS)

wheel-check: $(VENV)/.dev
	@rm -rf build dist
	@mkdir -p build
	@$(BIN)/python -m build --outdir dist . > build/log 2>&1 || { cat build/log; exit 1; }
	@$(BIN)/python -m venv build/wheel
	$(call install-torch,build/wheel/bin/python)
	@build/wheel/bin/python -m pip install -qq --constraint $(CONSTRAINTS) dist/kvpolicy-*.whl
	@mkdir -p build/elsewhere
	cd build/elsewhere && ../wheel/bin/kvpolicy --version
	cd build/elsewhere && ../wheel/bin/kvpolicy info
	cd build/elsewhere && ../wheel/bin/kvpolicy run --device cpu --max-new-tokens 16 'def main():'
	cd build/elsewhere && ../wheel/bin/kvpolicy run --device cpu --clock steps \
	  --workload 'trace:azure-conv?rate=0.1&duration=20&text=heldout' --logdir runs

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
