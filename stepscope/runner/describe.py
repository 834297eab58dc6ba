"""What run.json says of a run before its first step."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from stepscope.device.cuda import describe_gpu
from stepscope.device.host import clock_resolution_ns, describe_host, versions
from stepscope.engine.policies import policy_for, settings_of
from stepscope.engine.recorder import cost_per_step_ns
from stepscope.engine.scheduler import Limits
from stepscope.records import RunMeta
from stepscope.roofline import Ceilings
from stepscope.runner.job import Job
from stepscope.runner.torch_runner import TorchRunner
from stepscope.store import new_run_id

BASIS = {
    "host clock": "measured",
    "device": "absent",
    "launches": "absent",
    "telemetry": "absent",
    "scheduled work": "measured",
    "queue": "measured",
    "memory": "measured",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a run was set up with beyond its scenario."""

    limits: Limits
    pages: int
    swap_pages: int | None
    ceilings: Ceilings | None


def run_meta(job: Job, runner: TorchRunner, setting: Setting) -> RunMeta:
    scenario, spec = job.scenario, job.decoder.spec
    slo = {"ttft_ms": scenario.slo.ttft_ms, "itl_ms": scenario.slo.itl_ms}
    lapped = spec.layers if runner.attention.name == "gather" else 0
    return RunMeta(
        run_id=new_run_id(scenario.name, job.policy),
        label=_label(job),
        stamp="MEASURED",
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        scenario=scenario.name,
        policy=job.policy,
        model=spec.to_dict(),
        device=_device(job, runner),
        engine=_engine(job, runner, setting),
        command=job.command,
        seed=scenario.workload.seed,
        workload={**scenario.to_dict(), "sha256": scenario.sha256()},
        slo={k: v for k, v in slo.items() if v is not None},
        ceilings=setting.ceilings.to_dict() if setting.ceilings else None,
        clock={
            "source": "time.monotonic_ns",
            "resolution_ns": clock_resolution_ns(),
            "timelines": 2 if _device_basis(job, runner) else 1,
        },
        recorder={
            "ns_per_step": round(cost_per_step_ns(lapped)),
            "laps_per_step": 10 + 2 * lapped,
        },
        basis={**BASIS, **_device_basis(job, runner)},
        versions=versions(),
        notes=list(job.notes),
    )


def _label(job: Job) -> str:
    """What tells this run from others of its scenario."""
    engine = job.scenario.engine
    launching = f"graphs={engine.graphs}" if engine.graphs != "eager" else ""
    return ", ".join(filter(None, (job.policy, launching, "overlap" if engine.overlap else "")))


def _device(job: Job, runner: TorchRunner) -> dict[str, Any]:
    """The host stays as it is: it launches, whatever computes."""
    host = {"kind": runner.device.type, "threads": job.threads, **describe_host()}
    return {**host, **describe_gpu()} if runner.device.type == "cuda" else host


def _device_basis(job: Job, runner: TorchRunner) -> dict[str, str]:
    """Where device times come from; nothing where there are none."""
    if runner.device.type == "cuda":
        return {"device": "measured with CUDA events"}
    # On a CPU the thread that computes is the device of an overlapped run.
    overlap = job.scenario.engine.overlap
    return {"device": "measured in the thread that computes"} if overlap else {}


def _engine(job: Job, runner: TorchRunner, setting: Setting) -> dict[str, Any]:
    engine, limits = job.scenario.engine, setting.limits
    return {
        "page_size": engine.page_size,
        "kv_pages": setting.pages,
        "kv_dtype": job.decoder.spec.kv_dtype,
        "prefix_cache": engine.prefix_cache,
        "preemption": engine.preemption,
        "swap_pages": setting.swap_pages,
        "max_seqs": limits.max_seqs,
        "token_budget": limits.token_budget,
        "chunk": limits.chunk,
        "policy": settings_of(policy_for(job.scenario, job.policy)),
        "dtype": job.decoder.spec.dtype,
        "graphs": engine.graphs,
        "graph_buckets": list(runner.graphs.buckets) if runner.graphs is not None else None,
        "overlap": engine.overlap,
        "products": job.decoder.products,
        "attention": runner.attention.name,
    }
