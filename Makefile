# Two commands matter: `make demo` and `make test`. Both set up all they need.
.DEFAULT_GOAL := help
.PHONY: help setup demo test bench check format generate clean

PYTHON ?= python3
BIN := .venv/bin
export PYTHONUNBUFFERED := 1

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.venv/.synced: pyproject.toml uv.lock
	@test -x $(BIN)/uv || { $(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet uv; }
	@$(BIN)/uv sync --quiet --locked --all-extras
	@touch $@

setup: .venv/.synced ## Make .venv from the lock file, and build the local control plane unless it is cached
	@$(BIN)/python -c "from queuectl.local.build import binaries; binaries()"

demo: setup ## Run a window of a real trace on simulated nodes; KEEP=1 leaves it running
	@$(BIN)/python -m queuectl.demo $(if $(KEEP),--keep)

test: setup ## Run all tests, on a real control plane and a real Postgres
	$(BIN)/python -m pytest -n 3 --dist loadfile --durations 10

bench: setup ## Run the benchmarks; they print ratios measured in one run
	$(BIN)/python -m tests.bench

check: .venv/.synced ## Lint, types, layers, and whether generated files are current
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m queuectl.kube.manifests --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m queuectl.cli.docs --check

format: .venv/.synced ## Format and mend what can be mended by itself
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

generate: .venv/.synced ## Write all generated files anew: crds/, config/base/policies.yaml, docs/reference/
	$(BIN)/python -m queuectl.kube.manifests --write
	$(BIN)/python docs/generate.py --write
	$(BIN)/python -m queuectl.cli.docs --write

clean: ## Remove what the commands above made here
	rm -rf .venv .state .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
