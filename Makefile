# Each command does all the set-up that it needs: a virtual environment, torch, the build.
#
#   make test                       on a fresh machine too
#   make test VENV=/path/to/env     in an environment that exists; a torch in it is kept
#   make test ARGS="-k causal"      ARGS go to pytest, to the demo or to the benchmark

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.11.0
PRESET ?= cpu
ARGS ?=

python := $(VENV)/bin/python
installed := $(VENV)/.flashattn-installed
linters := $(VENV)/.flashattn-linters
built := $(VENV)/.flashattn-built
settings := $(VENV)/.flashattn-settings
sources := $(shell find csrc -type f) setup.py pyproject.toml tools/compile_objects.py
formatted := $(shell find csrc examples -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: help setup build test demo bench lint format sanitize gpu-test clean distclean always

help:
	@echo "make demo      train a small GPT on the CPU or GPU, beside torch's own attention"
	@echo "make test      the test suite"
	@echo "make bench     a benchmark: PRESET=cpu, h200, gqa, qk192, packed, short, host, memory, ..."
	@echo "make lint      formatting and lint; make format puts the formatting right"
	@echo "make gpu-test  the suite on this machine's GPU; make sanitize: under compute-sanitizer"
	@echo "make build     only the build; make clean, make distclean: undo it, and the environment"

$(python):
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	  "flashattn needs Python 3.10 or newer (make PYTHON=...), this is " + sys.version)'
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

$(installed): requirements-dev.txt | $(python)
	$(python) -c 'import torch, sys; \
	  sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10))' 2>/dev/null \
	  || $(python) -m pip install -q $(TORCH)
	$(python) -m pip install -q -r requirements-dev.txt
	@touch $@

$(linters): requirements-lint.txt | $(python)
	$(python) -m pip install -q -r requirements-lint.txt
	@touch $@

# In place, and on the environment's path by a .pth file: an editable install would compile
# everything again after each change.
$(built): $(sources) $(settings) | $(installed)
	$(python) setup.py -q build_ext --inplace
	@$(python) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  | while read -r site; do echo "$(CURDIR)" > "$$site/flashattn-development.pth"; done
	@touch $@

# Newer than the build when the build's environment variables have changed since.
$(settings): always | $(python)
	@echo "$(FLASHATTN_BUILD) $(FLASHATTN_CUDA_ARCHS) $(FLASHATTN_WERROR)" > $@.now
	@cmp -s $@.now $@ || cp $@.now $@

always:

setup: $(installed)

build: $(built)

test: $(built)
	$(python) -m pytest $(ARGS)

demo: $(built)
	$(python) examples/train_char_gpt.py --compare $(ARGS)

bench: $(built)
	$(python) benchmarks/run.py --preset $(PRESET) --json out/$(PRESET).json $(ARGS)
	$(python) benchmarks/plot.py out/$(PRESET).json

lint: $(linters)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(formatted)

format: $(linters)
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format
	$(VENV)/bin/clang-format -i $(formatted)

sanitize: $(built)
	PYTHON=$(python) tools/sanitize.sh

gpu-test: $(built)
	PYTHON=$(python) OUT=$${OUT:-out/gpu} tools/gpu_suite.sh $(ARGS)

clean:
	rm -rf build out flashattn/*.so flashattn.egg-info $(built)

distclean: clean
	rm -rf .venv
