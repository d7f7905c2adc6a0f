// The charts of the page of curves: asks /api/series for what the form chooses, and draws it.
const EVERY_MS = 2000;
const HEIGHT = 260;
const COLOURS = 8;
const CLICK_PX = 4;
const MARKS = { push: "--s7", restart: "--s4", evaluation: "--s2", failure: "--s6", hindrance: "--s3" };
const form = document.querySelector("#choice");
const state = document.querySelector("#state");
const area = document.querySelector("#charts");
const charts = new Map(); // metric -> chart
let tag = null;
let asked = null;
let latest = null; // the answer that is drawn
let timer = null;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const chosen = (name) => [...form.querySelectorAll(`input[name="${name}"]:checked`)];
const labelOf = (input) => input.parentElement.querySelector("span");
const short = (value) => (value === undefined ? "-" : Number(value.toPrecision(5)).toString());

function query() {
  const found = new URLSearchParams();
  for (const box of [...chosen("run"), ...chosen("metric")]) found.append(box.name, box.value);
  found.set("x", form.x.value);
  found.set("smooth", form.smooth.value);
  return found;
}

function problem() {
  for (const [name, most] of [["run", form.dataset.mostRuns], ["metric", form.dataset.mostMetrics]]) {
    const count = chosen(name).length;
    if (count > Number(most)) return `${count} ${name}s are chosen; at most ${most} are shown`;
  }
  return chosen("run").length ? "" : "Choose a run.";
}

async function look() {
  clearTimeout(timer);
  const wanted = query().toString();
  if (wanted !== asked) tag = null;
  const wrong = problem();
  if (wrong) state.textContent = wrong;
  else if (!document.hidden || tag === null) await ask(wanted);
  timer = setTimeout(look, EVERY_MS);
}

async function ask(wanted) {
  try {
    const headers = { accept: "application/json", ...(tag && { "if-none-match": tag }) };
    const answer = await fetch(`/api/series?${wanted}`, { cache: "no-store", headers });
    if (wanted !== query().toString()) return; // the choice has changed meanwhile
    asked = wanted;
    if (answer.status === 304) return;
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.detail);
    tag = answer.headers.get("etag");
    latest = found;
    draw();
    state.textContent = "";
  } catch (error) {
    state.textContent = `The curves cannot be read: ${error.message}`;
  }
}

function draw() {
  for (const [metric, chart] of charts) {
    if (!(metric in latest.metrics)) {
      chart.plot?.destroy();
      chart.section.remove();
      charts.delete(metric);
    }
  }
  for (const box of chosen("metric")) drawChart(box);
  drawEvents();
}

function drawChart(box) {
  const metric = box.value;
  const series = latest.metrics[metric];
  if (!series) return;
  let chart = charts.get(metric);
  if (!chart) {
    chart = makeChart(labelOf(box));
    charts.set(metric, chart);
    area.append(chart.section);
  }
  const runs = chosen("run").filter((run) => run.value in series);
  const tables = [];
  const lines = [];
  runs.forEach((run, place) => {
    const { step, x = step, y, smooth } = series[run.value];
    const stroke = colour(`--s${place % COLOURS}`);
    const dash = place < COLOURS ? [] : [6, 3];
    tables.push([x, y]);
    lines.push({ stroke, dash, width: smooth ? 0.5 : 1.5, spanGaps: true, points: { show: x.length < 60 } });
    if (smooth) {
      tables.push([x, smooth]);
      lines.push({ stroke, dash, width: 2, spanGaps: true, points: { show: false } });
    }
  });
  fillLegend(chart, runs, series);
  if (runs.length) chart.why.href = whyAddress(chart);
  const data = tables.some(([x]) => x.length) ? uPlot.join(tables) : [[]];
  const shape = JSON.stringify(lines.map((line) => [line.stroke, line.dash, line.width, line.points.show]));
  if (chart.plot && chart.shape === shape) {
    const { min, max } = chart.plot.scales.x;
    chart.plot.setData(data, !chart.isZoomed);
    if (chart.isZoomed) chart.plot.setScale("x", { min, max });
    return;
  }
  chart.plot?.destroy();
  chart.shape = shape;
  chart.isZoomed = false;
  const axis = { stroke: colour("--soft"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
  chart.plot = new uPlot({
    width: chart.holder.clientWidth,
    height: HEIGHT,
    legend: { show: false },
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 65 }],
    series: [{}, ...lines],
    cursor: { drag: { x: true, y: false } },
    hooks: {
      draw: [drawMarks],
      setCursor: [() => say(chart)],
      setSelect: [(plot) => { chart.isZoomed = plot.select.width > 0; }],
    },
  }, data, chart.holder);
}

