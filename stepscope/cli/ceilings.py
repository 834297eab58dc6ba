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
    device: Annotated[
        str, typer.Option(envvar="STEPSCOPE_DEVICE", help="auto, cpu or cuda.")
    ] = "auto",
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again.")] = False,
    json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure bandwidth, FLOP and dispatch ceilings of this device, once; show the card."""
    import torch

    from stepscope.device.cuda import choose_device
    from stepscope.device.kept_ceilings import load_or_measure
    from stepscope.models.load import load_model
    from stepscope.report.card import card_text
    from stepscope.runner.job import build_decoder
    from stepscope.runner.twin import Twin, measure_twin

    status = StatusLine()
    where = choose_device(device)
    loaded = load_model(model, dtype, progress=status.show, told=status.say, device=where)
    count = thread_count(threads)
    measured = load_or_measure(
        loaded.spec,
        count,
        refresh=refresh,
        progress=status.measuring,
        device=where,
    )
    products = build_decoder(loaded, "auto").products
    twin = Twin(loaded.spec, products, device=torch.device(where))
    measured = replace(measured, twin=tuple(measure_twin(twin, (1, 4, 16))))
    status.clear()
    if json:
        print_json(measured.to_dict())
    else:
        stdout().print(card_text(loaded.spec, measured, products), highlight=False, markup=False)
