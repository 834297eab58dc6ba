"""Whatever the policy, the settings and the workload: the same text, all end, no page is lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.engine.plan import StepPlan
from stepscope.engine.policies import POLICIES, policy_of
from stepscope.engine.policies.admission import ADMISSIONS
from stepscope.engine.policies.preempt import VICTIMS
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from tests.engine.harness import VOCAB, Clock, Outcome, alone, ask, build, finish, run
from tests.policy_views import sent

EXAMPLE = Path(__file__).resolve().parents[2] / "scenarios" / "longest_first.py"
# Every policy, and those settings that make another policy of it.
TEXTS = [
    *POLICIES,
    "decode-first,prompts=chunks",
    "lpm,share=2",
    "priority,preempt=yes",
    "sjf,by=oracle",
    "sjf,by=predicted,sigma=1",
    "srpt,by=predicted,sigma=1",
    "hrrn,by=oracle",
    "mlfq,quantum=1,idle_s=0.0000001",
    "mlfq,quantum=4,idle_s=0",
    "vtc,w_in=0.5,w_out=10",
    "edf,ttft_ms=0.00001,itl_ms=0.00001",
    "deadline-chunk,ttft_ms=0.0001,itl_ms=0.00005,least=1",
    "deadline-chunk,per_token_ms=0.00001,alpha_ms=1",
    f"{EXAMPLE}:longest_first",
]


@dataclass(frozen=True)
class World:
    """A workload that fits: no request needs more pages than there are."""

    text: str
    pages: int
    page_size: int
    limits: Limits
    asked: list[tuple[int, int, int, int]]  # head, prompt tokens beyond it, max_tokens, arrival
    prefix: str = "off"
    swap: bool = False
    tick: int = 1

    def requests(self) -> list[Request]:
        return [self._request(i, *values) for i, values in enumerate(self.asked)]

    def _request(self, id: int, head: int, own: int, most: int, arrival: int) -> Request:
        """Heads are shared by many; ends, clients and priorities follow from the id."""
        prompt = [(13 * head + i) % VOCAB for i in range(5 * head)]
        prompt += [(31 * id + 7 * i) % VOCAB for i in range(own)]
        room = self.pages * self.page_size
        prompt = prompt[: max(room - most, 1)]
        request = ask(id, prompt, min(most, room - len(prompt) + 1), arrival_ns=arrival)
        return sent(request, f"client {id % 3}", (id * 7) % 3)

    def run(self, text: str = "") -> Outcome:
        made = build(
            self.requests(),
            policy_of(text or self.text),
            pages=self.pages,
            page_size=self.page_size,
            limits=self.limits,
            clock=Clock(self.tick),
            prefix=self.prefix,
            swap=self.swap,
        )
        conserving(made)
        return finish(made, most_steps=3_000)


def conserving(made: Outcome) -> None:
    """A step is never empty while somebody waits or runs."""
    scheduler = made.scheduler
    schedule = scheduler.schedule

    def watched() -> StepPlan:
        busy = scheduler.busy
        plan = schedule()
        assert plan.slices or not busy, "nothing is computed though something could run"
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign]


def settings_text(text: str, admission: str, victim: str) -> str:
    return (
        text + (f",admission={admission}" if admission else "") + (victim and f",victim={victim}")
    )


worlds = st.builds(
    World,
    text=st.builds(
        settings_text,
        st.sampled_from(TEXTS),
        st.sampled_from(["", *ADMISSIONS]),
        st.sampled_from(["", *VICTIMS]),
    ),
    pages=st.integers(2, 24),
    page_size=st.sampled_from([1, 2, 3, 7, 16]),
    limits=st.builds(
        Limits,
        max_seqs=st.integers(1, 6),
        token_budget=st.integers(1, 40),
        chunk=st.integers(1, 40),
    ),
    asked=st.lists(
        st.tuples(st.integers(0, 8), st.integers(1, 30), st.integers(1, 25), st.integers(0, 300)),
        min_size=1,
        max_size=9,
    ),
    prefix=st.sampled_from(["off", "off", "hash", "radix"]),
    swap=st.booleans(),
    tick=st.sampled_from([1, 1000]),
)
TIGHT = World("srpt", 7, 3, Limits(4, 5, 2), [(0, 4, 17, 20 * i) for i in range(6)])


@settings(max_examples=300, deadline=None)
@given(worlds)
@example(TIGHT)
@example(World("mlfq,quantum=1,idle_s=0", 7, 3, Limits(4, 5, 2), TIGHT.asked))
@example(World("priority,preempt=yes,victim=fewest-output", 7, 3, Limits(4, 5, 2), TIGHT.asked))
def test_all_end_with_their_own_text_and_every_page_comes_back(world: World) -> None:
    """Also: no livelock (3,000 steps are far more than any order needs), no empty step."""
    done = world.run()
    for request in world.requests():
        assert done.outputs[request.id] == alone(request.tokens, request.sampling.max_tokens)
        assert done.records[request.id].finish_reason == "length"
    assert done.complete and not done.scheduler.busy
    assert done.scheduler.pool.used == 0


@pytest.mark.parametrize("text", TEXTS)
def test_a_long_mixed_workload(text: str) -> None:
    """100 requests over few pages: preemption, waiting and prefixes, all at once."""
    draw = Random(5)
    asked = [
        (draw.choice([0, 8]), draw.randint(1, 25), draw.randint(1, 20), 60 * i) for i in range(100)
    ]
    world = World(text, 30, 4, Limits(6, 24, 16), asked)
    made = build(world.requests(), policy_of(text), pages=30, page_size=4, limits=world.limits)
    conserving(made)
    done = finish(made)
    assert done.outputs == {r.id: alone(r.tokens, r.sampling.max_tokens) for r in world.requests()}
    reserves = policy_of(text).admission is ADMISSIONS["reserve-max"]
    assert (done.preemptions == 0) == reserves
    assert done.scheduler.pool.used == 0


@pytest.mark.parametrize("text", TEXTS)
def test_every_decode_runs_in_every_step_under_policies_that_say_so(text: str) -> None:
    """Only prefill-first lets a prompt stall decodes."""
    asked = [ask(i, 6 + i, 8, arrival_ns=30 * i) for i in range(8)]
    done = run(asked, policy_of(text), limits=Limits(6, 12, 8))
    assert any(row.num_blocked_decodes for row in done.work) == (text == "prefill-first")


@pytest.mark.parametrize("text", ["chunked", "mlfq,quantum=8,idle_s=0.000001", "vtc"])
def test_nobody_starves_among_short_ones_that_keep_coming(text: str) -> None:
    """A long prompt of one client against a flood of another: it starts before half has passed."""
    flood = [sent(ask(i, 4, 6, arrival_ns=20 * i), "flood") for i in range(1, 200)]
    done = run([sent(ask(0, 60, 3, arrival_ns=50), "other"), *flood], policy_of(text),
               limits=Limits(2, 64, 64))  # fmt: skip
    ends = sorted(done.records, key=lambda i: done.records[i].finished_ns or 0)
    assert ends.index(0) < 100


@pytest.mark.parametrize("text", ["sjf", "srpt", "mlfq,quantum=8,idle_s=1000"])
def test_where_starving_is_the_definition_it_happens(text: str) -> None:
    """Without it, the test above would show nothing."""
    flood = [sent(ask(i, 4, 6, arrival_ns=20 * i), "flood") for i in range(1, 200)]
    done = run([sent(ask(0, 60, 3, arrival_ns=50), "other"), *flood], policy_of(text),
               limits=Limits(2, 64, 64))  # fmt: skip
    ends = sorted(done.records, key=lambda i: done.records[i].finished_ns or 0)
    assert ends.index(0) > 190
