# The verbs of this project. `make help` prints them with what follows their `##`.

VENV := .venv
BIN := $(VENV)/bin
# A distribution builds its interpreter with a profile, a version manager mostly does not: an eighth less time for everything.
PYTHON ?= $(shell /usr/bin/python3 -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo /usr/bin/python3 || echo python3)
MINUTES ?= 10
BENCH ?= commit
ARGS ?=

# Without compiled modules every process begins by compiling all that it loads: an agent would be late to its first beat.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test check bench soak docs clean

help: ## say what each verb does
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make .venv with everything in constraints.txt; near-instant when nothing changed
	@$(PYTHON) tools/setup.py

demo: setup ## run real work, explain what waits, kill a machine and the server, and say what was checked
	@$(BIN)/remit demo $(ARGS)

test: setup ## lint, types, layers and every test, group by group, with the time of each
	@$(BIN)/python tools/groups.py $(ARGS)

check: setup ## the static part of `make test`: lint, format, types, layers, generated docs, tidiness
	@$(BIN)/python tools/groups.py static $(ARGS)

bench: setup ## measure durable binds a second and simulated hours a minute (BENCH=simulate ARGS="--quick --json")
	@$(BIN)/remit bench $(BENCH) $(ARGS)

soak: ## kill and stop real processes under load, then simulate hours of faults with fresh seeds for MINUTES (default 10)
	@$(PYTHON) tools/setup.py soak
	@$(BIN)/python tools/soak.py --minutes $(MINUTES) $(ARGS)

docs: setup ## write the pages that are generated from the code
	@$(BIN)/python -m remit.docgen.generate
	@$(BIN)/python tools/citations.py

clean: ## remove the environment, caches and reports
	@rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	@find src tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
