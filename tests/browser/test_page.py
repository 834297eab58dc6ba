"""The HTML report in a real browser: offline, inert, drawn, and with the right numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stepscope.records import PHASES, Run, Sample
from stepscope.text import ms
from tests.synthetic import Prefill, make_run

pytestmark = pytest.mark.browser

Show = Callable[..., Any]
HOSTILE = "</script><img src=x onerror=alert(1)><script>document.title='owned'</script>"

# Read from a copy, since Chromium warns about repeated reading of a canvas that is drawn to.
COPY = """const copy = document.createElement('canvas');
  copy.width = canvas.width; copy.height = canvas.height;
  const g = copy.getContext('2d', { willReadFrequently: true });
  g.drawImage(canvas, 0, 0);"""

# A blank canvas has a single colour.
COLOURS = f"""canvas => {{ {COPY}
  const pixels = g.getImageData(0, 0, copy.width, copy.height).data, seen = new Set();
  for (let i = 0; i < pixels.length; i += 12) seen.add(pixels.slice(i, i + 3).join());
  return seen.size;
}}"""
CORNER = f"canvas => {{ {COPY} return [...g.getImageData(1, 1, 1, 1).data].slice(0, 3); }}"


def busy_run(**more: Any) -> Run:
    prefills = [Prefill(at=20 + 15 * i, tokens=300, mixed=True, output_tokens=5) for i in range(4)]
    return make_run(decode_steps=90, prefills=prefills, idle=[(50, 400_000_000)], **more)


def timeline(opened: Any) -> Any:
    return opened.page.locator("main:not([hidden]) [data-figure=timeline]")


def view(opened: Any) -> tuple[int, int]:
    low, high = timeline(opened).get_attribute("data-view").split(",")
    return int(low), int(high)


def hover(opened: Any, step: int) -> list[str]:
    """Zooms until the step is wider than a pixel, points at it, and reads the tip's lines."""
    place = opened.page.evaluate(
        """step => { const v = VIEWS[0], s = v.run.steps, i = s.step.indexOf(step);
             v.look(s.begin[i] - 1e8, s.end[i] + 1e8); return v.place(i); }""",
        step,
    )
    timeline(opened).locator("canvas").hover(position=place)
    return timeline(opened).locator(".tip").inner_text().split("\n")


def test_a_page_is_clean_and_every_canvas_is_drawn(show: Show) -> None:
    opened = show(busy_run())
    canvases = opened.page.locator("canvas")
    assert canvases.count() == 7
    for i in range(canvases.count()):
        assert canvases.nth(i).evaluate(COLOURS) > 3
        assert canvases.nth(i).get_attribute("role") == "img"
        assert len(canvases.nth(i).get_attribute("aria-label")) > 20
    opened.assert_clean()


def test_hover_shows_the_numbers_of_the_step(show: Show) -> None:
    run = busy_run()
    opened = show(run)
    for record in (run.steps[12], max(run.steps, key=lambda s: s.sum_prefill_tokens or 0)):
        text = hover(opened, record.step)
        assert text[0].startswith(f"step {record.step} · {record.kind}")
        pairs = dict(zip(text[1::2], text[2::2], strict=False))
        assert pairs["wall"] == f"{ms(record.wall_ns)} ms"
        for name in PHASES:
            if record.phase_ns(name):
                assert pairs[name] == f"{ms(record.phase_ns(name))} ms"


def test_a_click_opens_the_step_and_its_phases_add_up(show: Show) -> None:
    run = busy_run()
    opened = show(run)
    hover(opened, 31)
    opened.page.mouse.down()
    opened.page.mouse.up()
    gantt = opened.page.locator("[data-figure=gantt]")
    assert gantt.locator(".finding").inner_text().startswith("step 31 ")
    gantt.locator("summary").click()
    record = next(s for s in run.steps if s.step == 31)
    gantt.locator("tbody").wait_for()
    shown = gantt.locator("tbody tr").all_inner_texts()
    named = [row.split("\t") for row in shown]
    assert [(row[0], row[2]) for row in named] == [
        (name, ms(record.phase_ns(name))) for name in PHASES if record.phase_ns(name)
    ]


def test_keys_zoom_pan_and_fit(show: Show) -> None:
    opened = show(busy_run())
    whole = view(opened)
    opened.page.keyboard.press("w")
    closer = view(opened)
    assert closer[0] > whole[0] and closer[1] < whole[1]
    opened.page.keyboard.press("d")
    assert view(opened)[0] > closer[0]
    opened.page.keyboard.press("a")
    assert view(opened) == closer
    opened.page.keyboard.press("s")
    opened.page.keyboard.press("f")
    assert view(opened) == whole
    opened.page.click("main:not([hidden]) button[data-key=w]")
    assert view(opened) == closer


