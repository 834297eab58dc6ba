"""The command line: parse, call, print. Nothing is computed here."""

from __future__ import annotations


def main() -> None:
    from stepscope.cli.app import run_app

    run_app()
