"""Carries out what a policy decides: pages, admission, preemption, and what a token changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from stepscope.engine.kv import PagePool
from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.policies import Policy, View
from stepscope.engine.request import Request
from stepscope.records import PartKind


@dataclass(frozen=True, slots=True)
class Limits:
    """token_budget bounds a step's tokens, chunk one request's prefill tokens in it."""

    max_seqs: int = 16
    token_budget: int = 512
    chunk: int = 512
    max_context: int = 8192


class Scheduler:
    """Owns the queues and the pages. Requests that ended in a step are in `ended` until taken."""

    def __init__(self, policy: Policy, pool: PagePool, limits: Limits, eos: Sequence[int]) -> None:
        self.policy = policy
        self.pool = pool
        self.limits = limits
        self.eos = frozenset(eos)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.preempted: list[Request] = []

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request, or end it with an error if it can never run here."""
        need = self.pool.pages_for(request.prompt_tokens)
        if request.prompt_tokens == 0:
            self._fail(request, "its prompt is empty; give it at least one token")
        elif request.prompt_tokens >= self.limits.max_context:
            self._fail(
                request,
                f"its prompt of {request.prompt_tokens:,} tokens leaves no room in the context "
                f"of {self.limits.max_context:,}; shorten it",
            )
        elif need > self.pool.total:
            self._fail_for_pages(request, need)
        else:
            self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Ask the policy and make its grants real. An empty plan means there is nothing to do."""
        self.preempted = []
        plan = StepPlan()
        view = self._view()
        running = set(map(id, self.running))
        for seen, tokens in self.policy.assign(view):
            request = cast(Request, seen)
            if id(request) in running:
                self._grow(request, tokens, plan)
            elif self.preempted:
                break  # pages just ran out: this is no moment to let somebody in
            else:
                self._admit(request, tokens, plan, self.policy.admit(view, request))
        planned = {id(s.request) for s in plan.decodes}
        plan.blocked_decodes = sum(r.decoding and id(r) not in planned for r in self.running)
        plan.preempted = len(self.preempted)
        plan.running, plan.waiting = len(self.running), len(self.waiting)
        plan.used_pages = self.pool.used
        return plan

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> list[tuple[Request, int]]:
        """Append sampled tokens (one per sampling slice), end what is finished, free its pages."""
        results: list[tuple[Request, int]] = []
        tokens = iter(token_ids)
        for piece in plan.slices:
            request = piece.request
            request.computed = piece.context
            request.high_water = max(request.high_water, request.computed)
            request.record.recomputed_tokens += piece.recomputed
            if piece.samples:
                token = next(tokens)
                request.tokens.append(token)
                request.record.output_tokens += 1
                results.append((request, token))
                self._stop_if_done(request, token)
        return results

    def refuse(self, request: Request) -> None:
        """End a request that came with an error of its own (it could not be tokenized)."""
        self._end(request, "error")

    def fail_head(self) -> None:
        """Nothing runs and the first in the queue does not fit: it never will."""
        if self.waiting:
            head = self.waiting[0]
            self._fail_for_pages(head, self.pool.pages_for(head.todo))

    def abort_all(self) -> None:
        """End everything that is queued or running (the run was interrupted)."""
        for request in [*self.running, *self.waiting]:
            self._end(request, "aborted")

    def _view(self) -> View:
        growth = sum(
            r.decoding and self.pool.pages_for(r.computed + 1) > len(r.pages) for r in self.running
        )
        return View(
            waiting=self.waiting,
            running=self.running,
            free_pages=self.pool.free,
            total_pages=self.pool.total,
            page_size=self.pool.page_size,
            growth=growth,
            token_budget=self.limits.token_budget,
            chunk=self.limits.chunk,
            max_seqs=self.limits.max_seqs,
            policy=self.policy,
        )

    def _grow(self, request: Request, tokens: int, plan: StepPlan) -> None:
        """Give a running request the pages for its next tokens, preempting others for them."""
        while request in self.running:
            need = self.pool.pages_for(request.computed + tokens)
            if self._hold(request, need):
                _append(plan, request, tokens)
                return
            if len(self.running) == 1:
                self._fail_for_pages(request, need)
                return
            self._preempt(cast(Request, self.policy.victim(self.running)), plan)

    def _admit(self, request: Request, tokens: int, plan: StepPlan, pages: int) -> None:
        if not self._hold(request, pages):
            return
        self.waiting.remove(request)
        self.running.append(request)
        plan.admitted += 1
        _append(plan, request, tokens)

    def _hold(self, request: Request, pages: int) -> bool:
        """Let the request hold at least so many pages; False, and nothing taken, if it cannot."""
        taken = self.pool.take(max(pages - len(request.pages), 0))
        if taken is None:
            return False
        request.pages.extend(taken)
        return True

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Free its pages; it returns to the head of the queue with nothing computed."""
        plan.drop(victim)
        self._release(victim)
        self.running.remove(victim)
        victim.computed = 0
        victim.record.preemptions += 1
        self.waiting.appendleft(victim)
        self.preempted.append(victim)

    def _stop_if_done(self, request: Request, token: int) -> None:
        if token in self.eos and not request.sampling.ignore_eos:
            self._end(request, "eos")
        elif (
            request.output_tokens >= request.sampling.max_tokens
            or len(request.tokens) >= self.limits.max_context
        ):
            self._end(request, "length")

    def _fail_for_pages(self, request: Request, need: int) -> None:
        self._fail(
            request,
            f"it needs {need:,} KV pages of {self.pool.page_size} tokens and the cache has "
            f"{self.pool.total:,}; raise engine.kv_tokens",
        )

    def _fail(self, request: Request, why: str) -> None:
        request.record.error = f"request {request.id}: {why}"
        self._end(request, "error")

    def _end(self, request: Request, reason: str) -> None:
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self._release(request)
        request.record.finish_reason = reason
        self.ended.append(request)

    def _release(self, request: Request) -> None:
        self.pool.give_back(request.pages)
        del request.pages[:]


def _append(plan: StepPlan, request: Request, tokens: int) -> None:
    """Add the slice. Tokens below the high-water mark were computed once before: recompute."""
    start = request.computed
    recomputed = max(0, min(start + tokens, request.high_water) - start)
    samples = tokens == request.todo
    if request.decoding:
        plan.decodes.append(Slice(request, start, tokens, "decode", samples))
    else:
        kind: PartKind = "recompute" if recomputed else "prefill"
        plan.prefills.append(Slice(request, start, tokens, kind, samples, recomputed))
