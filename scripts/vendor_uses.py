"""Names that our code uses of objects that may be vLLM's, DeepSpeed's, transformers' or peft's.

vendor_names.py follows imports and what is used of them. What else is used of an object, a reader
must know: every attribute below FOLDERS has to be in that module's list, or be found in this
project, in Python or in the libraries below. tests/unit/test_vendor_names.py asks.

Names alone are compared, so what is called as one of ours, of Python's or of torch's is not missed
here (`DeepSpeedEngine.step` is `Optimizer.step` as well), and outside FOLDERS only imports and
variables of the environment are looked at: a reader lists these.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from vendor_names import (
    PACKAGES,
    ROOT,
    SOURCES,
    bound,
    imported,
    is_there,
    keywords_of,
    listed,
    parsed,
)

FOLDERS = ("services/rollout/vllm", "services/learner/engine")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
VARIABLE = re.compile(r"(VLLM|DS)_[A-Z0-9_]+")
"""Of the environment, that the packages read."""
OURS = {
    "agent_r1": "services",
    "agent_r1_proto": "proto/agent_r1_proto",
    "agent_r1_deploy": "deploy",
}
"""Folders of our packages."""
TYPES = """
torch.Tensor torch.Generator torch.nn.Linear torch.optim.Optimizer torch.distributed.Store
torch.autograd.function.FunctionCtx
numpy.ndarray numpy.dtype numpy.random.Generator pydantic.BaseModel pydantic.TypeAdapter
multiprocessing.process.BaseProcess
"""
"""Whose objects we use, of Python and of libraries other than those that are looked up."""
OTHERS = """
bias weight out_features _parameters
needs_input_grad saved_tensors param_groups state
get_slice get_shape get_dtype get_tensor offset_keys metadata
context prctl
count_sampled ratio checksum num_weights num_critic_weights rank_interface kl_coef
"""
"""Names that cannot be found: of torch's Linear, and of its autograd and optimizers, which set them
when they are made; of a safetensors file; of pydantic's ValidationInfo and the C library; and ours:
what `FastCPUWorker` adds to vLLM's worker, attributes of a loss and of a weight that is divided,
and what a module gets from one that it does not import."""


def unlisted() -> list[str]:
    """Return what is used and neither listed nor found elsewhere, as "file name"."""
    paths = {path for _, path in (*listed(), *imported())}
    names = {path.partition("(")[0].rpartition(".")[2].strip('"') for path in paths}
    found = []
    for file in _files():
        known = names | _found_elsewhere(file)
        missing = sorted(set(used(parsed(file))) - known)
        found += [f"{file.relative_to(ROOT)} {name}" for name in missing]
    for file in (file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*.py"))):
        missing = sorted(set(variables(parsed(file))) - names)
        found += [f"{file.relative_to(ROOT)} {name}" for name in missing]
    return found


def untaken(vllm: Path) -> list[str]:
    """Return keywords of calls that no listed method of that name takes, as "file name(keyword)".

    Args:
        vllm: the folder that holds it.
    """
    calls = ((file, *call) for file in _files() for call in _keywords(file))
    found = []
    for user, name, keyword in calls:
        of_name = [one for one in listed() if one[1].endswith(f".{name}")]
        takes = (is_there(module, f"{path}({keyword})", vllm) for module, path in of_name)
        if of_name and not any(takes):
            found.append(f"{user.relative_to(ROOT)} {name}({keyword})")
    return found


def _keywords(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the method and the name of every keyword in a call."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield from ((node.func.attr, name) for name in keywords_of(node))


def _files() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def used(tree: ast.Module) -> Iterator[str]:
    """Yield attributes of objects that may be theirs, and what may replace a method of theirs."""
    others = {alias.asname or alias.name.split(".")[0] for alias in _imports_of_others(tree)}
    their_classes = list(_their_classes(tree))
    not_theirs = others | ({"self", "cls"} if not their_classes else set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _root(node) not in not_theirs:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            yield from _in_quotes(node.args[1])
    for owner in their_classes:
        yield from _public_members(owner)


def _in_quotes(node: ast.AST) -> Iterator[str]:
    """Yield a text that is written out."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def variables(tree: ast.Module) -> Iterator[str]:
    """Yield the variables of the environment that are theirs."""
    for node in ast.walk(tree):
        names = [node.arg or ""] if isinstance(node, ast.keyword) else _in_quotes(node)
        yield from (name for name in names if VARIABLE.fullmatch(name))


def _root(node: ast.Attribute) -> str:
    """Return the name that a path begins with; "" for what an attribute of ours holds."""
    root, *rest = ast.unparse(node).split(".")
    return "" if root in ("self", "cls") and len(rest) > 1 else root


def _imports_of_others(tree: ast.Module) -> Iterator[ast.alias]:
    """Yield what is imported from elsewhere than the packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            yield from (
                alias
                for alias in node.names
                if (module or alias.name).split(".")[0] not in PACKAGES
            )


def _their_classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    """Yield the classes that are derived from one of a package."""
    theirs = {name for name, _ in bound(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            parts = (part for base in node.bases for part in ast.walk(base))
            if theirs & {part.id for part in parts if isinstance(part, ast.Name)}:
                yield node


def _public_members(owner: ast.ClassDef) -> Iterator[str]:
    """Yield methods and attributes of a class's body, which may replace those of its base."""
    for node in owner.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [ast.unparse(target) for target in node.targets]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def _found_elsewhere(file: Path) -> set[str]:
    """Return names of a file, of modules that it imports, and of the tables that these take."""
    tree = parsed(file)
    found = _own(tree) | _of_types() | set(OTHERS.split())
    for module in _modules(tree):
        found |= _of_module(module)
        if (ours := _our_file(module)) is not None:
            tables = (one for one in _modules(parsed(ours)) if ".config" in one)
            found |= set().union(*map(_of_module, tables))
    return found


def _modules(tree: ast.Module) -> Iterator[str]:
    """Yield what a file imports; of `from a import b`, a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _our_file(module: str) -> Path | None:
    first, _, rest = module.partition(".")
    file = ROOT.joinpath(OURS.get(first, first), *rest.split(".")).with_suffix(".py")
    return file if first in OURS and file.is_file() else None


def _own(tree: ast.Module) -> set[str]:
    """Return the attributes of a module's classes, but for what may replace those of others.

    Variables and functions are none: an attribute of an object that is called as they are is not
    ours.
    """
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    found = set().union(*(_attributes(owner) for owner in owners))
    return found - {name for owner in _their_classes(tree) for name in _public_members(owner)}


def _attributes(owner: ast.ClassDef) -> set[str]:
    """Return what the body of a class defines, and what its methods set."""
    found = {one.name for one in owner.body if isinstance(one, DEFINITIONS)}
    for node in ast.walk(owner):
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [part for target in targets for part in ast.walk(target)]
            found |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
            if node in owner.body:
                found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return found


@functools.cache
def _of_module(name: str) -> set[str]:
    """Return the names of a module of ours or of Python's, and of its classes."""
    if (file := _our_file(name)) is not None:
        return _own(parsed(file))
    if name.split(".")[0] not in sys.stdlib_module_names:
        return set()
    try:
        module = importlib.import_module(name)
    except ImportError:  # a name in a module
        return set()
    return set(dir(module)).union(*(dir(c) for c in vars(module).values() if inspect.isclass(c)))


@functools.cache
def _of_types() -> set[str]:
    """Return the attributes of objects of Python and of the libraries."""
    types = (pydoc.locate(name) for name in TYPES.split())
    return _of_module("builtins").union(*map(dir, types))
