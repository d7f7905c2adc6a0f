"""Which test runs each shell block of the documentation, by page and first command.

A block is marked as not run (doc_blocks.py), or tests/e2e/test_docs_shell.py runs it as it stands
(`RUN`), or another test runs the same (`ELSEWHERE`). tests/unit/test_docs_blocks.py holds this
against the pages.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.support.doc_blocks import Block, commands

QUICK = {
    ("docs/security.md", "(umask 077;"),
    ("docs/scale-out.md", "mkdir -p -m 700"),
    ("docs/scale-out.md", "export AGENT_R1__RUN__TOKEN_FILE"),
    ("docs/paper-setting.md", "export AGENT_R1__RUN__ID"),
}
"""Blocks that are run in the suite."""
RUN = [
    ("docs/evaluation.md", "agent-r1 evaluate CONFIG --policy MODEL_OR_RUN --out scores.jsonl"),
    ("docs/evaluation.md", "agent-r1 evaluate CONFIG --policy MODEL_OR_RUN --out attempts.jsonl"),
    ("docs/add-a-reward.md", "agent-r1 rescore RUN"),
    ("docs/observability.md", "openssl rand"),
    ("docs/observability.md", "jq -R"),
    ("docs/serving.md", "agent-r1 export"),
    ("docs/serving.md", "agent-r1 train examples/tiny_world/run.toml --from out"),
    ("examples/tiny_world/README.md", "agent-r1 train examples/tiny_world/run.toml"),
    ("docs/models.md", "agent-r1 train examples/tiny_world/lora.toml"),
    ("examples/deep_world/README.md", "python examples/deep_world/generate.py"),
]
"""Blocks that `make test-docs` runs, with a small run of tiny_world, in this order."""
ELSEWHERE = {
    ("docs/run-folder.md", "agent-r1 export runs/demo out --trajectories"): (
        "tests/unit/runs/test_atif.py"
    ),
    ("docs/console.md", "agent-r1 ui"): "tests/integration/test_console.py",
    ("docs/any-agent.md", "agent-r1 agents attach"): "tests/integration/test_attached_agents.py",
    ("examples/harness/README.md", "agent-r1 train"): "tests/integration/test_attached_agents.py",
    ("docs/add-a-reward.md", "vllm serve reward_model"): "tests/integration/test_reward_model.py",
    ("docs/add-a-reward.md", "agent-r1 export runs/ppo critic --critic"): (
        "tests/integration/test_reward_model.py"
    ),
    ("docs/deploy/compose.md", "docker"): "scripts/test_docker",
    ("docs/deploy/compose.md", "CONFIG="): "scripts/test_docker",
    ("docs/deploy/compose.md", "cp .env.example"): "tests/unit/test_quality_compose.py",
    ("docs/deploy/compose.md", "LEARNER_GPUS="): "tests/unit/test_quality_compose.py",
    ("docs/deploy/compose.md", "PLUGINS="): "tests/unit/test_quality_compose.py",
    ("docs/deploy/kubernetes.md", ""): "scripts/test_k8s",
    ("docs/deploy/ray.md", ""): "scripts/test_ray",
    ("docs/evaluation.md", "agent-r1 matrix"): "tests/e2e/test_training_run.py",
    ("docs/evaluation.md", "agent-r1 diagnose CONFIG"): "tests/integration/test_diagnose.py",
    ("docs/decoding.md", "agent-r1 evaluate CONFIG --policy RUN --decode value_guided --out"): (
        "tests/unit/cli/evaluation/test_fit.py"
    ),
    ("docs/decoding.md", "agent-r1 evaluate CONFIG --policy RUN --out turns.jsonl"): (
        "examples/guided_search.sh"
    ),
    (
        "docs/decoding.md",
        "agent-r1 evaluate CONFIG --policy RUN --decode value_guided --decode-fit",
    ): ("tests/unit/cli/evaluation/test_fit.py"),
    ("docs/learner-ranks.md", ""): "tests/integration/test_ranks_on_hosts.py",
    ("docs/observability.md", ".venv/bin/python scripts/dashboard_results.py"): (
        "tests/unit/test_dashboard_results.py"
    ),
    ("docs/paper-setting.md", "agent-r1 check"): "tests/unit/examples/test_multihop_qa_configs.py",
    ("docs/performance.md", "make profile"): "tests/unit/test_profile_parts.py",
    **{
        (f"docs/results/{page}.md", "agent-r1 table"): "tests/integration/test_launcher_table.py"
        for page in (
            "deep_world/learning_rates",
            "deep_world/methods",
            "deep_world/supervised",
            "deep_world/turn_credit",
            "deep_world/turn_credit_confirmed",
            "deep_world/unlabelled_hybrid",
            "deep_world/unlabelled_learned",
            "deep_world/unlabelled_true",
            "lookahead/turn_credit",
            "tiny_code/error_text",
            "tiny_code/no_error_text",
            "tiny_code/pi",
            "tiny_math/methods",
            "tiny_world",
        )
    },
    ("docs/results/deep_world/decoding.md", "agent-r1 matrix"): "tests/e2e/test_training_run.py",
    ("docs/results/deep_world/guided.md", "agent-r1 matrix"): "tests/e2e/test_training_run.py",
    ("docs/results/deep_world/guided_elsewhere.md", "agent-r1 matrix"): (
        "tests/e2e/test_training_run.py"
    ),
    ("docs/results/lookahead/guided.md", "agent-r1 matrix"): "tests/e2e/test_training_run.py",
    ("docs/scale-out.md", "agent-r1"): "tests/support/run_on_hosts.py",
    ("docs/scale-out.md", "cat > redis.conf"): "tests/support/run_on_hosts.py",
    ("docs/search.md", "agent-r1 search index"): "tests/integration/test_elasticsearch_index.py",
    ("docs/search.md", "AGENT_R1_REAL_DATA="): ("tests/integration/test_elasticsearch_parity.py"),
    ("docs/serving.md", "vllm serve out"): "tests/e2e/test_export.py",
    ("docs/serving.md", "export OPENAI_BASE_URL"): "tests/integration/test_any_agent.py",
    ("docs/any-agent.md", "agent-r1 serve agents"): "tests/integration/test_agents.py",
    ("docs/tools.md", ""): "tests/integration/test_tool_swap.py",
    ("docs/tutorial.md", ""): "tests/e2e/test_wheel.py",
    ("README.md", "make demo"): "tests/e2e/test_wheel.py",
    ("docs/any-agent.md", "make demo-agent"): "tests/e2e/test_agent_run.py",
    ("README.md", "docker compose"): "scripts/test_docker",
    ("examples/code/README.md", "docker compose"): "tests/unit/test_quality_compose.py",
    ("examples/deep_world/README.md", "agent-r1 diagnose"): "tests/integration/test_diagnose.py",
    ("examples/deep_world/README.md", "agent-r1 train"): "tests/unit/examples/test_deep_world.py",
    ("examples/deep_world/README.md", "agent-r1 table"): "tests/integration/test_launcher_table.py",
    ("examples/lookahead/README.md", "python examples/lookahead/generate.py"): (
        "tests/unit/examples/test_lookahead.py"
    ),
    ("examples/lookahead/README.md", "agent-r1 diagnose"): "tests/integration/test_diagnose.py",
    ("examples/lookahead/README.md", "agent-r1 train"): "tests/unit/examples/test_lookahead.py",
    ("examples/lookahead/README.md", "agent-r1 evaluate"): "tests/unit/examples/test_lookahead.py",
    ("examples/multihop_qa/README.md", "python convert.py"): "tests/e2e/test_multihop_smoke.py",
    ("examples/multihop_qa/README.md", "agent-r1 train"): "tests/e2e/test_multihop_smoke.py",
    ("examples/starter/README.md", ""): "tests/e2e/test_wheel.py",
    ("examples/tiny_code/README.md", "python examples/tiny_code/generate.py"): (
        "tests/unit/examples/test_tiny_code.py"
    ),
    ("examples/tiny_code/README.md", "sh examples/tiny_code/pi/train.sh"): (
        "tests/unit/examples/test_tiny_code.py"
    ),
    ("examples/tiny_code/README.md", "agent-r1 train"): "tests/unit/examples/test_tiny_code.py",
    ("examples/tiny_math/README.md", "python examples/tiny_math/generate.py"): (
        "tests/unit/examples/test_tiny_math.py"
    ),
    ("examples/tiny_math/README.md", "agent-r1 table"): "tests/integration/test_launcher_table.py",
    ("examples/tiny_world/README.md", "python examples/tiny_world/generate.py"): (
        "tests/unit/examples/test_tiny_world.py"
    ),
}
"""What runs the commands of a block with other values: other machines, hours, or a clean place."""


def is_named(block: Block, table: Iterable[tuple[str, str]]) -> bool:
    """Say whether a table has the block: the page, and how its first command begins."""
    first = commands(block.text)[0]
    return any(block.page == page and first.startswith(start) for page, start in table)
