"""One call of a user's function: find it, bind its arguments, run it, and put its end into words.

The same in a warm child and in a thread of the host, so that a function behaves alike in both.
"""

from __future__ import annotations

import contextvars
import importlib
import inspect
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import CoroutineType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from stellwerk.core.run import ERROR_CHARS_MAX, RESULT_BYTES_MAX, Failed, Outcome, Succeeded
from stellwerk.sdk.inside import RunView

if TYPE_CHECKING:
    import asyncio

BY_KEYWORD = -1  # `run` is a keyword-only parameter
NOTHING_RETURNED = Succeeded()
OWN_FOLDER = str(Path(__file__).parent)
ASYNCIO_FOLDER = str(Path(importlib.__file__).parent.parent / "asyncio")
IMPORT_MACHINERY = (importlib.__file__, "<frozen importlib", "<string>")


class CallRefused(Exception):
    """The call cannot be made; the text says why, and no traceback would say more."""


class Callee(Struct, frozen=True):
    """A function ready to be called; `run_place` is where its parameter `run` stands, if it has one."""

    function: Callable[..., object]
    run_place: int | None


class Functions:
    """Finds functions by `module:name`, each once."""

    def __init__(self, allowed_packages: Sequence[str] | None) -> None:
        self._allowed = None if allowed_packages is None else frozenset(allowed_packages)
        self._found: dict[str, Callee] = {}

    def find(self, name: str) -> Callee:
        """The function of that name; what goes wrong in its module's import goes through to the caller."""
        callee = self._found.get(name)
        if callee is None:
            # A failed import is not remembered: the next call may find the file repaired.
            callee = self._found[name] = self._import(name)
        return callee

    def _may_import(self, module_name: str) -> bool:
        """Whether a module is one of the allowed packages, or lies in one."""
        if self._allowed is None:
            return True
        return any(module_name == package or module_name.startswith(f"{package}.") for package in self._allowed)

    def _import(self, name: str) -> Callee:
        module_name, colon, path = name.partition(":")
        if not colon or not module_name or not path:
            raise CallRefused(f"{name!r} names no function; write it as module:function")
        if not self._may_import(module_name):
            allowed = ", ".join(sorted(self._allowed or ())) or "none"
            raise CallRefused(f"{name} is not called: {module_name!r} is not in the packages allowed here ({allowed})")
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            try:
                found = getattr(found, part)
            except AttributeError:
                raise CallRefused(f"{name} was not found: {module_name} has no {path!r}") from None
        if not callable(found):
            raise CallRefused(f"{name} is a {type(found).__name__}, not a function")
        return Callee(found, _place_of_run(found))


def _place_of_run(function: Callable[..., object]) -> int | None:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None  # some built-in functions do not tell; none of them wants a run
    parameter = parameters.get("run")
    if parameter is None or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        return None
    return BY_KEYWORD if parameter.kind is parameter.KEYWORD_ONLY else list(parameters).index("run")


class Coroutines:
    """Runs the coroutines of one thread on one event loop, which is thrown away once a call leaves a mark."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def run(self, coroutine: Coroutine[Any, Any, object], context: contextvars.Context) -> object:
        import asyncio  # 30 ms that a child without async functions need not pay

        runner = self._runner
        if runner is None:
            runner = self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        threads = threading.active_count()
        is_clean = False
        try:
            value = runner.run(coroutine, context=context)
            is_clean = True
            return value
        except Exception:
            is_clean = True
            raise
        finally:
            # Left-over tasks and executor threads belong to this call; closing ends and awaits them. After a
            # SystemExit the loop was torn out of its own work and is not to be trusted.
            if not is_clean or asyncio.all_tasks(runner.get_loop()) or threading.active_count() > threads:
                self.close()

    def interrupt(self) -> None:
        """Let the loop turn once, from another thread: an exception set for its thread needs Python code."""
        runner = self._runner
        if runner is not None:
            try:
                runner.get_loop().call_soon_threadsafe(_turn)
            except RuntimeError:
                pass  # closed meanwhile: nothing sleeps in it

    def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.close()


def _turn() -> None:
    """Nothing; the turn itself was wanted."""


def perform(functions: Functions, name: str, args: bytes | None, run: RunView, coroutines: Coroutines) -> Outcome:
    """Call the function in a context of its own and say how it ended; whatever it raises is its failure."""
    try:
        callee = functions.find(name)
        positional, keyword = _bind(callee, args, run)
        context = contextvars.copy_context()
        value = context.run(callee.function, *positional, **keyword)
        if type(value) is CoroutineType:
            value = coroutines.run(value, context)
    except BaseException as error:
        # SystemExit and KeyboardInterrupt too: a function cannot end the process it is lent.
        return Failed(reason="error", error=error_text(error))
    return NOTHING_RETURNED if value is None else _encoded(value)


def _bind(callee: Callee, args: bytes | None, run: RunView) -> tuple[list[Any], dict[str, Any]]:
    positional: list[Any] = []
    keyword: dict[str, Any] = {}
    if args is not None:
        given = msgspec.json.decode(args)
        if type(given) is list:
            positional = given
        elif type(given) is dict:
            keyword = given
        else:
            raise CallRefused(f"args must be a JSON array or object, not {type(given).__name__}")
    place = callee.run_place
    if place is not None:
        if place == BY_KEYWORD or place > len(positional) or "run" in keyword:
            if "run" in keyword:
                raise CallRefused("args may not hold `run`: the parameter `run` is given by Stellwerk")
            keyword["run"] = run
        else:
            positional.insert(place, run)
    return positional, keyword


def _encoded(value: object) -> Outcome:
    try:
        result = msgspec.json.encode(value)
    except Exception as error:
        # Also RecursionError, and whatever a property of the value raises while it is read.
        text = f"the result is a {type(value).__name__} that cannot be written as JSON: {error}"
        return Failed(reason="result", error=text[:ERROR_CHARS_MAX])
    if len(result) > RESULT_BYTES_MAX:
        text = f"the result, a {type(value).__name__}, is {len(result)} bytes of JSON; {RESULT_BYTES_MAX} are kept"
        return Failed(reason="result", error=f"{text}. Store it elsewhere and return where it is.")
    return Succeeded(result=result)


def error_text(error: BaseException) -> str:
    """The traceback as the function's author would see it: without the frames that lead to their code."""
    if isinstance(error, CallRefused):
        return str(error)[:ERROR_CHARS_MAX]
    try:
        text = "".join(traceback.format_exception(type(error), error, _first_foreign(error.__traceback__))).rstrip()
    except Exception:
        text = f"{type(error).__name__} (its text could not be made)"
    if len(text) > ERROR_CHARS_MAX:
        # What was raised stands last, and is what one looks for.
        text = "[…]\n" + text[-(ERROR_CHARS_MAX - 4) :]
    return text


def _first_foreign(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith((OWN_FOLDER, ASYNCIO_FOLDER, *IMPORT_MACHINERY)):
            return trace
        trace = trace.tb_next
    return None


def put_first_on_path(import_paths: Sequence[str]) -> None:
    """Let functions be found in these folders before all others."""
    sys.path[:0] = [path for path in import_paths if path not in sys.path]
