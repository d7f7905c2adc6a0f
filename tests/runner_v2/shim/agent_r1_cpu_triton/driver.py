"""The back end's driver, which is never active."""

from __future__ import annotations

# Beside the environment, in a folder of its own.
from triton.backends.driver import DriverBase  # pyright: ignore[reportMissingImports]

from agent_r1_cpu_triton.compiler import refuse


class NoDriver(DriverBase):
    """Says that there is no device."""

    get_current_target = get_active_torch_device = get_benchmarker = refuse
    map_python_to_cpp_type = refuse

    @classmethod
    def is_active(cls) -> bool:
        """Return False."""
        return False
