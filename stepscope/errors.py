"""Errors a user can act on: one sentence each, carrying the exit code of the process."""

from __future__ import annotations

OK = 0
FAILED = 1
USAGE = 2
GATE_FAILED = 3
CANNOT_JUDGE = 4
INTERRUPTED = 130


class StepscopeError(Exception):
    """Something went wrong that one sentence explains and an action mends."""

    exit_code = FAILED


class UsageError(StepscopeError):
    """The command, the scenario or the input file is not what stepscope understands."""

    exit_code = USAGE


class GateFailed(StepscopeError):
    """A condition the user asked to be held (`--fail-on`) does not hold."""

    exit_code = GATE_FAILED


class CannotJudge(StepscopeError):
    """What the user asked for cannot be decided here (no GPU, no data)."""

    exit_code = CANNOT_JUDGE
