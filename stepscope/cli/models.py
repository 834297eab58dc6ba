"""stepscope models: bring a model into the cache, list what is there."""

from __future__ import annotations

from typing import Annotated

import typer

from stepscope.cli.output import StatusLine, note


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Bring a model into the cache.", no_args_is_help=True)
    group.command("fetch")(fetch)
    group.command("list")(list_models)
    app.add_typer(group, name="models")


def fetch(
    name: Annotated[
        str, typer.Argument(help="A name from `stepscope models list`, or a hub id ORG/NAME.")
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Check the sha256 of a cached file.")
    ] = False,
) -> None:
    """Fetch a model, check it, and put it into the cache."""
    from stepscope.models.fetch import fetch as fetch_model
    from stepscope.models.hub import fetch_hub, hub_id
    from stepscope.text import size

    status = StatusLine()
    wanted = hub_id(name)
    if wanted is not None:
        path = fetch_hub(wanted, status.show, status.say).path
    else:
        path = fetch_model(
            name,
            lambda done, total: status.show(f"fetching {name}: {size(done)} of {size(total)}"),
            verify=verify,
        )
    status.clear()
    print(path)
    note(f"next: stepscope run scenarios/quickstart.toml --model {name}")


def list_models() -> None:
    """List the models that can be fetched, and where they are."""
    from stepscope.models.catalogue import catalogue
    from stepscope.models.fetch import cached_path
    from stepscope.text import size

    for entry in catalogue():
        where = cached_path(entry.name) or f"not fetched ({size(entry.wheel_bytes)})"
        print(f"{entry.name:<16} {entry.title} ({entry.licence}): {where}")
