# The commands of the project. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup demo table test test-unit test-docker test-sandbox check schemas hotswap bench-rollout bench-tools bench-step clean
BIN := .venv/bin

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## make .venv with exactly the locked packages (a second run ends at once)
	@scripts/setup

demo: setup ## train a search agent on this machine through all services, into runs/demo
	@$(BIN)/python scripts/demo

table: setup ## every method of the paper on tiny_world, three seeds each; continues where it stopped
	@$(BIN)/python scripts/demo --world-only
	@$(BIN)/agent-r1 table examples/tiny_world/table.toml

test: setup ## the whole test suite, real Redis, vLLM and DeepSpeed included
	@$(BIN)/python -m pytest

test-unit: setup ## the fast part of the tests
	@$(BIN)/python -m pytest tests/unit tests/contract -m "not slow and not vllm"

test-docker: ## build the image and run the demo in containers (needs Docker)
	@scripts/test_docker

test-sandbox: setup ## every reference solution of HumanEval and MBPP (AGENT_R1_REAL_DATA) through the sandbox
	@$(BIN)/python scripts/test_sandbox

check: setup ## the quality gate: format, lint, types, imports, schemas, words
	@scripts/check

schemas: setup ## write proto/schemas from the message classes
	@$(BIN)/python scripts/schemas

hotswap: setup ## swap tools 50 times while a run trains through them, into runs/hotswap.json
	@$(BIN)/python scripts/demo --world-only
	@$(BIN)/python scripts/hotswap.py

bench-rollout: setup ## rollout service against raw vLLM, into runs/bench/rollout.json
	@$(BIN)/python scripts/bench_rollout.py

bench-tools: setup ## calls to tools and to search, against doing it plainly, into runs/bench/tools.json
	@$(BIN)/python scripts/bench_tools.py
	@if [ -n "$$ELASTICSEARCH_URL" ] && [ -n "$$AGENT_R1_REAL_DATA" ]; then $(BIN)/python scripts/bench_search.py; \
	else echo "search is left out; it needs ELASTICSEARCH_URL and AGENT_R1_REAL_DATA (docs/search.md)"; fi

bench-step: setup ## what a training step of a 90M model is spent on
	@$(BIN)/python scripts/bench_step.py

clean: ## remove .venv and the tools' caches; runs stay
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
