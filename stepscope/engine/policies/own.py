"""A user's own policy: one Python file, given as `--policy path.py:name[,key=value]...`.

`name` is a function from a `View` to a list of `Grant`s, or a `Policy` where more than the
tokens of a step is to be chosen. The path is looked up from the current folder, then from the
scenario's.

    from stepscope.engine.policies import Grant

    def one_at_a_time(view):
        for request in [*view.running, *view.admissible()]:
            return [Grant(request, request.todo)]
        return []

is one; scenarios/longest_first.py is another, which changes the order of the queue.
A function alone takes its order, admission and victim from `chunked`. What it answers is checked in
every step: a wrong answer ends the run with a sentence that names the policy.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from stepscope.engine.policies.view import Grant, Policy, Seen, View
from stepscope.errors import StepscopeError, UsageError
from stepscope.text import listing

# What code under construction raises; anything else is not the policy's doing.
MISTAKES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RecursionError),
    *(TypeError, ValueError),
)


def load_own(name: str, folder: Path, base: Policy) -> Policy:
    """The policy of `path.py:name`; a mere function is put into `base`. Raises UsageError."""
    path, _, attribute = name.rpartition(":")
    file = Path(path) if Path(path).exists() else folder / path
    found = getattr(_module(file), attribute, None)
    if isinstance(found, Policy):
        return _checked(found, name)
    if callable(found):
        about = " ".join((found.__doc__ or "").split())
        return _checked(replace(base, about=about, assign=found), name)
    raise UsageError(
        f"{file} has no policy or function '{attribute}'; write PATH.py:NAME with a name it defines"
    )


def _module(file: Path) -> ModuleType:
    spec = spec_from_file_location(f"policy_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UsageError(f"there is no policy file {file}; give the path of a .py file")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass in it looks itself up there
    try:
        spec.loader.exec_module(module)
    except (SyntaxError, ImportError, *MISTAKES) as error:
        raise UsageError(f"{file}{_line(error, file)}: {type(error).__name__}: {error}") from error
    return module


def _checked(policy: Policy, name: str) -> Policy:
    """The same policy, with its mistakes told in one sentence."""

    @wraps(policy.assign)
    def assign(view: View) -> list[Grant]:
        with _told(name):
            grants = [Grant(*grant) for grant in policy.assign(view)]
            _refuse(name, _wrong(view, grants))
            return grants

    @wraps(policy.evict)
    def evict(view: View) -> Sequence[Seen]:
        with _told(name):
            unwanted = list(policy.evict(view))
            _refuse(name, _not_among(view.running, unwanted, "puts back"))
            return unwanted

    @wraps(policy.victim)
    def victim(view: View, candidates: Sequence[Seen]) -> Seen:
        with _told(name):
            chosen = policy.victim(view, candidates)
            _refuse(name, _not_among(candidates, [chosen], "takes the pages of"))
            return chosen

    @wraps(policy.remember)
    def remember(memory: Any, view: View) -> Any:
        with _told(name):
            return policy.remember(memory, view)

    @wraps(policy.admission.hold)
    def hold(view: View, request: Seen) -> int:
        with _told(name):
            return policy.admission.hold(view, request)

    admission = replace(policy.admission, hold=hold)
    return replace(
        policy,
        name=name,
        assign=assign,
        admission=admission,
        evict=evict,
        victim=victim,
        remember=remember,
    )


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except MISTAKES as error:
        where = _line(error, Path(name.rpartition(":")[0]))
        raise StepscopeError(f"policy {name}{where}: {type(error).__name__}: {error}") from error


def _refuse(name: str, wrong: str) -> None:
    if wrong:
        raise StepscopeError(f"policy {name} {wrong}; see stepscope/engine/policies/own.py")


def _not_among(known: Iterable[Seen], chosen: Sequence[Seen], does: str) -> str:
    """What is wrong with a choice of requests that run and may go back, or nothing."""
    running = {request.id for request in known}
    ids = [request.id for request in chosen]
    if strangers := sorted(set(ids) - running):
        return f"{does} {listing(list(map(str, strangers)))}, not running or about to end"
    if len(set(ids)) < len(ids):
        return f"{does} a request twice in one step"
    return ""


def _wrong(view: View, grants: list[Grant]) -> str:
    """What is wrong with this answer, or nothing."""
    known = {r.id for r in [*view.running, *view.waiting]}
    ids = [request.id for request, _ in grants]
    if strangers := sorted(set(ids) - known):
        return f"grants to {listing(list(map(str, strangers)))}, neither running nor waiting"
    if len(set(ids)) < len(ids):
        return "grants to a request twice in one step"
    if view.running and not grants:
        return "grants nothing although requests run"
    for request, tokens in grants:
        if not isinstance(tokens, int) or not 1 <= tokens <= request.todo:
            most = request.todo
            return f"grants {tokens} tokens to request {request.id}, which can use 1 to {most}"
    return ""


def _line(error: BaseException, file: Path) -> str:
    """' line N' of the user's file, where the error passed through it."""
    if isinstance(error, SyntaxError):
        return f" line {error.lineno}"
    frames: list[Any] = traceback.extract_tb(error.__traceback__)
    own = [frame.lineno for frame in frames if Path(frame.filename).name == file.name]
    return f" line {own[-1]}" if own else ""
