# The commands of the project; `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

JOBS ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)

RELEASE := build/release
PROGRAM := $(RELEASE)/cli/deltic

.PHONY: help
help: ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

.PHONY: demo
demo: ## install what is missing, build library and program, run `deltic demo`
	@tools/install_deps.sh demo
	@cmake --preset demo -B build/native -DDELTIC_CPU_TARGETS=native \
	  -DDELTIC_CUDA=$$(nvidia-smi -L >/dev/null 2>&1 && echo AUTO || echo OFF)
	@cmake --build build/native
	@build/native/cli/deltic demo
	@echo "The program is build/native/cli/deltic, for this machine's CPU."

.PHONY: test
test: ## everything CI runs: checks, builds, tests, sanitizers, install, examples
	@tools/install_deps.sh test
	@tools/test.sh

.PHONY: build
build: ## release build of library, program and tests
	@tools/install_deps.sh test
	@cmake --preset release
	@cmake --build --preset release

.PHONY: bench
bench: build ## `deltic bench` on this machine, JSON in build/bench.json
	@$(PROGRAM) bench --json build/bench.json

.PHONY: wheel
wheel: ## build the Python wheel, check it, run it in an empty environment
	@tools/make_wheel.sh

.PHONY: hub
hub: ## lay out a kernel repository for Hugging Face's hub in build/hub, check it
	@tools/make_hub.py

.PHONY: format
format: ## rewrite sources in the project's format
	@tools/check_format.sh --fix

.PHONY: clean
clean: ## remove build folders and the tools' environment
	@rm -rf build .venv
