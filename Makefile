# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help
.PHONY: help setup serve test test-fast check bench clean

BIN := .venv/bin

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install into .venv (EXTRA=cpu|cuda|ascend, PYTHON=python3.11)
	@scripts/setup.sh

serve: setup ## serve MODEL (default: a small random model); more flags in ARGS
	$(BIN)/tessera serve $(MODEL) $(ARGS)

test: setup ## run all tests
	$(BIN)/python -m pytest $(ARGS)

test-fast: setup ## run the tests that start no engine
	$(BIN)/python -m pytest -m "not engine" $(ARGS)

check: setup ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## measure time to first token; flags in ARGS
	$(BIN)/python -m benchmarks.ttft $(ARGS)

clean: ## remove .venv, builds and caches
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Tests need no network: neither the engine nor the tokenizer may look for one.
test test-fast: export HF_HUB_OFFLINE = 1
test test-fast: export VLLM_NO_USAGE_STATS = 1
