# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help
.PHONY: help setup demo serve cluster test test-matrix test-in-place test-fast test-vllm fuzz check audit bench eval-demo train-demo clean

BIN := .venv/bin
# Each worker takes whole files, whose tests share engines, in the order of tests/conftest.py; ARGS="-n 0": one process.
PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

IN_PLACE := $(addprefix tests/engine/test_,in_place.py exactness.py faults.py isolation.py concurrency.py churn.py)

FUZZERS := tests/app/http/test_sse.py tests/app/prompt/test_documents_middleware.py tests/app/documents/test_request_documents.py \
	tests/app/test_strange_peers.py tests/cache/test_directory.py tests/replicas/test_redis_registry.py \
	tests/engine_ext/wire/test_chunk_file.py tests/engine/test_schema.py

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install into .venv (EXTRA=cpu|cuda|ascend, PYTHON=python3.11)
	@scripts/setup.sh

demo: setup ## serve SmolLM2 on a few documents and show it at work; flags in ARGS (--port PORT, --once)
	$(BIN)/tessera demo $(ARGS)

serve: setup ## serve MODEL (default: SmolLM2); more flags in ARGS
	$(BIN)/tessera serve $(MODEL) $(ARGS)

cluster: setup ## serve MODEL (default: SmolLM2) with two replicas behind a router; more flags in ARGS
	@scripts/test_servers.sh
	$(BIN)/tessera cluster $(MODEL) $(ARGS)

test: setup ## run the tests; a part of them in ARGS
	@scripts/test_servers.sh
	$(BIN)/python -m pytest -m "not matrix" $(PARALLEL) $(ARGS)

test-matrix: setup ## run the tests of further models, features and forms of deployment; a part of them in ARGS
	@scripts/test_servers.sh
	$(BIN)/python -m pytest -m matrix $(PARALLEL) $(ARGS)

test-in-place: setup ## run tests of exactness, faults and isolation with chunks shared in place; others in ARGS
	@scripts/test_servers.sh
	TESSERA_CHUNK_CACHE_PLACEMENT=in-place $(BIN)/python -m pytest $(PARALLEL) $(or $(ARGS),$(IN_PLACE))

test-fast: setup ## run the tests that start no engine
	@scripts/test_servers.sh
	$(BIN)/python -m pytest -m "not engine" $(PARALLEL) $(ARGS)

test-vllm: ## run the engine's tests with another vLLM (VLLM=0.31.0), in an environment of its own; a part of them in ARGS
	@[ -n "$(VLLM)" ] || { echo "name a version: make test-vllm VLLM=0.31.0"; exit 2; }
	@scripts/setup.sh
	@scripts/test_servers.sh
	$(VENV)/bin/python -m pytest $(PARALLEL) $(or $(ARGS),tests/engine tests/engine_ext)

fuzz: setup ## run the fuzzers for long: FUZZ_EXAMPLES (3000) for each, SCHEMA_CASES (5000) of the OpenAPI page
	@scripts/test_servers.sh
	$(BIN)/python -m pytest $(or $(ARGS),$(FUZZERS))

check: setup ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

audit: setup ## list what is installed in build/sbom.json, and look up known vulnerabilities in it; flags in ARGS
	$(BIN)/python scripts/audit.py $(ARGS)

bench: setup ## measure speed beside stock vLLM; workloads and flags in ARGS (--long, --output DIR)
	$(BIN)/tessera bench $(ARGS)

eval-demo: setup ## measure the tiny demo model's accuracy, with chunks reused and without; flags in ARGS
	$(BIN)/tessera eval --demo $(ARGS)

train-demo: setup ## train the tiny demo model anew (hours on two cores); TRAIN_STEPS=20 stops there
	$(BIN)/python -m training.train $(if $(TRAIN_STEPS),--steps $(TRAIN_STEPS)) $(ARGS)

clean: ## remove environments, builds and caches
	rm -rf .venv .venv-vllm-* build dist .hypothesis .schemathesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Tests need no network: neither the engine nor the tokenizer may look for one.
test test-matrix test-fast test-vllm fuzz: export HF_HUB_OFFLINE = 1
test test-matrix test-fast test-vllm fuzz: export VLLM_NO_USAGE_STATS = 1
fuzz: export FUZZ_EXAMPLES ?= 3000
fuzz: export SCHEMA_CASES ?= 5000
test-vllm: export VENV = .venv-vllm-$(VLLM)
