# SPDX-License-Identifier: Apache-2.0
.DEFAULT_GOAL := help
.PHONY: help setup demo serve cluster test test-rest test-all test-in-place test-attend test-gpu-runtime test-amx test-tiers test-nixl test-integrations test-fast containers coverage fuzz check audit bench eval-demo train-demo clean

BIN := .venv/bin
# COVERAGE=1 keeps the lines that a run reaches, for `make coverage`.
PYTEST = $(BIN)/python $(if $(COVERAGE),-m coverage run) -m pytest
# Each worker runs whole files, and all tests of a shared engine (tests/conftest.py); ARGS="-n 0": one process.
PARALLEL := -n auto --dist loadgroup --no-loadscope-reorder

PLACED := $(addprefix tests/engine/test_,exactness.py faults.py isolation.py concurrency.py churn.py)
IN_PLACE := tests/engine/test_in_place.py $(PLACED)
ATTEND := $(addprefix tests/engine/test_,attend.py attend_engine.py tenants.py) $(PLACED)

FUZZERS := tests/app/http/test_sse.py tests/app/test_intake.py tests/app/documents/test_request_documents.py \
	tests/app/test_strange_peers.py tests/cache/test_directory.py tests/replicas/test_redis_registry.py \
	tests/engine_ext/wire/test_chunk_file.py tests/engine/test_schema.py

help: ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## install into .venv (EXTRA=cpu|cuda|ascend, PYTHON=python3.11)
	@scripts/setup.sh

demo: setup ## demonstrate SmolLM2 on a few documents; flags in ARGS (--model MODEL, --port PORT, --once)
	$(BIN)/tessera demo $(ARGS)

serve: setup ## serve MODEL (default: SmolLM2); flags in ARGS
	$(BIN)/tessera serve $(MODEL) $(ARGS)

cluster: setup ## serve MODEL (default: SmolLM2) with two replicas behind a router; flags in ARGS
	@scripts/test_servers.sh
	$(BIN)/tessera cluster $(MODEL) $(ARGS)

containers: ## build the images, start docker/compose.yaml with Docker or Podman, and ask a question
	@scripts/containers.sh

test: setup ## run the tests; a subset in ARGS
	@scripts/test_servers.sh
	$(PYTEST) -m "not matrix" $(PARALLEL) $(ARGS)

test-rest: setup ## run the tests that make test leaves out; --changed-first and --minutes N in ARGS
	@scripts/test_servers.sh
	$(PYTEST) -m matrix $(PARALLEL) $(ARGS)

test-in-place: setup ## run tests with chunks shared in place (exactness, faults, isolation); others in ARGS
	@scripts/test_servers.sh
	TESSERA_CHUNK_CACHE_PLACEMENT=in-place $(PYTEST) $(PARALLEL) $(or $(ARGS),$(IN_PLACE))

test-attend: setup ## run tests with chunks attended to in the pool (exactness, faults, isolation); others in ARGS
	@scripts/test_servers.sh
	TESSERA_CHUNK_CACHE_PLACEMENT=attend $(PYTEST) $(PARALLEL) $(or $(ARGS),$(ATTEND))

test-gpu-runtime: setup ## run tests with the CPU run as vLLM runs GPUs (exactness, faults, isolation); others in ARGS
	@scripts/test_servers.sh
	set -e; for placement in copy in-place; do TESSERA_CHUNK_CACHE_PLACEMENT=$$placement \
		PYTHONPATH="$(CURDIR)/tests/engine/gpu_runtime" $(PYTEST) $(PARALLEL) $(or $(ARGS),$(PLACED)); done

test-amx: setup ## run tests of bfloat16 with K and V in AMX's layout, emulated; others in ARGS
	@scripts/test_servers.sh
	PYTHONPATH="$(CURDIR)/tests/engine/amx_runtime" $(PYTEST) $(PARALLEL) \
		$(or $(ARGS),-k bfloat16 tests/engine/test_exactness.py)

test-tiers: setup ## run tests with tiers on, chunks copied and shared in place (exactness, faults, isolation); others in ARGS
	@scripts/test_servers.sh
	set -e; for placement in copy in-place; do rm -rf build/test-tiers; mkdir -p build/test-tiers; \
		TESSERA_CHUNK_CACHE_PLACEMENT=$$placement \
		TESSERA_CHUNK_CACHE_TIERS="host://?size=64MiB,file://$(CURDIR)/build/test-tiers?size=2GiB" \
		$(PYTEST) $(PARALLEL) $(or $(ARGS),$(PLACED)); done

test-nixl: setup ## install NIXL and run the tests with it, without CUDA; a subset in ARGS
	@scripts/test_servers.sh
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps nixl nixl-cu12
	$(PYTEST) -n 0 $(or $(ARGS),$(addprefix tests/engine/test_,beside.py handover.py))

test-integrations: setup ## install the clients and apps of docs/integrations and run them; a subset in ARGS
	@scripts/test_servers.sh
	@scripts/integrations.sh
	$(PYTEST) -n 0 $(or $(ARGS),$(addprefix tests/engine/test_,integrations.py open_webui.py))

test-all: test test-rest test-in-place test-attend test-gpu-runtime test-amx test-tiers test-nixl test-integrations ## run all tests (hours)

test-fast: setup ## run the tests without an engine
	@scripts/test_servers.sh
	$(PYTEST) -m "not engine" $(PARALLEL) $(ARGS)

coverage: ## report the lines that runs with COVERAGE=1 have reached; fails below 85 % (cache/: 95 %)
	$(BIN)/python -m coverage combine --quiet --append --keep
	$(BIN)/python -m coverage report --skip-covered --sort=miss --fail-under=85
	$(BIN)/python -m coverage report --skip-covered --include="cache/*" --fail-under=95

fuzz: setup ## run long fuzzing: FUZZ_EXAMPLES (3000) each, SCHEMA_CASES (5000) from the OpenAPI page
	@scripts/test_servers.sh
	$(BIN)/python -m pytest $(or $(ARGS),$(FUZZERS))

check: setup ## check lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Its tools have an environment of their own: with one of their dependencies, each process of a server imports for 2 s more.
audit: setup ## write the bill of materials to build/sbom.json and check it for vulnerabilities; flags in ARGS
	@[ -d .venv-audit ] || $(BIN)/python -m venv .venv-audit
	@.venv-audit/bin/python -m pip install --quiet --disable-pip-version-check --requirement scripts/audit-requirements.txt
	.venv-audit/bin/python scripts/audit.py $(ARGS)

bench: setup ## measure speed against stock vLLM; workloads and flags in ARGS (--long, --output DIR)
	$(BIN)/tessera bench $(ARGS)

eval-demo: setup ## measure the tiny demo model's accuracy with and without chunk reuse; flags in ARGS
	$(BIN)/tessera eval --demo $(ARGS)

train-demo: setup ## retrain the tiny demo model (hours on two cores); TRAIN_STEPS=20 stops after 20 steps
	$(BIN)/python -m research.demo_model.train $(if $(TRAIN_STEPS),--steps $(TRAIN_STEPS)) $(ARGS)

clean: ## remove environments, builds and caches
	rm -rf .venv .venv-audit .venv-compose .venv-integrations .venv-open-webui build dist .hypothesis .schemathesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Tests need no network: engine and tokenizer run offline.
test test-rest test-fast fuzz: export HF_HUB_OFFLINE = 1
test test-rest test-fast fuzz: export VLLM_NO_USAGE_STATS = 1
fuzz: export FUZZ_EXAMPLES ?= 3000
fuzz: export SCHEMA_CASES ?= 5000
