# Targets for users (serve, demo) and developers (test, check, bench, format). See CONTRIBUTING.md.
PORT ?= 8000
CONFIG ?= demo/models.yaml
PYTHON := .venv/bin/python
WORKERS ?= 2
# A file stays in one worker, and the order of the files is that of tests/conftest.py.
PYTEST := $(PYTHON) -m pytest -n $(WORKERS) --no-loadscope-reorder
EXACT := $(addprefix tests/contract/test_,exactness.py logprob.py quantized.py tlens.py)

.PHONY: serve cluster demo setup test test-first test-full test-all test-fast test-containers test-cluster \
	test-avx2 families check format bench gpu-check openapi client docs playground lock clean

serve: ## install what is missing, then serve CONFIG on PORT
	@requirements/install.sh server
	@exec .venv/bin/logsteer-server --config $(CONFIG) --port $(PORT)

cluster: setup ## serve CONFIG on PORT with Ray Serve, on this machine
	@PATH="$(CURDIR)/.venv/bin:$$PATH" LOGSTEER_PORT=$(PORT) exec deploy/ray/local.sh $(CONFIG)

demo: ## serve the demo model, make three calls, print the answers, stop
	@requirements/install.sh server
	@$(PYTHON) demo/show.py --port $(PORT)

setup: ## everything into .venv, test and benchmark dependencies included
	@requirements/install.sh dev

test: setup ## what a change is held to before it is committed: checks, and beside them the tests
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check test-first

test-first: setup ## all that needs no engine, and of the engines the promises
	@$(PYTEST) -m "not full"

test-full: setup ## the tests that `make test` leaves out
	@$(PYTEST) -m full

test-all: ## everything but what CONTRIBUTING.md lists as run by hand
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-full
	@$(MAKE) --no-print-directory test-avx2

test-fast: setup ## the tests that need no engine
	@$(PYTEST) -m "not engine and not full"

test-avx2: setup ## the tests of exactness as on a CPU without AVX-512
	@ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 $(PYTEST) -k "not two_ranks" $(EXACT)

families: setup ## every family of models on both engines against transformers: docs/families.md
	@FAMILIES=all $(PYTHON) -m pytest tests/families

check: setup ## linters, types, schemas: what the pre-commit hooks run
	@$(PYTHON) -m pre_commit run --all-files --show-diff-on-failure

format: setup ## format the code
	@.venv/bin/ruff format .
	@.venv/bin/ruff check --fix .

bench: setup ## run the benchmarks, write their results and tables in bench/: of small models, then of SmolLM2
	@$(PYTHON) -m bench.run
	@$(PYTHON) -m bench.run --model smollm2 --output bench/smollm2-results.json

test-containers: setup ## build the image, run it, hold it to what the manifests say; takes a Docker engine
	@CONTAINERS=$${CONTAINERS:-all} $(PYTHON) -m pytest -n 0 -s tests/containers

test-cluster: setup ## the service on a real Ray of this machine: what takes minutes, too
	@CLUSTER=all $(PYTHON) -m pytest -n 0 -s tests/cluster

gpu-check: setup ## check and measure on the GPU, write bench/gpu-check.md; GPU_CHECK gives options
	@$(PYTHON) -m bench.gpu_check $(GPU_CHECK)

openapi: setup ## write openapi.json anew from the schemas
	@$(PYTHON) -m docs.openapi > openapi.json

playground: ## build the page that the server answers / with, from server/playground
	@npm --prefix server/playground ci
	@npm --prefix server/playground run build

client: setup ## write the client's methods anew from the table of endpoints and the schemas
	@$(PYTHON) client/generator.py

docs: setup ## write the pages that follow from the code, build the documentation into site/
	@$(PYTHON) -m docs.reference docs
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet

lock: setup ## write the lock files anew
	@PATH=$(CURDIR)/.venv/bin:$$PATH requirements/compile.sh

clean: ## remove .venv and caches
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis
