"""Whatever a step computes lies on the device of the weights, and nothing of it on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException

from stepscope.engine.plan import Move, Slice, StepPlan
from stepscope.engine.request import Sampling
from stepscope.models import transfer
from stepscope.models.logprobs import logprobs_of
from stepscope.models.sampling import sample
from stepscope.runner.probe import decode_plan, prefill_plan
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.fake_gpu import NoWaiting, fake_gpu, on_gpu

aten = torch.ops.aten
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 251}
NAMES = ("llama", "gemma-2-9b", "gemma-3-1b", "qwen2.5-0.5b", "qwen3-0.6b")
ASKED = (
    Sampling(),
    Sampling(temperature=0.9, top_p=0.9, seed=3, logprobs=2),
    Sampling(repetition_penalty=1.2, logit_bias=((3, 2.0),), min_tokens=9),
)


def mixed_plan(page: int) -> StepPlan:
    """Three decodes of different settings, and a chunk with cached context before it."""
    plan = decode_plan(3, 40, page)
    for piece, sampling in zip(plan.decodes, ASKED, strict=True):
        piece.request.sampling = sampling
    request = prefill_plan(30, page).prefills[0].request
    plan.prefills = [Slice(request, 10, 20, "prefill", samples=True)]
    return plan


def step(runner: TorchRunner, plan: StepPlan) -> None:
    with NoWaiting():
        batch = runner.prepare(plan)
        logits = runner.forward(batch, lambda phase: None)
        ids = sample(logits, batch.draw)
        tensors = [logits, ids]
        if batch.asked is not None:
            tensors.append(logprobs_of(logits, ids, batch.asked))
    assert {t.device.type for t in tensors} == {"cuda"}
    assert ids.shape == (len(plan.slices),)
    runner._ids = ids


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp32", "int8"])
@pytest.mark.parametrize("attention", ["gather", "paged"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step(name: str, attention: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if attention == "paged":
        pytest.importorskip("triton", reason="the paged kernel needs triton")
    with fake_gpu(monkeypatch), torch.inference_mode():
        decoder = on_gpu(name, **SMALL)
        decoder.spec = replace(decoder.spec, kv_dtype=kv_dtype)
        runner = TorchRunner(decoder, 64, 16, attention)
        step(runner, mixed_plan(16))
        plan = decode_plan(3, 40, 16)
        for piece in plan.decodes:  # as under overlap: the last token is on the device only
            piece.request.tokens.pop()
            piece.request.pending = 1
            runner._places[piece.request] = 0
        step(runner, plan)


@pytest.mark.parametrize("name,batch", [("smollm2-135m", 128), ("llama-3.1-8b", 32)])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
def test_a_model_in_its_full_shape(
    name: str, batch: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason="the paged kernel needs triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    with fake_gpu(monkeypatch), torch.inference_mode():
        runner = TorchRunner(on_gpu(name, dtype), batch * 65, 16, "paged")
        step(runner, decode_plan(batch, 1024, 16))
        step(runner, prefill_plan(512, 16))


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_pages_move_between_host_and_device(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch), torch.inference_mode():
        decoder = on_gpu("llama", **SMALL)
        decoder.spec = replace(decoder.spec, kv_dtype=kv_dtype)
        runner = TorchRunner(decoder, 8, 16, "gather")
        held: Any = runner.cache
        held._slots = lambda pages: torch.empty(16 * len(pages), dtype=torch.int64)
        runner.move([Move("copy", 1, 2, 5), Move("out", 1, 0), Move("in", 0, 3)])
        assert {rows.device.type for rows in held.layers} == {"cuda"}


def test_a_tensor_left_on_the_host_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail."""
    with fake_gpu(monkeypatch), torch.inference_mode():
        decoder = on_gpu("llama", **SMALL)
        decoder.full_rope = tuple(torch.zeros(8192, 16) for _ in range(2))  # type: ignore[assignment]
        runner = TorchRunner(decoder, 64, 16, "gather")
        with pytest.raises(RuntimeError, match="same device"):
            step(runner, mixed_plan(16))


def test_what_waits_for_the_device_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail, in each of the ways there are."""
    with fake_gpu(monkeypatch):
        x = torch.zeros(3, 4, device="cuda")
        on_host = torch.zeros(3, 4)
        waiting: list[Callable[[], Any]] = [
            lambda: aten.index(x, [x > 0]),
            lambda: aten.index_put_(x, [x > 0], torch.zeros((), device="cuda")),
            lambda: aten._to_copy(on_host, device=x.device),
            lambda: aten._to_copy(torch.tensor(1.0), device=x.device),
            lambda: aten._to_copy(x, device=torch.device("cpu")),
            lambda: aten.copy_(x, on_host),
            lambda: x.sum().item(),
            lambda: bool((x > 0).all()),
            lambda: aten.nonzero(x),
        ]
        for call in waiting:
            with pytest.raises((AssertionError, DataDependentOutputException)), NoWaiting():
                call()
        with NoWaiting():
            torch.where(x > 0, 1.0, x).mul_(torch.tensor(2.0))


def test_a_greedy_decode_step_sends_two_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the host more than what is computed of a small model in that time."""
    pytest.importorskip("triton", reason="the paged kernel needs triton")
    with fake_gpu(monkeypatch), torch.inference_mode():
        runner = TorchRunner(on_gpu("llama", **SMALL), 4096, 16, "paged")
        sent: list[int] = []
        moved = transfer.moved

        def spy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
            sent.append(tensor.nbytes)
            return moved(tensor, device)

        monkeypatch.setattr(transfer, "moved", spy)
        step(runner, decode_plan(64, 300, 16))
        assert len(sent) == 2
        assert sum(sent) < 64 * (3 * 8 + 2 * 4 + 32 * 4) + 512, "and no page table of the pool"
