"""Examples; an installation has those that `agent-r1 init` copies, as `agent_r1.examples`."""
