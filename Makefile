# The verbs of this project. `make help` prints each with the text after its `##`.

VENV := .venv
BIN := $(VENV)/bin
# Distributions build their interpreter with profile-guided optimisation, most version managers do not: 12 % faster.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo /usr/bin/python3 || echo python3)
MINUTES ?= 10
BENCH ?= commit
ARGS ?=

# Without bytecode every process compiles all its imports first, and an agent would miss its first heartbeat.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test verify check bench soak docs clean

help: ## print what each verb does
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## create .venv with the versions of constraints.txt; near-instant if nothing changed
	@$(PYTHON) tools/setup.py

demo: setup ## run workloads, explain pending ones, kill a node and the server, verify the result
	@$(BIN)/remit demo $(ARGS)

test: setup ## lint, types, layers, all fast tests and one real test per capability (12 minutes; ARGS="unit smoke" for some groups)
	@$(BIN)/python tools/groups.py $(ARGS)

verify: setup ## all tests with real processes, sockets and disks (45 minutes)
	@$(BIN)/python tools/groups.py --verify $(ARGS)

check: setup ## only the static part of `make test`: lint, format, types, layers, generated docs, tidiness
	@$(BIN)/python tools/groups.py static $(ARGS)

bench: setup ## run a benchmark (BENCH=simulate ARGS="--quick --json"; default: commit)
	@$(BIN)/remit bench $(BENCH) $(ARGS)

soak: ## kill and stop real processes under load, then simulate faults with fresh seeds for MINUTES (default 10)
	@$(PYTHON) tools/setup.py soak
	@$(BIN)/python tools/soak.py --minutes $(MINUTES) $(ARGS)

docs: setup ## write the docs pages that are generated from the code
	@$(BIN)/python -m remit.docgen.generate
	@$(BIN)/python tools/citations.py

clean: ## remove the environment, caches and reports
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
