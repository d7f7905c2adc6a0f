"""Peers: the tests of a sandbox use the code of another one, and that code answers.

Both processes of a test hold a `Peer`. A request names an operation and its operands; the other
side does it and answers with a value or an exception, and may itself ask before it answers. Plain
data crosses as copies (`values.py`); anything else stays where it is and crosses as a reference,
for which the receiver makes a `Proxy`.

The code under test is not trusted. It may use what the tests have handed to it, never look inside:
of the tests' objects only public attributes of classes that the tests define. And its own objects
never take part in a comparison with a value of the tests: such a comparison uses the plain value
an object derives from, or fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import sys
import types
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from time import perf_counter
from typing import Any

from .asserts import check_kept
from .errors import (
    is_exception_class,
    leave_block,
    make_exception,
    make_exception_class,
    read_args,
    read_state,
)
from .lent import LentContainers, can_change, change, has_leaves, is_small
from .proxy import (
    BINARY,
    UNARY,
    Proxy,
    Remote,
    is_proxy,
    make_proxy,
    remote_of,
    type_of,
    write_signature,
)
from .values import (
    FIXED_BASES,
    PLAIN_BASES,
    Reader,
    RefusedValue,
    Writer,
    find_standard,
    name_standard,
    read_number,
    write_plain_base,
)

TEST_MODULE = "tests"
_OPEN_TYPES = (
    *("_io.StringIO", "_io.BytesIO", "random.Random"),
    *("numpy.random._generator.Generator", "numpy.random.mtrand.RandomState"),
)
"""Types whose public attributes show nothing of a process."""
_ITERATION: dict[type, tuple[str, ...]] = {
    types.GeneratorType: ("send", "throw", "close"),
    types.AsyncGeneratorType: ("asend", "athrow", "aclose"),
}


class Peer:
    """One side of a test.

    Args:
        send: sends a message; raises `RefusedValue` where it is too large.
        receive: returns the next message.
        scope: names of the code under test; None on the side of the tests.
        describe: returns the text of an exception for people.
        printed: returns what the code has printed to each stream since the last call.
    """

    def __init__(
        self,
        send: Callable[[Any], None],
        receive: Callable[[], Any],
        *,
        scope: dict[str, Any] | None,
        describe: Callable[[BaseException], str],
        printed: Callable[[], dict[str, str]] | None = None,
    ) -> None:
        self._send_message = send
        self._receive_message = receive
        self._printed = printed
        self._scope = scope
        self._describe = describe
        self._objects: list[Any] = []
        self._given: list[tuple[float, Any]] = []
        self._numbers: dict[int, int] = {}
        self._kinds: dict[int, int] = {}
        self._received: dict[int, Any] = {}
        self._received_classes: dict[type, int] = {}
        self._pending: dict[int, BaseException] = {}
        self._left: list[BaseException] = []
        """Exceptions of the test that have gone into the code."""
        self._emptied: list[tuple[Any, list[Any]]] = []
        """Arguments that the code has emptied, and what was in them."""
        self._kept: list[Any] = []
        """Arguments of the test that the code goes on to use."""
        self._before: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._patched: list[Any] = []
        self._undo: list[Any] = []
        self._lent = LentContainers(
            self._exchange, lambda value: self._write_all([value])[0], self._change
        )
        self._reader = Reader(self._resolve)
        self._operations: dict[str, Callable[..., Any]] = {
            **UNARY,
            **BINARY,
            "call": lambda function, args, kwargs: function(*args, **kwargs),
            "get": getattr,
            "set": setattr,
            "del": delattr,
            "plain": write_plain_base,
            "isinstance": isinstance,
            "take": self._take_items,
            "type": type,
            "change": self._change_container,
            "random": _call_random,
            "signature": write_signature,
            "global": lambda _, name: (scope or {})[name],
            "kept": lambda _, number: self._kept[number],
            "readline": lambda size: sys.stdin.readline(size),
            "await": lambda awaitable: self._run(_finish(awaitable)),
            "anext": lambda iterator: self._run(_take_next(iterator)),
            "aenter": lambda manager: self._run(type(manager).__aenter__(manager)),
            "exit": lambda manager, *error: leave_block(type(manager).__exit__, manager, *error),
            "aexit": lambda manager, *error: self._run(
                leave_block(type(manager).__aexit__, manager, *error)
            ),
        }
        self._loop: asyncio.AbstractEventLoop | None = None

    def names(self, names: list[str]) -> dict[str, Any]:
        """Return those of the names that the code under test has.

        Raises:
            RefusedValue: the answer is none; names that were not asked for are left out.
        """
        found = self.request("names", names)
        if type(found) is not dict:
            raise RefusedValue("the names of the code")
        return {
            name: self._lent.lend("global", (None, name), found[name])
            for name in names
            if name in found
        }

    @contextlib.contextmanager
    def watching(self, modules: Iterable[str]) -> Iterator[None]:
        """Replace functions of these modules for the code too while the test replaces them."""
        found = [(name, vars(sys.modules[name])) for name in modules if name in sys.modules]
        self._before = [(module, names, dict(names)) for module, names in found]
        try:
            yield
        finally:
            self._before = []

    def has_emptied(self, value: object) -> bool:
        """Tell whether a value is an argument of which the code has left nothing."""
        return any(value is one for one, _ in self._emptied) and not has_leaves(value)

    def content_of(self, emptied: object) -> list[Any]:
        """Return the items of an argument before the code emptied it."""
        return next(items for one, items in reversed(self._emptied) if one is emptied)

    def handed_over(self) -> list[tuple[float, Any]]:
        """Return the objects of this side that the other one was given to use, and when."""
        return self._given

    def request(self, operation: str, *operands: Any) -> Any:
        """Let the other side do something.

        Raises:
            RefusedValue: an operand or the answer does not cross.
            BaseException: what was raised there, as the same builtin class or one of the same name.
        """
        if self._scope is not None:
            return self._exchange(operation, *operands)
        return self._lent.request(operation, operands)

    def _exchange(self, operation: str, *operands: Any) -> Any:
        known, earlier = len(self._objects), len(self._left)
        message = {"do": operation, "with": self._write_all(operands)}
        if operation == "call" and (lent := self._lent.find_arguments(operands)):
            message["lent"] = self._write_all(lent)
        if (patched := self._write_all(self._find_patched())) != self._patched:
            self._patched = message["patched"] = patched
        self._given += [(perf_counter(), value) for value in self._objects[known:]]
        self._send(message)
        while "do" in (answer := self._receive()):
            self._answer(answer)
        if "refused" in answer:
            raise RefusedValue(str(answer["refused"]))
        raised = self._read_exception(answer["raise"]) if "raise" in answer else None
        left = self._left[earlier:]
        del self._left[earlier:]
        for error in left:
            check_kept(error, raised)
        if raised is not None:
            raise raised
        for key, content in answer.get("changed", ()):
            self._change(_argument(operands, key), self._reader.read(content))
        for key, number in answer.get("kept", ()):
            self._lent.lend_argument(int(number), _argument(operands, key))
        if "same" in answer:
            return _argument(operands, answer["same"])
        return self._reader.read(answer["value"])

    def _change(self, container: Any, new: Any) -> None:
        """Make a container of the test what the code has made of it."""
        if has_leaves(container) and not has_leaves(new):
            items = vars(container) if isinstance(container, types.SimpleNamespace) else container
            self._emptied.append((container, list(items)))
        change(container, new)

    def _find_patched(self) -> list[Any]:
        """Return (module, name, function) of what the test has replaced."""
        return [
            (module, name, now[name])
            for module, now, before in self._before
            if now != before
            for name, old in before.items()
            if callable(old) and name[0] != "_" and now.get(name, old) is not old
        ]

    def _patch(self, patched: list[Any]) -> None:
        """Replace functions for the code as the test has replaced them, and no others."""
        for module, name, old in self._undo:
            setattr(module, name, old)
        found = [(importlib.import_module(module), name, new) for module, name, new in patched]
        self._undo = [(module, name, getattr(module, name)) for module, name, _ in found]
        for module, name, new in found:
            setattr(module, name, new)

    def _send(self, message: dict[str, Any]) -> None:
        if self._printed is not None and (text := self._printed()):
            message = message | {"printed": text}
        self._send_message(message)

    def _receive(self) -> Any:
        message = self._receive_message()
        # Where the test looks at it; what nobody reads stays with the code.
        if self._scope is None and "printed" in message:
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                text = message["printed"].get(name)
                if text and stream is not getattr(sys, f"__{name}__"):
                    stream.write(str(text))
                    stream.flush()  # into its buffer, which the test may read
        return message

    def _change_container(self, operation: str, operands: list[Any], new: Any) -> None:
        container = self._operations[operation](*operands)
        if type(container) is type(new):
            change(container, new)

    def serve(self) -> None:
        """Answer requests until the service closes the channel."""
        try:
            while True:
                self._answer(self._receive())
        finally:
            self.close()

    def close(self) -> None:
        """Close the event loop, which all coroutines of this side share."""
        if self._loop is not None:
            self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        self._loop = self._loop or asyncio.new_event_loop()
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._loop.run_until_complete(coroutine)
        with ThreadPoolExecutor(1) as other:  # a thread runs one loop at a time
            return other.submit(self._loop.run_until_complete, coroutine).result()

    # --- the answering side ---------------------------------------------------------------------

    def _answer(self, request: Any) -> None:
        try:
            if self._scope is not None and "patched" in request:
                self._patch(self._reader.read(request["patched"]))
            self._send(self._perform(request["do"], request["with"], request.get("lent", [])))
        except RefusedValue as exc:
            self._leave(exc)
            self._send({"refused": str(exc)})
        except BaseException as exc:  # noqa: BLE001 - whatever the code raises is its answer
            self._leave(exc)
            self._send(self._write_exception(exc))

    def _leave(self, error: BaseException) -> None:
        if self._scope is None:
            self._left.append(error)

    def _perform(self, name: str, written: list[Any], lent: list[Any]) -> Any:
        if self._scope is None and name != "readline":  # that of the input it has for the code
            self._check_reference(written)
        operands = self._reader.read(written)
        if name == "names" and self._scope is not None:
            found = {key: self._scope[key] for key in operands[0] if key in self._scope}
            return {"value": self._write_all([found])[0]}
        if self._scope is None:
            _check_access(name, operands)
        else:
            self._put_own(operands, self._reader.read(lent))
        value = self._operations[name](*operands)
        answer = {"value": self._write_all([value])[0]}
        if name == "call":
            answer["changed"] = self._find_changes(written, operands)
            if self._scope is not None:
                answer |= self._find_kept(operands, value)
        return answer

    def _put_own(self, operands: list[Any], lent: list[Any]) -> None:
        """Put containers of the code in the place of copies that the test has of them."""
        for key, operation, of in lent:
            own = self._operations[operation](*of)
            if type(own) is type(_argument(operands, key)):
                operands[1 if type(key) is int else 2][key] = own

    def _find_kept(self, operands: list[Any], value: Any) -> dict[str, Any]:
        """Return which arguments the code goes on to use, and which one it returns."""
        found: dict[str, Any] = {"kept": []}
        for key in [*range(len(operands[1])), *operands[2]]:
            argument = _argument(operands, key)
            if not can_change(argument):
                continue
            if argument is value:
                found["same"] = key
            if any(argument is one for one in self._kept):
                continue
            # Those of the operands, of `argument` and of the call below, and of `value` twice.
            own = 3 + 2 * (argument is value)
            if sys.getrefcount(argument) > own and is_small(argument):
                self._kept.append(argument)
                found["kept"].append([key, len(self._kept) - 1])
        return found

    def _check_reference(self, written: list[Any]) -> None:
        # Only what the tests have handed over: no builtin type, which could make new objects here.
        if not (written and type(written[0]) is dict and "yours" in written[0]):
            raise RefusedValue("a request about nothing that the tests have handed over")

    def _find_changes(self, written: list[Any], operands: list[Any]) -> list[Any]:
        """Return the arguments that the call has changed in place."""
        arguments = [*enumerate(operands[1]), *operands[2].items()]
        before = [*written[1], *(content for _, content in written[2]["dict"])]
        changed: list[Any] = []
        for (key, value), old in zip(arguments, before, strict=True):
            if can_change(value) and (new := self._write_all([value])[0]) != old:
                changed.append([key, new])
        return changed

    def _take_items(self, iterator: Iterator[Any], count: int) -> tuple[list[Any], bool]:
        """Return the next items, and whether these are the last."""
        if (error := self._pending.pop(id(iterator), None)) is not None:
            raise error
        items: list[Any] = []
        try:
            for _ in range(count):
                items.append(next(iterator))
        except StopIteration:
            return items, True
        except BaseException as exc:
            if not items:
                raise
            self._leave(exc)
            self._pending[id(iterator)] = exc
        return items, False

    # --- references -----------------------------------------------------------------------------

    def _write_all(self, values: Any) -> list[Any]:
        try:
            return Writer(self._refer).write_all(values)
        except RecursionError as exc:
            raise RefusedValue("a value nested too deeply") from exc

    def _refer(self, value: Any) -> Any:
        if is_proxy(value):
            return {"yours": remote_of(value).number}
        if isinstance(value, type) and value in self._received_classes:
            return {"yours": self._received_classes[value]}
        if value is type_of:
            return {"builtin": "type"}
        if isinstance(value, types.ModuleType) and self._scope is None:
            raise RefusedValue("a module as an argument")
        plain_number = read_number(value)
        if type(plain_number) is bool:
            return {"plain": plain_number}
        if isinstance(value, BaseException):
            return self._write_error(value)
        number = self._number(value)
        if isinstance(value, type) and issubclass(value, BaseException):
            bases = [base for base in value.__bases__ if issubclass(base, BaseException)]
            place = [value.__module__, value.__name__]
            return {"exception": [number, self._write_all(bases), *map(str, place)]}
        if inspect.isawaitable(value) and type(value).__module__ == "builtins":
            return {"coroutine": number}
        base = next((base for base in PLAIN_BASES if issubclass(type(value), base)), None)
        plain = self._write_all([write_plain_base(value)]) if base in FIXED_BASES else None
        if plain_number is not None:
            base, plain = type(plain_number), self._write_all([plain_number])
        name = base.__name__ if base is not None else name_standard(type(value))
        # Numbered: an address would say where things are in the memory of this process.
        kind = self._kinds.setdefault(id(type(value)), len(self._kinds))
        return {"object": [number, kind, type(value).__name__, name, plain]}

    def _number(self, value: Any) -> int:
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # kept, so that no other object gets its id
        return self._numbers[id(value)]

    def _resolve(self, name: str, content: Any) -> Any:
        if name == "yours":
            return self._objects[content]
        number = content if name == "coroutine" else content[0]
        if number not in self._received:
            self._received[number] = {
                "object": self._make_proxy,
                "exception": self._make_class,
                "coroutine": self._make_coroutine,
                "error": self._make_error,
            }[name](content)
        return self._received[number]

    def _make_proxy(self, content: Any) -> Proxy:
        number, kind, kind_name, base_name, plain = content
        bases = {base.__name__: base for base in (*PLAIN_BASES, Fraction)}
        base = bases.get(base_name)
        shown = None if base is not None else find_standard(*(base_name or "").rpartition(".")[::2])
        snapshot = None if plain is None else tuple(self._reader.read(plain))
        if snapshot is not None and type(snapshot[0]) is not base:
            raise ValueError(base_name)
        return make_proxy(Remote(self, number, kind, str(kind_name), base, snapshot, shown))

    def _make_class(self, content: Any) -> type:
        number, written, module, name = content
        bases = tuple(self._reader.read(written))
        if not (bases and all(map(is_exception_class, bases))):
            raise ValueError(bases)
        if is_exception_class(found := find_standard(module, name)):
            return found
        made = make_exception_class(self, str(name), bases)
        self._received_classes[made] = number
        return made

    def _make_coroutine(self, number: int) -> Any:
        proxy = make_proxy(Remote(self, number, 0, "coroutine", None, None))

        async def wait() -> Any:
            return self.request("await", proxy)

        return wait()

    # --- exceptions -----------------------------------------------------------------------------

    def _write_exception(self, error: BaseException) -> Any:
        return {"raise": [self._write_all([error])[0], self._describe(error)]}

    def _read_exception(self, content: Any) -> BaseException:
        written, text = content
        error = self._reader.read(written)
        if not isinstance(error, BaseException):
            raise RefusedValue("an exception that cannot be read")
        if isinstance(error, StopIteration | StopAsyncIteration):
            # Out of a call, it would end a `map` or `zip` of the caller's without a word.
            proxy = vars(error).get("agent_r1_proxy")
            error = RuntimeError(f"the call raised {type(error).__name__}")
            vars(error).update({} if proxy is None else {"agent_r1_proxy": proxy})
        if "agent_r1_proxy" in vars(error):
            vars(error)["agent_r1_text"] = text
        return error

    def _write_error(self, error: BaseException) -> Any:
        if (proxy := vars(error).get("agent_r1_proxy")) is not None:
            return {"yours": remote_of(proxy).number}
        kind = self._kinds.setdefault(id(type(error)), len(self._kinds))
        (written,) = self._write_all([type(error)])
        try:
            content = self._write_all([read_args(error), error.__cause__, read_state(error)])
        except RefusedValue:
            content = self._write_all([(str(error),), None, {}])
        return {"error": [self._number(error), kind, written, *content]}

    def _make_error(self, content: Any) -> BaseException:
        number, kind, *rest = content
        made_class, args, cause, state = map(self._reader.read, rest)
        if not is_exception_class(made_class):
            raise ValueError(made_class)
        made = make_exception(made_class, args)
        if cause is not None:
            made.__cause__ = cause
        proxy = make_proxy(Remote(self, number, kind, made_class.__name__, None, None))
        vars(made).update(state, agent_r1_proxy=proxy)
        return made


def is_mock(kind: type) -> bool:
    """Tell whether a class is one of `unittest.mock`."""
    mock = sys.modules.get("unittest.mock")
    return mock is not None and issubclass(kind, mock.NonCallableMock)


def _check_access(name: str, operands: list[Any]) -> None:
    """Keep the code under test out of the tests' objects.

    Raises:
        AttributeError: the attribute is none of its business.
    """
    if name in ("type", "doc", "signature", "global", "kept"):
        raise AttributeError(f"the tests show the code no {name} of their objects")
    if name not in ("get", "set", "del"):
        return
    owner, attribute = operands[0], operands[1]
    kind = type(owner)
    ours = kind.__module__ == TEST_MODULE or (
        isinstance(owner, type) and owner.__module__ == TEST_MODULE
    )
    if type(attribute) is str and not attribute.startswith(("_", "agent_r1_")):
        if name == "get" and (ours or f"{kind.__module__}.{kind.__qualname__}" in _OPEN_TYPES):
            return
        if name == "get" and attribute in _ITERATION.get(kind, ()):
            return
        # What a mock has made for the code, and nothing that tells it how to behave.
        if name == "get" and is_mock(kind) and not hasattr(kind, attribute):
            return
        if name == "set" and ours and not callable(getattr(owner, attribute, None)):
            return
    raise AttributeError(f"{kind.__name__!r} object shows the code no attribute {attribute!r}")


def _argument(operands: Any, key: int | str) -> Any:
    return operands[1][key] if type(key) is int else operands[2][key]


def _call_random(module: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Seed a random generator of the code as the test has seeded its own."""
    if module.partition(".")[0] in sys.modules:  # NumPy imports its part at the first use
        getattr(importlib.import_module(module), name)(*args, **kwargs)


async def _finish(awaitable: Any) -> Any:
    return await awaitable


async def _take_next(iterator: AsyncIterator[Any]) -> list[Any]:
    """Return the next item, if there is one."""
    try:
        return [await iterator.__anext__()]
    except StopAsyncIteration:
        return []
