"use strict";
// The data of each figure as a table, built when it is opened, a hundred rows at a time.

const PAGE_ROWS = 100;

const STEP_COLUMNS = [
  ["step", (s, i) => s.step[i]], ["kind", (s, i) => s.kinds[s.kind[i]]], ["begin, s", (s, i) => sig(s.begin[i] / 1e9, 5)],
  ["wall, ms", (s, i) => ms(s.wall[i])], ["verdict", (s, i) => words(s.verdicts[s.verdict[i]])], ["batch", (s, i) => count(s.batch[i])],
  ["prefill tokens", (s, i) => count(s.prefill_tokens[i])], ["context tokens", (s, i) => count(s.context_tokens[i])],
];

const TABLES = {
  timeline: (run) => ({
    head: [...STEP_COLUMNS.map((c) => c[0]), ...run.phases.map((p) => `${p}, ms`), "excess, ms", "waiting", "running", "KV pages", ...(run.reduced ? ["steps in row", "longest, ms"] : [])],
    rows: run.working,
    row: (i) => {
      const s = run.steps, cells = STEP_COLUMNS.map((c) => c[1](s, i)).concat(run.phases.map((p) => ms(s.phases[p][i])));
      cells.push(ms(s.excess_ns[i]), count(s.waiting[i]), count(s.running[i]), count(s.kv_used_pages[i]));
      return run.reduced ? [...cells, count(s.count[i]), ms(s.longest[i])] : cells;
    },
  }),
  gantt: (run, view) => ({
    head: ["phase", "from, ms", "ms"],
    rows: known(view.selected) ? ganttBars(run, view.selected) : [],
    row: (b) => [b.name, ms(b.from), ms(b.ns)],
  }),
  roofline: (run) => ({
    head: ["step", "kind", "FLOPs per byte", "GFLOP/s"],
    rows: run.roof || [],
    row: ([x, y, kind, i]) => [run.steps.step[i], kind, sig(x), sig(y / 1e9)],
  }),
  batch: (run) => ({
    head: ["batch", "steps", "p50, ms", "p10, ms", "p90, ms", "bound, ms", "dispatch, ms"],
    rows: run.batches,
    row: (p) => [p[0], count(p[1]), ...p.slice(2).map(ms)],
  }),
  itl: (run) => ({
    head: ["gap, ms", "gaps at most that long", "% at most"],
    rows: run.gaps,
    row: ([ns, n]) => [ms(ns), count(n), sig((n / run.gap_count) * 100, 5)],
  }),
  ttft: (run) => ({
    head: ["request", "arrival, s", "prompt tokens", "queued, ms", "then, ms", "TTFT, ms"],
    rows: run.ttft.id.map((_, i) => i),
    row: (i) => {
      const t = run.ttft;
      return [t.id[i], sig(t.arrival[i] / 1e9, 5), count(t.prompt[i]), ms(t.queue[i]), ms(t.prefill[i]), ms(t.queue[i] + t.prefill[i])];
    },
  }),
  traffic: (run) => ({
    head: ["step", "weights, MB", "KV, MB", "MBU", "FLOPs, G"],
    rows: run.working,
    row: (i) => {
      const s = run.steps;
      return [s.step[i], sig((s.weight_bytes[i] || 0) / 1e6), sig((s.kv_bytes[i] || 0) / 1e6), percent(known(s.mbu[i]) ? s.mbu[i] / 1e4 : null), sig((s.flops[i] || 0) / 1e9)];
    },
  }),
};

function fillTable(details, run, view) {
  const content = TABLES[details.closest("figure").dataset.figure](run, view);
  const show = (start) => {
    const body = make("tbody");
    for (const item of content.rows.slice(start, start + PAGE_ROWS)) {
      const line = make("tr");
      content.row(item).forEach((cell, k) => line.append(make(k ? "td" : "th", String(cell), k ? {} : { scope: "row" })));
      body.append(line);
    }
    const head = make("tr");
    head.append(...content.head.map((h) => make("th", h, { scope: "col" })));
    const table = make("table"), top = make("thead"), box = make("div", null, { class: "scroll" });
    top.append(head);
    table.append(top, body);
    box.append(table);
    details.replaceChildren(details.firstElementChild, box, ...pager(content.rows.length, start, show));
  };
  show(0);
}

function pager(total, start, show) {
  const end = Math.min(total, start + PAGE_ROWS);
  const bar = make("p", null, { class: "dim tools" });
  bar.append(total ? `rows ${count(start + 1)} to ${count(end)} of ${count(total)} ` : "no rows");
  const go = (text, to, able) => {
    const button = make("button", text);
    button.disabled = !able;
    button.onclick = () => show(to);
    return button;
  };
  if (total > PAGE_ROWS) bar.append(go("earlier", start - PAGE_ROWS, start > 0), go("later", start + PAGE_ROWS, end < total));
  return [bar];
}
