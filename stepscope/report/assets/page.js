"use strict";
// Ties the page together: which run is shown, the theme, the keys, the tables.

const VIEWS = [];
let current = 0;

const section = (k) => document.getElementById(`run-${k}`);
const figureOf = (k, name) => section(k).querySelector(`[data-figure="${name}"]`);

function drawGantt(k) {
  const view = VIEWS[k], details = figureOf(k, "gantt").querySelector("details");
  gantt(view.run, figureOf(k, "gantt"), view.selected);
  if (details.open) fillTable(details, view.run, view);
}

function drawAll(k) {
  inkCache.clear();
  VIEWS[k].draw();
  drawGantt(k);
  for (const [name, draw] of Object.entries(FIGURES)) draw(VIEWS[k].run, figureOf(k, name));
}

async function show(k) {
  const run = await load(DATA.runs[k]);
  current = k;
  DATA.runs.forEach((_, i) => { section(i).hidden = i !== k; });
  for (const tab of document.querySelectorAll("[data-show]")) tab.setAttribute("aria-selected", String(Number(tab.dataset.show) === k));
  if (!VIEWS[k]) {
    VIEWS[k] = new Timeline(run, figureOf(k, "timeline"), () => drawGantt(k));
    const typical = [...run.working].sort((a, b) => run.steps.wall[a] - run.steps.wall[b])[run.working.length >> 1];
    const chosen = known(run.select) ? run.steps.step.indexOf(run.select) : -1;
    VIEWS[k].selected = chosen >= 0 ? chosen : typical;
    if (run.reduced) figureOf(k, "timeline").querySelector("figcaption").append(` ${run.reduced}`);
  }
  drawAll(k);
}

function openStep(step) {
  const view = VIEWS[current], index = view.run.steps.step.indexOf(step);
  if (index < 0) return;
  view.select(index);
  figureOf(current, "timeline").scrollIntoView({ block: "start" });
}

function listen() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.show) guarded(show(Number(button.dataset.show)));
    if (button.dataset.step) openStep(Number(button.dataset.step));
    if (button.dataset.key && VIEWS[current]) VIEWS[current].key(button.dataset.key);
  });
  document.addEventListener("keydown", (event) => {
    const busy = event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea");
    if (!busy && VIEWS[current] && VIEWS[current].key(event.key)) event.preventDefault();
  });
  document.addEventListener("toggle", (event) => {
    const details = event.target;
    if (details.matches("details.data") && details.open) fillTable(details, VIEWS[current].run, VIEWS[current]);
  }, true);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width && VIEWS[current]) { width = window.innerWidth; drawAll(current); }
  });
}

// The theme follows the system until the button is pressed; paper is always light.
function themes() {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => { if (VIEWS[current]) drawAll(current); };
  system.addEventListener("change", redraw);
  document.getElementById("theme").onclick = () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : system.matches;
    root.dataset.theme = dark ? "light" : "dark";
    redraw();
  };
  let before;
  window.addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; redraw(); });
  window.addEventListener("afterprint", () => {
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    redraw();
  });
}

function guarded(promise) {
  promise.catch((error) => {
    const line = document.getElementById("trouble");
    line.textContent = `The figures cannot be drawn in this browser (${error.message}). The numbers in the text still hold; open the file in a current browser.`;
    line.hidden = false;
  });
}

listen();
themes();
guarded(show(0));
