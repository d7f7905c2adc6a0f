"""The back end's compiler, which the interpreter never calls."""

from __future__ import annotations

from typing import Any, NoReturn

# Beside the environment, in a folder of its own.
from triton.backends.compiler import BaseBackend  # pyright: ignore[reportMissingImports]


def refuse(*arguments: Any, **options: Any) -> NoReturn:
    """Stand in for every method: Triton wants them defined."""
    raise RuntimeError("this back end compiles nothing; set TRITON_INTERPRET=1")


class NoCompiler(BaseBackend):
    """Lets vLLM find a back end named after its platform."""

    hash = parse_options = add_stages = load_dialects = get_module_map = refuse

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Return False: there is nothing to compile for."""
        return False