def test_the_median_step_is_drawn_and_the_whisker_reaches_the_longest(show: Show) -> None:
    run = make_run(decode_steps=3000, gc=[(1500, 300_000_000)])
    opened = show(run)
    shown = opened.page.evaluate(
        """() => { const v = VIEWS[0], s = v.run.steps;
             return v.columns.map(c =>
               [c.work.map(i => s.wall[i]), s.wall[c.middle], s.longest[c.longest]]); }"""
    )
    assert any(len(walls) > 1 for walls, _, _ in shown)
    for walls, middle, longest in shown:
        assert middle == sorted(walls)[(len(walls) - 1) // 2]
        assert longest == max(walls)
    opened.assert_clean()


def test_a_button_in_the_stall_table_opens_that_step(show: Show) -> None:
    opened = show(busy_run())
    button = opened.page.locator("button.step").nth(1)
    step = button.get_attribute("data-step")
    button.click()
    assert f"step {step} " in opened.page.locator("[data-figure=gantt] .finding").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_and_paper(show: Show, scheme: str) -> None:
    opened = show(busy_run(), scheme=scheme)
    canvas = timeline(opened).locator("canvas")
    dark, light = [0x14, 0x18, 0x1F], [255, 255, 255]
    assert canvas.evaluate(CORNER) == (dark if scheme == "dark" else light)
    opened.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert canvas.evaluate(CORNER) == light
    opened.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert canvas.evaluate(CORNER) == (dark if scheme == "dark" else light)
    opened.page.click("#theme")
    assert canvas.evaluate(CORNER) == (light if scheme == "dark" else dark)
    opened.assert_clean()


def test_hostile_strings_stay_text(show: Show) -> None:
    run = make_run(label=HOSTILE, policy=HOSTILE, scenario=HOSTILE, run_id=HOSTILE)
    run.meta.samples = [Sample(0, HOSTILE, HOSTILE)]
    run.meta.notes = [HOSTILE, "{{script}}"]
    run.meta.command = [HOSTILE]
    run.requests[0].finish_reason, run.requests[0].error = "error", HOSTILE
    opened = show(run, make_run(label=HOSTILE + "2"))
    dialogs: list[str] = []
    opened.page.on("dialog", lambda d: (dialogs.append(d.message), d.dismiss()))
    opened.page.click("button[data-show='1']")
    opened.until("VIEWS[1] !== undefined")
    assert dialogs == []
    assert opened.page.locator("img").count() == 0
    assert "stepscope" in opened.page.title()
    assert HOSTILE in opened.page.locator(".sample pre").first.inner_text()
    opened.assert_clean()


def test_an_injected_script_would_not_run(show: Show) -> None:
    opened = show(make_run())
    opened.page.evaluate(
        """() => { const s = document.createElement('script'); s.textContent = 'window.owned = 1';
             document.body.append(s); }"""
    )
    assert opened.page.evaluate("window.owned") is None


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(make_run(decode_steps=0, batch=0), id="no steps"),
        pytest.param(make_run(ceilings=None), id="no ceilings"),
        pytest.param(make_run(decode_steps=1, batch=1), id="one step"),
        pytest.param(make_run(decode_steps=40), id="no stalls"),
        pytest.param(make_run(stamp="MODELLED"), id="modelled"),
    ],
)
def test_unusual_runs_render(show: Show, run: Run) -> None:
    opened = show(run)
    for canvas in opened.page.locator("canvas").all():
        assert canvas.evaluate(COLOURS) > 1
    for summary in opened.page.locator("details.data > summary").all():
        summary.click()
    opened.until("document.querySelectorAll('details.data[open] table').length === 7")
    opened.page.keyboard.press("w")
    opened.assert_clean()


def test_an_incomplete_run_says_so(show: Show) -> None:
    opened = show(make_run(complete=False, interrupted=True))
    assert opened.page.locator(".badge").inner_text() == "incomplete run"
    opened.assert_clean()


def test_runs_are_switched_and_stamps_do_not_share_a_plot(show: Show) -> None:
    opened = show(
        make_run(label="first"), make_run(label="second"), make_run(label="model", stamp="MODELLED")
    )
    drawn = opened.page.locator("main:not([hidden]) [data-figure=itl] .legend").inner_text()
    assert "first" in drawn and "second" in drawn and "model" not in drawn.split()
    opened.page.click("button[data-show='2']")
    opened.until("VIEWS[2] !== undefined")
    assert opened.page.locator("main:not([hidden]) h1").inner_text().endswith(": model")
    assert opened.page.locator("main:not([hidden]) .stamp").inner_text() == "MODELLED"
    assert opened.page.locator("#comparison table").count() == 2
    opened.assert_clean()


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_sticks_out_of_the_page(show: Show, width: int) -> None:
    opened = show(busy_run(), width=width)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    opened.assert_clean()


def test_canvases_follow_the_window(show: Show) -> None:
    opened = show(busy_run())
    opened.page.set_viewport_size({"width": 700, "height": 900})
    canvas = timeline(opened).locator("canvas")
    opened.until("document.querySelector('canvas').width < 1400")
    assert canvas.evaluate("c => c.width / c.clientWidth") == pytest.approx(2, abs=0.02)


def test_the_table_pages_through_all_steps(show: Show) -> None:
    run = make_run(decode_steps=230)
    opened = show(run)
    details = timeline(opened).locator("details.data")
    details.locator("summary").click()
    details.locator("tbody").wait_for()
    assert details.locator("tbody tr").count() == 100
    details.get_by_role("button", name="later").click()
    details.get_by_role("button", name="later").click()
    working = [s for s in run.steps if s.kind != "idle"]
    last = details.locator("tbody tr").last.locator("th").inner_text()
    assert last == str(working[-1].step)
