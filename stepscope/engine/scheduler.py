"""Carries out what a policy decides: pages, admission, preemption, and what a token changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from stepscope.engine.kv import PagePool
from stepscope.engine.memory import Memory
from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.policies import Policy, View
from stepscope.engine.prefix import PrefixCache
from stepscope.engine.request import Request
from stepscope.records import PartKind

NOT_FINITE = (
    "the model's logits for its next token are not finite (NaN or infinity); "
    "check the weights, or try --dtype fp32"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """token_budget bounds a step's tokens, chunk one request's prefill tokens in it."""

    max_seqs: int = 16
    token_budget: int = 512
    chunk: int = 512
    max_context: int = 8192


class Scheduler:
    """Owns the queues and the pages. Requests that ended in a step are in `ended` until taken."""

    def __init__(
        self,
        policy: Policy,
        pool: PagePool,
        limits: Limits,
        eos: Sequence[int],
        prefix: PrefixCache | None = None,
        swap: bool = False,  # preempted requests wait in host memory and compute nothing again
        swap_pages: int | None = None,  # as long as there are so many free; None = always
    ) -> None:
        self.policy = policy
        self.pool = pool
        self.memory = Memory(pool, prefix, swap_pages)
        self.swap = swap
        self.limits = limits
        self.eos = frozenset(eos)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: list[Request] = []
        self.preempted: list[Request] = []
        self.unswapped: list[Request] = []  # of those, for whom the host had no room
        self.num_unswapped = 0  # over the whole run
        self.now_ns = 0  # when this iteration began, told by the loop
        self._last: Sequence[Slice] = ()  # what was committed since the policy was asked
        self._remembered: Any = None  # the policy's own, folded over the views

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def needs_tokens(self) -> bool:
        """Does a draw of the next step depend on which tokens are pending?"""
        return any(r.pending and r.sampling.penalizes for r in self.running)

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
            request.prefix = self.memory.prefix
            request.record.cached_tokens = None if request.prefix is None else 0
            self.waiting.append(request)

    def schedule(self) -> StepPlan:
        """Ask the policy and make its grants real. An empty plan means there is nothing to do."""
        self.preempted, self.unswapped = [], []
        plan = StepPlan()
        view = self._ask(plan)
        chosen = len(self.preempted)
        running = set(map(id, self.running))
        for seen, tokens in self.policy.assign(view):
            request = cast(Request, seen)
            if id(request) in running:
                self._grow(request, tokens, plan, view)
            elif len(self.preempted) > chosen:
                break  # pages just ran out: this is no moment to let somebody in
            else:
                self._admit(request, tokens, plan, self.policy.admit(view, request))
        planned, going_on = {id(s.request) for s in plan.decodes}, self._going_on()
        plan.blocked_decodes = sum(r.decoding and id(r) not in planned for r in going_on)
        plan.preempted = len(self.preempted)
        plan.running, plan.waiting = len(going_on), len(self.waiting)
        plan.used_pages = self.pool.used
        if plan.slices:  # else nothing is computed, and the next step takes them
            self._hand_over(plan)
        return plan

    def _hand_over(self, plan: StepPlan) -> None:
        """What was moved and evicted for this step."""
        memory = self.memory
        plan.moves, memory.moves = memory.moves, []
        if self.swap:
            plan.swapped_pages = sum(move.kind in ("in", "out") for move in plan.moves)
        if memory.prefix is not None:
            plan.evicted_pages, memory.evicted = memory.evicted, 0
            plan.prefix_hit_tokens = sum(piece.cached for piece in plan.slices)

    def advance(self, plan: StepPlan) -> None:
        """The step was launched: what it computes counts as computed, what it samples is pending.

        Later steps may build on both before the tokens are known.
        """
        self._last = plan.slices
        for piece in plan.slices:
            request = piece.request
            request.computed = piece.context
            request.high_water = max(request.high_water, request.computed)
            request.pending += piece.samples
            request.record.recomputed_tokens += piece.recomputed
            if request.record.cached_tokens is not None:
                request.record.cached_tokens += piece.cached

    def commit(self, plan: StepPlan, token_ids: Sequence[int]) -> list[tuple[Request, int]]:
        """Append sampled tokens (one per sampling slice), end what is finished, free its pages.

        A request that ended since the step was launched gets nothing: the slice was extra.
        """
        results: list[tuple[Request, int]] = []
        tokens = iter(token_ids)
        for piece in plan.slices:
            request = piece.request
            token = next(tokens) if piece.samples else None
            request.pending -= piece.samples
            if request.record.finish_reason is not None:
                piece.extra, piece.samples = True, False
                continue
            if token is not None:
                if token < 0:  # the runner's word for logits that are not finite
                    piece.samples = False
                    self._fail(request, NOT_FINITE)
                    continue
                request.tokens.append(token)
                request.record.output_tokens += 1
                results.append((request, token))
                self._stop_if_done(request, token)
            if piece.kind != "decode" and request.record.finish_reason is None:
                self.memory.remember(request)
        return results

    def refuse(self, request: Request) -> None:
        """End a request that came with an error of its own (it could not be tokenized)."""
        self._end(request, "error")

    def stop(self, request: Request) -> None:
        """Its text met a stop string: it ends, or has ended already and the reason changes."""
        if request.record.finish_reason is None:
            self._end(request, "stop")
        else:
            request.record.finish_reason = "stop"

    def fail_head(self) -> None:
        """Nothing runs and the first in the queue was not let in: it never will be."""
        if not self.waiting:
            return
        head = self.waiting[0]
        need = max(self.pool.pages_for(head.length), self.policy.admit(self._view(), head))
        if need > self.pool.total:
            self._fail_for_pages(head, need)
        else:
            self._fail(head, f"policy {self.policy.name} does not let it in though nothing runs")

    def abort_all(self) -> None:
        """End everything that is queued or running (the run was interrupted)."""
        for request in [*self.running, *self.waiting]:
            self._end(request, "aborted")

    def _ask(self, plan: StepPlan) -> View:
        """Let the policy remember what happened, and preempt whom it wants out of the way."""
        view = self._view()
        self._remembered = self.policy.remember(view.memory, view)
        self._last = ()
        if self._remembered is not None:
            view = replace(view, memory=self._remembered)
        unwanted = self.policy.evict(view)
        for seen in unwanted:
            self._preempt(cast(Request, seen), plan)
        return self._view() if unwanted else view

    def _going_on(self) -> list[Request]:
        """Running requests without those whose pending token is their last."""
        longest = self.limits.max_context
        return [
            r
            for r in self.running
            if not (r.pending and (r.output_tokens >= r.max_tokens or r.length >= longest))
        ]

    def _view(self) -> View:
        going_on = self._going_on()
        growth = sum(
            r.decoding and self.pool.pages_for(r.computed + 1) > len(r.pages) for r in going_on
        )
        return View(
            waiting=self.waiting,
            running=going_on,
            free_pages=self.pool.available,
            total_pages=self.pool.total,
            page_size=self.pool.page_size,
            growth=growth,
            token_budget=self.limits.token_budget,
            chunk=self.limits.chunk,
            max_seqs=self.limits.max_seqs,
            policy=self.policy,
            now_ns=self.now_ns,
            last=self._last,
            memory=self._remembered,
        )

    def _grow(self, request: Request, tokens: int, plan: StepPlan, view: View) -> None:
        """Give a running request the pages for its next tokens, preempting others for them."""
        while request in self.running:
            need = self.pool.pages_for(request.computed + tokens)
            if self.memory.hold(request, need):
                _append(plan, request, tokens)
                return
            candidates = self._going_on()
            if len(candidates) == 1:
                if len(self.running) == 1 and not request.pending:
                    self._fail_for_pages(request, need)
                return  # else its own end or that of others, now pending, may bring pages
            self._preempt(cast(Request, self.policy.victim(view, candidates)), plan)

    def _admit(self, request: Request, tokens: int, plan: StepPlan, pages: int) -> None:
        before = request.computed  # 0, or what was swapped out
        if not self.memory.enter(request, tokens, pages):
            return
        self.waiting.remove(request)
        self.running.append(request)
        plan.admitted += 1
        _append(plan, request, min(tokens, request.todo), request.computed - before)

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Free its pages; it returns to the head of the queue, swapped out or to be recomputed."""
        plan.drop(victim)
        self.running.remove(victim)
        if not (self.swap and victim.computed and self._swap_out(victim)):
            self.memory.remember(victim)
            self.memory.release(victim)
            victim.computed = 0
        victim.record.preemptions += 1
        self.waiting.appendleft(victim)
        self.preempted.append(victim)

    def _swap_out(self, victim: Request) -> bool:
        if self.memory.swap_out(victim):
            return True
        self.unswapped.append(victim)
        self.num_unswapped += 1
        return False

    def _stop_if_done(self, request: Request, token: int) -> None:
        sampling = request.sampling
        may_stop = request.record.output_tokens > sampling.min_tokens
        if may_stop and token in self.eos and not sampling.ignore_eos:
            self._end(request, "eos")
        elif may_stop and token in sampling.stop_ids:
            self._end(request, "stop")
        elif (
            request.record.output_tokens >= sampling.max_tokens
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
        if reason != "error":
            self.memory.remember(request)
        self.memory.release(request)
        request.record.finish_reason = reason
        self.ended.append(request)


def _append(plan: StepPlan, request: Request, tokens: int, cached: int = 0) -> None:
    """Add the slice. Tokens below the high-water mark were computed once before: recompute."""
    start = request.computed
    recomputed = max(0, min(start + tokens, request.high_water) - start)
    samples = tokens == request.todo
    if request.decoding:
        plan.decodes.append(Slice(request, start, tokens, "decode", samples, cached=cached))
    else:
        kind: PartKind = "recompute" if recomputed else "prefill"
        plan.prefills.append(Slice(request, start, tokens, kind, samples, recomputed, cached))
