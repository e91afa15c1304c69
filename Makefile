# The verbs. `make run` and `make test` are all a new machine needs; the rest builds on them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Processes that run tests side by side. Those that share a cluster go to the same one, which mostly
# waits for daemons: two cores have time for a third, and 24 GiB of memory have no room for it.
WORKERS ?= $(shell awk '/^MemTotal/ {print ($$2 > 28000000 ? 3 : 2)}' /proc/meminfo 2>/dev/null || echo 2)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt
# Before the tests, which have a time limit each, and so that none of them waits for the network.
FETCH_HADOOP := from weightyard.settings import Settings; \
  from weightyard.testing.cluster.java import installed_java; installed_java(Settings(), say=print)

# Hundreds of processes are started by the tests; each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run setup setup-dev setup-bench test tests test-long test-vllm check fmt bench map docker-test clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/ready-run ## .venv with what `make run` needs

setup-dev: $(VENV)/ready-dev

setup-bench: $(VENV)/ready-bench

run: setup ## push an example model and serve it; says what to try in a second terminal
	@$(BIN)/python examples/try_it.py

test: setup-dev ## checks and tests, those on a real mini-HDFS too
	@$(MAKE) --no-print-directory --jobs=2 check tests

tests: setup-dev # side by side with the checks
	$(PYTEST)

test-long: setup-dev ## what is too long for every change
	$(PYTEST) -m long -o faulthandler_timeout=1800

# vLLM wants a torch of its own; its imports warn of what is not ours to mend.
test-vllm: setup-dev ## the load format with vLLM itself, in an environment of its own (8 GB)
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python $(VENV)-vllm
	$(BIN)/uv pip install --quiet --python $(VENV)-vllm/bin/python --editable '.[test-vllm]'
	$(VENV)-vllm/bin/python -m pytest tests/loader/test_vllm.py tests/loader/test_vllm_plugin.py \
	  -W ignore::DeprecationWarning -W ignore::UserWarning

check: setup-dev ## format, lint, types, import rules; changes nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup-dev ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup-bench ## measure against the peers; writes docs/benchmarks.md, README's numbers, bench/results.json
	$(BIN)/python -m bench

map: setup-dev ## write docs/modules.md: what every module is
	$(BIN)/python docs/modules.py

docker-test: setup-dev ## store and service on the compose cluster (needs a Docker engine)
	$(BIN)/python docker/run_tests.py

clean: ## remove .venv and caches of this folder
	rm -rf $(VENV) $(VENV)-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit("weightyard needs Python 3.11 or newer, and $(PYTHON) is %d.%d: make PYTHON=python3.12, or what yours is called" % sys.version_info[:2] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv

$(VENV)/ready-run: pyproject.toml constraints.txt hatch_build.py $(wildcard weightyard/codec/*.[ch]) | $(BIN)/uv
	$(UV) --editable '.[service]'
	@touch $@

$(VENV)/ready-dev: pyproject.toml constraints.txt | $(VENV)/ready-run
	$(UV) --editable '.[dev]'
	@$(BIN)/python -c '$(FETCH_HADOOP)'
	@touch $@

$(VENV)/ready-bench: pyproject.toml constraints.txt | $(VENV)/ready-dev
	$(UV) --editable '.[dev,bench]'
	@touch $@
