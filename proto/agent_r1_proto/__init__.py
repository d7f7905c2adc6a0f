"""The contract: every message that crosses a process boundary, and the services' Redis code.

Nothing here imports a service, torch, vllm, deepspeed, ray or fastapi.
"""