function makeChart(label) {
  const section = document.createElement("section");
  section.className = "chart";
  const title = document.createElement("h2");
  title.append(label.cloneNode(true));
  const holder = document.createElement("div");
  holder.className = "plot";
  holder.tabIndex = 0;
  holder.setAttribute("role", "application");
  holder.setAttribute("aria-label", `Curve of ${label.textContent}; arrow keys move from step to step and from run to run, Enter opens a step`);
  const said = document.createElement("p");
  said.className = "hint";
  said.setAttribute("role", "status");
  const legend = document.createElement("table");
  legend.className = "legend";
  const why = document.createElement("a");
  why.textContent = "Why did it fall?";
  section.append(title, holder, said, why, legend);
  const chart = { section, holder, said, why, legend, plot: null, shape: "", isZoomed: false, pressedAt: 0 };
  for (const kind of ["focus", "pointerenter"]) why.addEventListener(kind, () => { why.href = whyAddress(chart); });
  holder.addEventListener("keydown", (event) => onKey(chart, event));
  holder.addEventListener("mousedown", (event) => { chart.pressedAt = event.clientX; });
  holder.addEventListener("click", (event) => {
    if (Math.abs(event.clientX - chart.pressedAt) < CLICK_PX) openAt(chart); // else it was a drag
  });
  return chart;
}

function fillLegend(chart, runs, series) {
  const head = ["Run", "Last", "Least", "Greatest"].map((text) => cell("th", text));
  const rows = runs.map((run, place) => {
    const { y } = series[run.value];
    const name = document.createElement("th");
    name.scope = "row";
    name.append(labelOf(run).cloneNode(true));
    const least = y.length ? y.reduce((a, b) => Math.min(a, b)) : undefined;
    const greatest = y.length ? y.reduce((a, b) => Math.max(a, b)) : undefined;
    const cells = [y.at(-1), least, greatest].map((value) => cell("td", short(value)));
    return row([name, ...cells], `c${place % COLOURS}`);
  });
  chart.legend.replaceChildren(row(head, ""), ...rows);
}

function cell(kind, text) {
  const made = document.createElement(kind);
  made.textContent = text;
  return made;
}

function row(cells, className) {
  const made = document.createElement("tr");
  made.className = className;
  made.append(...cells);
  return made;
}

// The points below the cursor, of each run that has one there, the nearest first: run, step, value.
function pointsAt(chart) {
  const place = chart.plot?.cursor.idx;
  const metric = [...charts].find(([, one]) => one === chart)?.[0];
  if (place === null || place === undefined || !(metric in latest.metrics)) return [];
  const x = chart.plot.data[0][place];
  const away = ({ y }) => Math.abs(chart.plot.valToPos(y, "y") - chart.plot.cursor.top);
  const points = chosen("run").flatMap((run) => {
    const series = latest.metrics[metric][run.value];
    const found = series ? (series.x ?? series.step).indexOf(x) : -1;
    return found < 0 ? [] : [{ run, step: series.step[found], y: series.y[found] }];
  });
  return points.sort((a, b) => away(a) - away(b));
}

function say(chart) {
  const texts = pointsAt(chart).map(({ run, step, y }) => `${labelOf(run).textContent}, step ${step}: ${short(y)}`);
  chart.said.textContent = texts.join("; ");
}

function openAt(chart) {
  const [point] = pointsAt(chart);
  if (!point) return;
  const name = encodeURIComponent(decodeURIComponent(point.run.value));
  location.href = `/runs/${name}/trajectories?of=steps&step=${point.step}`;
}

