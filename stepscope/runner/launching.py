"""How decode steps are launched: one call after the other, compiled, or as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.device.cuda import count_launches
from stepscope.engine.kv import PagePool
from stepscope.engine.plan import StepPlan
from stepscope.engine.scheduler import Limits
from stepscope.errors import UsageError
from stepscope.models.backends import choose_attention
from stepscope.runner.compiled import CompiledDecode
from stepscope.runner.gpu_compiled import CompiledOnGpu
from stepscope.runner.graphs import NOT_PAGED, CudaGraphs, default_buckets
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import TorchRunner
from stepscope.runner.twin import twin_batches
from stepscope.sections import EngineSection

Attach = Callable[[TorchRunner, Sequence[int]], None]  # graphs at these batch sizes


def check_launching(engine: EngineSection, device: str) -> None:
    """Raises UsageError for attention or graphs that this kind of device (cpu, cuda) cannot do."""
    attention = choose_attention(engine.attention, device)
    if engine.graphs != "cuda":
        return
    if device != "cuda":
        raise UsageError("graphs = cuda needs a CUDA device; use --graphs eager on a CPU")
    if attention != "paged":
        raise UsageError(NOT_PAGED)


def attach_graphs(
    runner: TorchRunner, engine: EngineSection, max_seqs: int, told: Callable[[str], None]
) -> None:
    """Give the runner the graphs that the scenario asks for. Raises UsageError if it cannot."""
    attach = graph_attacher(engine.graphs, told)
    if attach is not None:
        attach(runner, engine.graph_buckets or default_buckets(max_seqs))


def graph_attacher(graphs: str, told: Callable[[str], None] = lambda text: None) -> Attach | None:
    """How a runner gets graphs of this kind; None for eager."""
    return {"eager": None, "compile": _compiled(told), "cuda": _cuda_graphs(told)}[graphs]


def _compiled(told: Callable[[str], None]) -> Attach:
    def attach(runner: TorchRunner, buckets: Sequence[int]) -> None:
        form = CompiledOnGpu if runner.device.type == "cuda" else CompiledDecode
        runner.graphs = form(runner.decoder, runner.attention, buckets, told)

    return attach


def _cuda_graphs(told: Callable[[str], None]) -> Attach:
    def attach(runner: TorchRunner, buckets: Sequence[int]) -> None:
        graphs = CudaGraphs(runner.decoder, runner.attention, buckets)
        graphs.prepare(lambda bucket: told(f"capturing a graph of batch {bucket}"))
        runner.graphs = graphs

    return attach


def measure_launches(
    runner: TorchRunner, pool: PagePool, limits: Limits
) -> dict[tuple[str, int], int]:
    """(graph, rows) -> launches of a decode step with greedy sampling; empty without a profiler.

    rows: the bucket of a graph, else the batch. Only batches of powers of two, and the largest.
    """
    most = min(limits.max_seqs, pool.total)
    found: dict[tuple[str, int], int] = {}
    for batch in twin_batches(most):
        plan = decode_plan(batch, pool.page_size, pool.page_size)
        count = launches_of(runner, plan)
        if count is None:
            return {}
        found[plan.graph or "eager", plan.padded_batch or batch] = count
    return found


def launches_of(runner: TorchRunner, plan: StepPlan) -> int | None:
    """Of one step, from its index tensors to the copy of its ids; None without a profiler."""
    steps(runner, plan, 2)
    return count_launches(lambda: steps(runner, plan, 1))
