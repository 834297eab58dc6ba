"""stepscope ceilings: what this device reaches, beside what a model needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from stepscope.cli.output import StatusLine, print_json, stdout
from stepscope.errors import UsageError


def register(app: typer.Typer) -> None:
    app.command("ceilings")(ceilings)


def thread_count(wanted: int | None) -> int:
    """The threads of a run: as asked, else as torch would choose. Raises UsageError."""
    import os

    import torch

    most = os.cpu_count() or 1
    if wanted is not None and wanted > 4 * most:
        raise UsageError(f"{wanted} threads are too many for {most} cores")
    return wanted or torch.get_num_threads()


def ceilings(
    model: Annotated[str, typer.Option(envvar="STEPSCOPE_MODEL")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(envvar="STEPSCOPE_DTYPE")] = "fp32",
    threads: Annotated[int | None, typer.Option(envvar="STEPSCOPE_THREADS", min=1)] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure bandwidth, FLOP and dispatch ceilings of this device, once; show the card."""
    from stepscope.device.ceilings import load_or_measure
    from stepscope.models.load import load_model
    from stepscope.report.card import card_text
    from stepscope.runner.execute import build_decoder
    from stepscope.runner.twin import measure_twin

    status = StatusLine()
    loaded = load_model(model, dtype, progress=status.show, told=status.say)
    count = thread_count(threads)
    measured = load_or_measure(
        loaded.spec,
        count,
        refresh=refresh,
        progress=status.measuring,
    )
    products = build_decoder(loaded, "auto").products
    measured = replace(measured, twin=tuple(measure_twin(loaded.spec, (1, 4, 16), products)))
    status.clear()
    if json:
        print_json(measured.to_dict())
    else:
        stdout().print(card_text(loaded.spec, measured, products), highlight=False, markup=False)
