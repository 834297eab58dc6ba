"""What can be set for any policy: admission, victim, limits, knobs; and a policy of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.policies import POLICIES, described, limits_in, policy_of, settings_of
from stepscope.engine.policies.admission import ADMISSIONS, peak_pages
from stepscope.engine.policies.preempt import VICTIMS
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.errors import StepscopeError, UsageError
from tests.engine.harness import Outcome, alone, ask, run
from tests.policy_views import admitted, sent, spoken, view_of

ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------ admission


def alike(count: int = 6) -> list[Request]:
    """Pages of 4: 2 each for the prompt, 6 each at the end."""
    return [ask(i, 8, 17) for i in range(count)]


def under(rule: str, pages: int = 20, **options: Any) -> Outcome:
    limits = Limits(token_budget=100, chunk=100)
    policy = policy_of(f"chunked,admission={rule}")
    return run(alike(), policy, pages=pages, page_size=4, limits=limits, **options)


@pytest.mark.parametrize(
    "rule,first,preempts",
    [
        ("reserve-max", 3, False),  # 6 pages each
        ("watermark", 6, True),  # 2 pages each, and 1 % of 20 is none
        ("watermark,watermark=0.25", 6, True),  # nobody runs yet: nothing is spared
        ("optimistic", 5, True),  # 2 each and half of the other 4
        ("optimistic,ratio=1", 3, False),
        ("optimistic,ratio=0", 6, True),
        ("peak", 3, False),  # all at once, they are longest at the same time
    ],
)
def test_how_many_enter_and_whether_that_was_too_many(
    rule: str, first: int, preempts: bool
) -> None:
    done = under(rule)
    assert done.work[0].num_running == first
    assert (done.preemptions > 0) == preempts
    assert done.outputs == {r.id: alone(r.tokens, 17) for r in alike()}


def test_the_watermark_is_a_share_of_the_pool_while_somebody_runs() -> None:
    """7 of 10 pages are free, the prompt takes 3: a spare 4 is just left, a fifth is not."""
    running = ask(9, 4)
    running.tokens.append(1)
    running.computed = 4
    fits = [
        next(iter(view.admissible()), None) is not None
        for share in (0.4, 0.5)
        for view in [
            view_of(
                f"chunked,watermark={share}",
                waiting=[ask(0, 12)],
                running=[running],
                free_pages=7,
                total_pages=10,
            )
        ]
    ]
    assert fits == [True, False]


def test_peak_admits_what_reservation_does_not() -> None:
    """A short request ends before the long one needs its pages."""
    asked = [(0, 4, 29), (1, 12, 5)]  # pages of 4: 8 at the end, and 4; 8 there are

    def second(rule: str) -> Outcome:
        made = [ask(*a, ignore_eos=True) for a in asked]
        return run(made, policy_of(f"chunked,admission={rule}"), pages=8, page_size=4)

    assert second("peak").work[0].num_running == 2 and second("peak").preemptions == 0
    assert second("reserve-max").work[0].num_running == 1
    tight = [ask(0, 4, 29), ask(1, 12, 25)]
    late = run(tight, policy_of("chunked,admission=peak"), pages=8, page_size=4)
    assert late.work[0].num_running == 1, "here both are long at the same time"


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(10, 24),
)
def test_peak_never_preempts_where_outputs_are_known(
    sizes: list[tuple[int, int]], page_size: int, pages: int
) -> None:
    """Whole prompts in one step and every decode in each: then the forecast is exact."""
    fitting = [(p, m) for p, m in sizes if -(-(p + m) // page_size) <= pages]
    asked = [ask(i, p, m, ignore_eos=True) for i, (p, m) in enumerate(fitting)]
    limits = Limits(token_budget=10_000, chunk=10_000)
    policy = policy_of("chunked,admission=peak")
    assert run(asked, policy, pages=pages, page_size=page_size, limits=limits).preemptions == 0


def test_the_peak_by_hand() -> None:
    """Pages of 1. 0 grows from 4 to 9, 1 from 5 to 7: when 1 ends, 0 has 6, and later 9 alone."""
    whole, single = (view_of("chunked", page_size=1, chunk=chunk) for chunk in (8, 1))
    long, short = ask(0, 4, 6), ask(1, 5, 3)
    assert peak_pages(whole, [long, short]) == 13
    assert peak_pages(whole, [long]) == 9
    # In chunks of 1, 1 has its prompt a step later than 0: when it ends, 0 has 7.
    assert peak_pages(single, [long, short]) == 14


# ------------------------------------------------------------------ victims


@pytest.mark.parametrize(
    "rule,victim",
    [("youngest", 3), ("lowest-priority", 1), ("fewest-output", 2)],
)
def test_who_is_put_back(rule: str, victim: int) -> None:
    running = [
        sent(spoken(0, 4, 0), priority=1),
        sent(spoken(1, 3, 1), priority=9),
        sent(spoken(2, 1, 2), priority=0),
        sent(spoken(3, 2, 3), priority=2),
    ]
    view = view_of(f"chunked,victim={rule}")
    assert view.policy.victim(view, running).id == victim


@pytest.mark.parametrize("rule", VICTIMS)
def test_of_equals_the_latest_goes(rule: str) -> None:
    view = view_of(f"chunked,victim={rule}")
    assert view.policy.victim(view, [ask(1, 4), ask(2, 4), ask(0, 4)]).id == 2


def test_victims_on_a_trace() -> None:
    """0 and 1 decode when 2 comes; then pages run out: 2 is the youngest and has said least."""
    victims = {}
    for rule in VICTIMS:
        asked = [sent(ask(i, 7, 20, arrival_ns=30 * i), priority=-i) for i in range(3)]
        done = run(asked, policy_of(f"chunked,victim={rule}"), pages=8, page_size=4)
        victims[rule] = next(e.request for e in done.events if e.kind == "preempt")
        assert done.outputs == {r.id: alone(r.tokens[:7], 20) for r in asked}
    assert victims == {"youngest": 2, "fewest-output": 2, "lowest-priority": 0}


# ------------------------------------------------------------------ the text


def test_a_text_names_a_policy_and_its_settings() -> None:
    text = "sjf,by=predicted,sigma=0.25,admission=peak,victim=fewest-output,chunk=256,max_seqs=4"
    policy = policy_of(text)
    assert settings_of(policy) == {
        "admission": "peak",
        "victim": "fewest-output",
        "watermark": 0.01,
        "ratio": 0.5,
        "by": "predicted",
        "sigma": 0.25,
        "seed": 0,
    }
    assert limits_in(text) == {"chunk": 256, "max_seqs": 4}
    assert settings_of(POLICIES["sjf"])["by"] == "prompt", "the policy itself is as it was"


def test_deadlines_come_from_the_scenario_unless_given() -> None:
    slo = {"ttft_ms": 300.0, "itl_ms": 40.0}
    both = settings_of(policy_of("edf,itl_ms=25", slo))
    assert (both["ttft_ms"], both["itl_ms"]) == (300.0, 25)
    assert settings_of(policy_of("edf"))["ttft_ms"] == 1000.0
    assert "ttft_ms" not in settings_of(policy_of("chunked", slo))


@pytest.mark.parametrize(
    "text,says",
    [
        ("chunkd", "there is no policy 'chunkd'.*did you mean chunked"),
        ("chunked,admission=all", "admission=all.*reserve-max.*peak"),
        ("chunked,victim=oldest", "victim=oldest.*youngest"),
        ("chunked,chunk=0", "chunk=0.*whole number from 1"),
        ("chunked,chunk=2.5", "chunk=2.5.*whole number"),
        ("chunked,max_seqs=few", "max_seqs=few.*whole number"),
        ("chunked,sigma=1", "'sigma' is not a setting of it; give admission"),
        ("sjf,by=guess", "by=guess.*prompt, oracle and predicted"),
        ("srpt,by=prompt", "by=prompt.*oracle and predicted"),
        ("sjf,sigma=-1", "sigma=-1.*a number from 0 to 10"),
        ("mlfq,quantum=0", "quantum=0.*from 1"),
        ("lpm,share=1.5", "share=1.5.*whole"),
        ("chunked,watermark=2", "watermark=2.*from 0 to 1"),
        ("edf,ttft_ms=soon", "ttft_ms=soon"),
        ("edf,ttft_ms=1e300", "ttft_ms=1e"),
        ("nowhere.py:thing", "there is no policy file .*nowhere.py"),
    ],
)
def test_what_a_text_cannot_say(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        policy_of(text)


def test_all_that_can_be_set_is_listed() -> None:
    names = [name for name, _ in described()]
    assert set(POLICIES) < set(names)
    listed = " ".join(f"{name} {about}" for name, about in described())
    for word in [*ADMISSIONS, *VICTIMS, "chunk", "token_budget", "max_seqs", "PATH.py:NAME"]:
        assert word in listed
    for name, policy in POLICIES.items():
        at = names.index(name)
        for knob in policy.knobs:
            assert any(row.strip().startswith(f",{knob}=") for row in names[at + 1 : at + 9])
        assert policy.about.endswith(".") and len(policy.about) < 200


def test_oracles_are_called_oracles() -> None:
    for name, policy in POLICIES.items():
        if "by" in policy.knobs:
            assert "oracle" in policy.knobs["by"].about
        assert ("oracle" in policy.about) == (name in ("sjf", "srpt"))


# ------------------------------------------------------------------ one's own


def test_the_example_runs() -> None:
    policy = policy_of("longest_first.py:longest_first,max_seqs=1", folder=ROOT / "scenarios")
    asked = [ask(0, 3, 2), ask(1, 9, 2), ask(2, 5, 2)]
    assert admitted(run(asked, policy, limits=Limits(max_seqs=1))) == [1, 2, 0]
    assert settings_of(policy_of(f"{ROOT}/scenarios/longest_first.py:longest_first"))


def own(tmp_path: Path, code: str, name: str = "mine") -> str:
    file = tmp_path / "policy.py"
    file.write_text(code)
    return f"{file}:{name}"


GRANT = "from stepscope.engine.policies import Grant\n"


def test_a_function_is_enough(tmp_path: Path) -> None:
    """Its order, admission and victim are those of chunked, and can be set as for any."""
    code = GRANT + (
        "def mine(view):\n"
        "    '''One request a step.'''\n"
        "    for r in [*view.running, *view.admissible()]:\n"
        "        return [Grant(r, r.todo)]\n"
        "    return []\n"
    )
    policy = policy_of(own(tmp_path, code) + ",victim=fewest-output")
    assert policy.about == "One request a step." and policy.victim is VICTIMS["fewest-output"]
    done = run([ask(0, 3, 2), ask(1, 9, 2)], policy)
    assert done.trace == ["p0:3", "d0", "p1:9", "d1"]


@pytest.mark.parametrize(
    "code,says",
    [
        ("def mine(view:\n", "policy.py line 1: SyntaxError"),
        ("import nowhere_at_all\n", "line 1: ModuleNotFoundError"),
        ("\nmine = 1 / 0\n", "line 2: ZeroDivisionError"),
        ("def yours(view): ...\n", "has no policy or function 'mine'"),
        ("mine = 5\n", "has no policy or function 'mine'"),
    ],
)
def test_a_file_that_is_no_policy(tmp_path: Path, code: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        policy_of(own(tmp_path, code))


@pytest.mark.parametrize(
    "body,says",
    [
        ("return [Grant(r, 0) for r in view.waiting]", "grants 0 tokens to request 0"),
        ("return [Grant(r, 99) for r in view.waiting]", "can use 1 to 4"),
        ("return [Grant(view.waiting[0], 4)] * 2", "twice in one step"),
        ("return [Grant(r, 4) for r in view.waiting]", "grants nothing although requests run"),
        ("return view.nothing", "line 3: AttributeError"),
        ("return None", "TypeError"),
        ("return [Grant(r, 'x') for r in view.waiting]", "grants x tokens"),
    ],
)
def test_a_policy_that_answers_nonsense_ends_the_run_with_a_sentence(
    tmp_path: Path, body: str, says: str
) -> None:
    policy = policy_of(own(tmp_path, f"{GRANT}def mine(view):\n    {body}\n"))
    with pytest.raises(StepscopeError, match=says) as caught:
        run([ask(0, 4, 2)], policy)
    assert "policy.py:mine" in str(caught.value)


@pytest.mark.parametrize(
    "choice,says",
    [
        ("evict=lambda view: view.nothing", "AttributeError"),
        ("evict=lambda view: None", "TypeError"),
        ("evict=lambda view: list(view.waiting)[:1]", "puts back 0, not running"),
        ("evict=lambda view: list(view.running)[:1] * 2", "puts back a request twice"),
        ("victim=lambda view, candidates: None", "AttributeError"),
        ("victim=lambda view, candidates: view.waiting[0]", "takes the pages of 2, not running"),
        ("remember=lambda memory, view: 1 // 0", "ZeroDivisionError"),
        ("order=lambda view: view.waiting[9]", "IndexError"),
        ("admission=replace(base.admission, hold=lambda view, request: {}[0])", "KeyError"),
        ("assign=forever", "RecursionError"),
    ],
)
@pytest.mark.parametrize("overlap", [False, True])
def test_each_choice_that_is_nonsense_ends_the_run_with_a_sentence(
    tmp_path: Path, choice: str, says: str, overlap: bool
) -> None:
    code = (
        "from dataclasses import replace\n"
        "from stepscope.engine.policies import POLICIES\n"
        "base = POLICIES['chunked']\n"
        "def forever(view): return forever(view)\n"
        f"mine = replace(base, {choice})\n"
    )
    policy = policy_of(own(tmp_path, code))
    asked = [ask(i, 4, 20) for i in range(3)]
    with pytest.raises(StepscopeError, match=says) as caught:
        run(asked, policy, pages=3, page_size=4, limits=Limits(max_seqs=2), overlap=overlap)
    assert "policy.py:mine" in str(caught.value)


def test_a_policy_that_lets_nobody_in_is_named(tmp_path: Path) -> None:
    """The cache is large enough, so it is not blamed."""
    done = run([ask(0, 4, 2)], policy_of(own(tmp_path, "def mine(view): return []\n")))
    error = done.records[0].error
    assert error and error.endswith("policy.py:mine does not let it in though nothing runs")
