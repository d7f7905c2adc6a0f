# The commands of the project. `make` alone lists them.
.DEFAULT_GOAL := help
.PHONY: help setup setup-gpu setup-tests demo demo-agent table test test-unit test-gpu test-v2 test-docs test-agents test-docker test-observe images test-k8s test-hosts test-ranks test-models test-ray test-wheel test-sandbox check schemas hotswap bench profile clean
BIN := .venv/bin

help: ## list the commands
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## install exactly the locked packages into .venv (a second run ends at once)
	@scripts/setup

setup-gpu: ## the same for NVIDIA GPUs; from then on, `make setup` keeps this variant
	@scripts/setup --variant gpu

demo: setup ## train a search agent on this machine with every service, into runs/demo
	@$(BIN)/python scripts/demo

demo-agent: setup ## train an agent written on openai-agents, as it is, in the world of the demo, into runs/demo
	@PATH="$(CURDIR)/$(BIN):$$PATH" $$(scripts/agents_env openai-agents==0.24.0) scripts/demo --agent

table: setup ## train every method of the paper on tiny_world, three seeds each; continues where it stopped
	@$(BIN)/python scripts/demo --world-only
	@$(BIN)/agent-r1 table examples/tiny_world/table.toml

setup-tests:
	@scripts/setup --tests

test: setup-tests ## run the whole test suite with real Redis, vLLM and DeepSpeed
	@$(BIN)/python -m pytest -n auto --dist loadfile

test-unit: setup ## run the fast tests
	@$(BIN)/python -m pytest tests/unit tests/contract -m "not slow and not vllm"

test-v2: setup-tests ## run the engine tests on vLLM's Model Runner V2, which GPUs take, in Triton's interpreter
	@$(BIN)/python -m tests.runner_v2

test-gpu: setup ## say in ten minutes whether this GPU box trains, and what is wrong (DEVICE=cpu; VARIANTS=http,lora or all; OUT=FOLDER)
	@$(BIN)/python -m scripts.gpu_test $(if $(DEVICE),--device $(DEVICE)) $(if $(VARIANTS),--variants $(VARIANTS)) $(if $(OUT),--out "$(OUT)")

test-docker: ## build the images, run the demo in containers, kill and replace some of them (TRANSPORT=collective; AGENT=1; needs Docker)
	@TRANSPORT="$(TRANSPORT)" AGENT="$(AGENT)" scripts/test_docker

test-observe: ## start compose with Prometheus and Grafana, and ask what their dashboards show (WITHOUT=grafana; needs Docker)
	@WITHOUT="$(WITHOUT)" scripts/test_observe

images: ## build the images: REGISTRY=..., TAG=... name them, PUSH=1 pushes them, IMAGES="tools cpu" chooses
	@REGISTRY="$(REGISTRY)" TAG="$(TAG)" PUSH="$(PUSH)" IMAGES="$(IMAGES)" scripts/images

test-k8s: setup ## run the demo on a Kubernetes cluster and replace pods in mid-run (TRANSPORT=collective; AGENT=1); needs docker, kubectl and helm
	@TRANSPORT="$(TRANSPORT)" AGENT="$(AGENT)" scripts/test_k8s

test-agents: setup ## run agents on four public frameworks and five public programs in their sandboxes, write docs/results/agents.md, and kill every service around others 50 times (KILLS=50; needs npm)
	@scripts/test_agents $(KILLS)

test-hosts: setup ## train on network namespaces that share nothing, over slow and lossy links (TRANSPORT=collective)
	@$(BIN)/python scripts/test_hosts --transport $(or $(TRANSPORT),http)

test-ranks: setup ## run 2 and 3 learner ranks on hosts that share nothing (network namespaces), and 2 with LoRA, under every ZeRO stage, and measure the memory of 2 and 4 under ZeRO-3
	@$(BIN)/python -m pytest tests/integration/test_ranks_on_hosts.py tests/e2e/test_run_on_hosts.py tests/integration/test_two_ranks.py tests/integration/test_rank_memory.py tests/integration/test_estimate_memory.py -m "ranks or not ranks" --timeout 900

test-models: setup ## run every supported architecture, train on segments and on real questions, serve an exported agent, and push weights to an engine cut over two processes, with real vLLM and DeepSpeed
	@$(BIN)/python -m pip download -q --no-deps --dest build/templates trl==1.16.0 # for its chat templates
	@$(BIN)/python -m pytest tests/e2e/test_architectures.py tests/e2e/test_segments_run.py tests/e2e/test_export.py tests/e2e/test_hub_model.py tests/e2e/test_matrix_models.py tests/e2e/test_multihop_smoke.py tests/integration/test_tensor_parallel.py -m "models or not models" --timeout 900

test-wheel: setup ## train what `agent-r1 init` writes, and the demo, from an installed wheel
	@$(BIN)/python -m pytest tests/e2e/test_wheel.py -m "wheel or not wheel"

test-docs: setup ## run the commands of the documentation as they stand, with a small run
	@$(BIN)/python -m pytest tests/e2e/test_docs_shell.py -m docs

test-ray: setup ## train on a Ray cluster of network namespaces, whose nodes are killed in mid-run (TRANSPORT=collective; AGENT=1)
	@$(BIN)/python scripts/test_ray --transport $(or $(TRANSPORT),http) $(if $(AGENT),--agent)

test-sandbox: setup ## run every reference solution of HumanEval and MBPP (AGENT_R1_REAL_DATA) in the sandbox
	@$(BIN)/python scripts/test_sandbox

check: setup ## run the quality gate: format, lint, imports, types, schemas, files
	@scripts/check

schemas: setup ## write proto/schemas from the message classes
	@$(BIN)/python scripts/schemas

hotswap: setup ## swap tools 50 times while a run trains through them, into runs/bench/hotswap.json
	@$(BIN)/python -m benchmarks.hotswap $(ARGS)

bench: setup ## measure a case of docs/benchmarks.md: CASE=tools, ARGS="--rounds 1"; into runs/bench
	@$(BIN)/python -m benchmarks.$(or $(CASE),$(error CASE is missing; docs/benchmarks.md has the cases)) $(ARGS)

profile: setup ## show where the time of a training step goes, in every process, into runs/bench/profile
	@$(BIN)/python -m benchmarks.profile_run --model tiny
	@$(BIN)/python -m benchmarks.profile_run --model 90m

clean: ## remove .venv and the tools' caches, but keep runs
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