// Of the span that is drawn, if that is not all; of the point that the keys have moved to; else of the biggest fall.
function whyAddress(chart) {
  const metric = [...charts].find(([, one]) => one === chart)[0];
  const [point] = pointsAt(chart);
  const run = point?.run ?? chosen("run").find((one) => one.value in latest.metrics[metric]);
  const found = new URLSearchParams({ metric });
  const { step, x = step } = latest.metrics[metric][run.value];
  const { min, max } = chart.isZoomed ? chart.plot.scales.x : {};
  const shown = step.filter((_, place) => x[place] >= min && x[place] <= max);
  if (shown.length) {
    found.set("step", shown[0]);
    found.set("step_to", shown.at(-1));
  } else if (point) found.set("step", point.step);
  return `/runs/${encodeURIComponent(decodeURIComponent(run.value))}/fall?${found}`;
}

function onKey(chart, event) {
  const plot = chart.plot;
  if (!plot || !plot.data[0].length) return;
  if (event.key === "Enter") openAt(chart);
  else if (event.key === "Escape") {
    chart.isZoomed = false;
    plot.setData(plot.data);
  } else if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
    const last = plot.data[0].length - 1;
    const now = plot.cursor.idx ?? (event.key === "ArrowLeft" ? last + 1 : -1);
    const to = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
    const place = Math.max(0, Math.min(last, to));
    const top = plot.cursor.top > 0 ? plot.cursor.top : HEIGHT / 3;
    plot.setCursor({ left: plot.valToPos(plot.data[0][place], "x"), top });
    event.preventDefault();
  } else if (["ArrowUp", "ArrowDown"].includes(event.key)) {
    const tops = pointsAt(chart).map(({ y }) => plot.valToPos(y, "y"));
    const next = tops.filter((top) => (event.key === "ArrowUp" ? top < tops[0] : top > tops[0]));
    const top = event.key === "ArrowUp" ? Math.max(...next) : Math.min(...next);
    if (next.length) plot.setCursor({ left: plot.cursor.left, top });
    event.preventDefault();
  }
}

function drawMarks(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  for (const mark of latest.marks) {
    if (mark.x < plot.scales.x.min || mark.x > plot.scales.x.max) continue;
    const at = plot.valToPos(mark.x, "x", true);
    const height = mark.kind === "push" ? 6 * devicePixelRatio : bbox.height;
    ctx.strokeStyle = colour(MARKS[mark.kind]);
    ctx.globalAlpha = mark.kind === "push" ? 0.6 : 0.9;
    ctx.setLineDash(mark.kind === "push" ? [] : [4, 4]);
    ctx.beginPath();
    ctx.moveTo(at, bbox.top + bbox.height - height);
    ctx.lineTo(at, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function drawEvents() {
  const names = new Map(chosen("run").map((run) => [run.value, labelOf(run).textContent]));
  const told = latest.marks.filter((mark) => mark.kind !== "push").slice(-100);
  const items = told.map((mark) => cell("li", `${names.get(mark.run)}, step ${mark.step}: ${mark.text}`));
  document.querySelector("#events ul").replaceChildren(...items);
}

function changed() {
  history.replaceState(null, "", `?${query()}`);
  form.querySelector("output").textContent = form.smooth.value;
  look();
}

form.addEventListener("change", changed);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  changed();
});
document.querySelector("#filter").addEventListener("input", (event) => {
  const wanted = event.target.value.toLowerCase();
  for (const group of document.querySelectorAll("#metrics fieldset")) {
    let isShown = false;
    for (const label of group.querySelectorAll("label")) {
      label.hidden = !label.textContent.toLowerCase().includes(wanted);
      isShown ||= !label.hidden;
    }
    group.hidden = !isShown;
  }
});
new ResizeObserver(() => {
  for (const chart of charts.values()) chart.plot?.setSize({ width: chart.holder.clientWidth, height: HEIGHT });
}).observe(area);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => latest && draw());
document.addEventListener("visibilitychange", () => document.hidden || look());
look();
