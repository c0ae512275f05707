"use strict";
const byId = (id) => document.getElementById(id);
const read = (id) => (byId(id) ? JSON.parse(byId(id).textContent) : null);
const options = { responsive: true, displayModeBar: false };
const isCoarse = () => matchMedia("(pointer: coarse)").matches;
const isForPaper = () => "paper" in document.documentElement.dataset;

// --- charts: places draw themselves one after the other, those in sight first ------------------------------
// The page counts as loaded once all are drawn, as what captures or prints it waits for that and no longer.

function paint(text) {
  const style = getComputedStyle(document.documentElement);
  return text.replace(/var\((--[\w-]+)\)/g, (_, name) => style.getPropertyValue(name).trim());
}

function draw(id, figure) {
  const painted = JSON.parse(paint(JSON.stringify(figure)));
  if (isCoarse()) painted.layout.dragmode = false; // leave swipes to the page
  byId(id).style.minHeight = `${painted.layout.height}px`;
  if (isForPaper()) painted.layout.width = byId(id).clientWidth; // what adapts to the window does so too late
  return Plotly.react(id, painted.data, painted.layout, options);
}

const painters = new Map();
for (const [id, figure] of Object.entries(read("figures") || {})) painters.set(id, () => draw(id, figure));

const later = window.requestIdleCallback
  ? (work) => requestIdleCallback(work, { timeout: 300 })
  : (work) => setTimeout(work, 10);
let waiting = [];
let isWorking = false;
const unfinished = document.createElement("iframe"); // a document that is being written holds up the load event
unfinished.hidden = true;
document.body.append(unfinished);
unfinished.contentDocument.open();

function drawn() {
  document.documentElement.dataset.drawn = "true";
  if (!unfinished.isConnected) return;
  unfinished.contentDocument.close();
  unfinished.remove();
}

function drawAll() {
  const distance = (id) => {
    const box = byId(id).getBoundingClientRect();
    return Math.max(0, box.top - innerHeight, -box.bottom);
  };
  waiting = [...painters.keys()].sort((one, other) => distance(one) - distance(other));
  if (!isWorking) drawNext();
}

function drawNext() {
  const id = waiting.shift();
  isWorking = id !== undefined;
  if (!isWorking) return drawn();
  document.documentElement.dataset.drawn = "false";
  try {
    painters.get(id)();
  } finally {
    later(drawNext); // also after an error: the others can be drawn
  }
}

// A page of paper is narrow and white, whatever the window is: everything is drawn for it before it is printed.
function drawForPaper() {
  document.documentElement.dataset.paper = "";
  waiting = [];
  for (const paint of painters.values()) paint();
}

function drawForScreen() {
  delete document.documentElement.dataset.paper;
  for (const id of painters.keys()) Plotly.purge(id); // else they would keep their width
  drawAll();
}

// --- the timeline ------------------------------------------------------------------------------------------

const escaped = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const broken = (text) => (text.match(/.{1,70}(\s|$)|\S{1,70}/g) || []).map(escaped).join("<br>");
const known = (...times) => times.find((time) => time !== null && time !== undefined);

function seconds(value) {
  if (value < 120) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 7200) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
}

function spent(item) {
  const parts = [];
  if (item.ready !== null && item.started !== null) parts.push(`waited ${seconds(item.started - item.ready)}`);
  if (item.started !== null && item.ended !== null) parts.push(`ran ${seconds(item.ended - item.started)}`);
  if (item.started === null && item.ended === null) parts.push("waits or runs");
  return parts.join(", ");
}

function attemptItem(timeline, row) {
  const [iteration, purpose, lane, shard, attempt, ready, started, ended, node, job, end, note, log, held] = row;
  const item = { purpose, lane, ready, started, ended, held, isFailed: end === 1, row: null };
  const name = timeline.purposes[purpose];
  const lines = [`<b>${escaped(name)}${name === "driver" ? "" : ` shard ${shard}`}</b>, iteration ${iteration}`];
  lines.push(`attempt ${escaped(attempt)}${["", ", without a result", "", ""][end]}`);
  if (job) lines.push(`job ${escaped(job)}`);
  if (timeline.names[node]) lines.push(`on ${escaped(timeline.names[node])}`);
  if (held !== null && started !== null) lines.push(`its worker waited ${seconds(started - held)}`);
  lines.push(spent(item), `log: ${escaped(log)}`);
  if (note) lines.push(broken(note));
  return { ...item, iteration, text: lines.join("<br>") };
}

function stageItem(timeline, row) {
  const [iteration, purpose, lane, ready, started, ended, attempts, failed] = row;
  const item = { purpose, lane, ready, started, ended, isFailed: false, row: purpose };
  const lines = [`<b>${escaped(timeline.purposes[purpose])}</b>, iteration ${iteration}`, spent(item)];
  lines.push(`${attempts} attempt${attempts === 1 ? "" : "s"}${failed ? `, ${failed} without a result` : ""}`);
  return { ...item, iteration, hasFailed: failed > 0, text: lines.join("<br>") };
}

// Rows for the items of a lane: the first one that is free, or one for each stage.
function stack(items, now) {
  const ends = [];
  const rows = new Map();
  items.sort((one, other) => known(one.ready, one.started, one.ended) - known(other.ready, other.started, other.ended));
  for (const item of items) {
    const from = known(item.ready, item.started, item.ended);
    let row = item.row === null ? ends.findIndex((end) => end <= from) : rows.get(item.row);
    if (row === undefined || row < 0) row = ends.length;
    if (item.row !== null) rows.set(item.row, row);
    ends[row] = known(item.ended, now);
    item.place = row;
  }
  return ends.length;
}

function itemsOf(timeline, choice) {
  const [kind, first, last] = choice.split(":");
  const make = kind === "attempts" ? attemptItem : stageItem;
  return timeline[kind]
    .filter((row) => row[0] >= Number(first) && row[0] <= Number(last))
    .map((row) => make(timeline, row))
    .filter((item) => known(item.ready, item.started, item.ended) !== undefined);
}

const PLOT_PIXELS = 620;
const LABEL_PIXELS = 18;
const rowPixels = (rows) => Math.max(2, Math.min(22, PLOT_PIXELS / rows));

// Lanes below each other in the order of the pipeline, none too low for its name.
function layOut(timeline, items) {
  const inside = new Map();
  for (const item of [...items].sort((one, other) => one.purpose - other.purpose)) {
    if (!inside.has(item.lane)) inside.set(item.lane, []);
    inside.get(item.lane).push(item);
  }
  const heights = [...inside.values()].map((found) => stack(found, timeline.now));
  const least = LABEL_PIXELS / rowPixels(heights.reduce((sum, height) => sum + height + 0.8, 0));
  const lanes = [];
  let top = 0;
  for (const [index, [lane, found]] of [...inside].entries()) {
    const height = Math.max(heights[index], least);
    for (const item of found) item.y = top + (height - heights[index]) / 2 + item.place;
    lanes.push({ name: timeline.names[lane], top, height });
    top += height + 0.8;
  }
  return { lanes, rows: top };
}

function bars(timeline, items, from, to, style) {
  const moment = (time) => Math.round((timeline.base + time) * 1000);
  return {
    type: "bar", orientation: "h", width: 0.84,
    y: items.map((item) => item.y), base: items.map((item) => moment(from(item))),
    x: items.map((item) => Math.max(1, Math.round((to(item) - from(item)) * 1000))),
    hovertext: items.map((item) => item.text), hovertemplate: "%{hovertext}<extra></extra>", ...style,
  };
}

function timelineTraces(timeline, items) {
  const traces = [];
  const now = timeline.now;
  timeline.purposes.forEach((purpose, index) => {
    const mine = items.filter((item) => item.purpose === index);
    const color = `var(--c${timeline.colours[index]})`;
    const group = { legendgroup: purpose, name: escaped(purpose) };
    const ran = mine.filter((item) => item.started !== null && !item.isFailed);
    if (mine.length) {
      const style = { ...group, marker: { color, line: { width: 0 } }, showlegend: true };
      traces.push(bars(timeline, ran, (item) => item.started, (item) => known(item.ended, now), style));
    }
    const waited = mine.filter((item) => item.ready !== null && known(item.started, item.ended, now) > item.ready);
    const pattern = { shape: "/", size: 5, solidity: 0.3, fgcolor: color, bgcolor: "rgba(0,0,0,0)" };
    const style = { ...group, marker: { color, pattern, line: { width: 0 } }, showlegend: false };
    const until = (item) => known(item.started, item.ended, now);
    if (waited.length) traces.push(bars(timeline, waited, (item) => item.ready, until, style));
    const idle = mine.filter((item) => item.started !== null && item.started > known(item.held, item.started));
    const dots = { shape: ".", size: 5, solidity: 0.3, fgcolor: color, bgcolor: "rgba(0,0,0,0)" };
    const held = { ...style, marker: { color, pattern: dots, line: { width: 0 } } };
    if (idle.length) traces.push(bars(timeline, idle, (item) => item.held, (item) => item.started, held));
  });
  return [...traces, ...failureTraces(timeline, items)];
}

function failureTraces(timeline, items) {
  const failed = items.filter((item) => item.isFailed);
  const marked = items.filter((item) => item.isFailed || item.hasFailed);
  if (!marked.length) return [];
  const ran = failed.filter((item) => item.started !== null);
  const style = { name: "without a result", legendgroup: "bad", showlegend: false, marker: { color: "var(--bad)" } };
  const cross = {
    type: "scatter", mode: "markers", name: "without a result", legendgroup: "bad",
    x: marked.map((item) => Math.round((timeline.base + known(item.ended, item.started, item.ready)) * 1000)),
    y: marked.map((item) => item.y), hovertext: marked.map((item) => item.text),
    hovertemplate: "%{hovertext}<extra></extra>",
    marker: { symbol: "x", size: 8, color: "var(--bad)", line: { width: 1, color: "var(--panel)" } },
  };
  return [bars(timeline, ran, (item) => item.started, (item) => known(item.ended, timeline.now), style), cross];
}

function timelineLayout(lanes, rows) {
  const lines = { gridcolor: "var(--line)", automargin: true };
  const separators = lanes.slice(1).map((lane) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: lane.top - 0.9, y1: lane.top - 0.9, layer: "below",
    line: { color: "var(--axis)", width: 1 },
  }));
  const shown = (name) => escaped(name.length > 14 ? `${name.slice(0, 13)}…` : name);
  return {
    height: Math.round(rowPixels(rows) * rows + 110), barmode: "overlay",
    margin: { l: 60, r: 12, t: 12, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: "var(--soft)" }, shapes: separators,
    xaxis: { ...lines, type: "date", title: { text: "time (UTC)", font: { size: 12 } } },
    yaxis: {
      ...lines, range: [rows - 0.9, -0.9], showgrid: false, zeroline: false, fixedrange: true,
      tickvals: lanes.map((lane) => lane.top + (lane.height - 1) / 2), ticktext: lanes.map((lane) => shown(lane.name)),
    },
    legend: { orientation: "h", x: 0, y: 1.01, yanchor: "bottom" }, hovermode: "closest", dragmode: "zoom",
    hoverlabel: {
      bgcolor: "var(--panel)", bordercolor: "var(--axis)", align: "left", namelength: -1,
      font: { color: "var(--ink)" },
    },
  };
}

function startTimeline() {
  const timeline = read("timeline-data");
  const choice = byId("window");
  if (!timeline || !choice) return;
  const show = () => {
    const items = itemsOf(timeline, choice.value);
    const { lanes, rows } = layOut(timeline, items);
    byId("earlier").disabled = choice.selectedIndex === choice.options.length - 1;
    byId("later").disabled = choice.selectedIndex === 0;
    draw("timeline-plot", { data: timelineTraces(timeline, items), layout: timelineLayout(lanes, rows) });
  };
  const move = (by) => { choice.selectedIndex += by; show(); };
  choice.addEventListener("change", show);
  byId("earlier").addEventListener("click", () => move(1));
  byId("later").addEventListener("click", () => move(-1));
  painters.set("timeline-plot", show);
}

// --- samples -----------------------------------------------------------------------------------------------

const PAGE = 20;

function element(tag, text, kind) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function figureText(value) {
  if (value === null) return "–";
  return Math.abs(value) >= 1e4 || (value !== 0 && Math.abs(value) < 1e-3) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function card(sample) {
  const made = element("article", undefined, "card");
  const head = element("h4", `${sample.choice} `);
  head.append(element("span", `iteration ${sample.iteration} · ${sample.id} · sample ${sample.index}`));
  const numbers = element("p", undefined, "numbers");
  const parts = [["reward", sample.reward], ...Object.entries(sample.components), ["KL", sample.kl]];
  for (const [name, value] of parts) numbers.append(element("b", figureText(value)), ` ${name} · `);
  numbers.append(element("b", String(sample.length)), " tokens · ", element("b", sample.reason));
  if (sample.turns > 1) numbers.append(" · ", element("b", String(sample.turns)), " turns");
  const prompt = element("pre", sample.prompt, "prompt");
  const response = sample.response ? element("pre", sample.response) : element("pre", "(empty)", "prompt");
  for (const [part, label] of [[prompt, "prompt"], [response, "response"]]) {
    part.tabIndex = 0;
    part.setAttribute("aria-label", label);
    part.dir = "auto";
  }
  made.append(head, numbers, prompt, response);
  return made;
}

function startSamples() {
  const samples = read("samples-data") || [];
  const form = byId("filters");
  if (!form) return;
  const text = samples.map((sample) => `${sample.prompt}\n${sample.response}`.toLowerCase());
  let found = [];
  const more = (count) => {
    const shown = byId("cards").children.length;
    byId("cards").append(...found.slice(shown, shown + count).map((index) => card(samples[index])));
    byId("more").hidden = byId("cards").children.length >= found.length;
  };
  const show = () => {
    found = matching(samples, text);
    byId("count").textContent = `${found.length} of ${samples.length}`;
    byId("cards").replaceChildren();
    more(PAGE);
  };
  form.addEventListener("input", show);
  form.addEventListener("reset", () => setTimeout(show));
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("more").addEventListener("click", () => more(PAGE));
  show();
}

function matching(samples, text) {
  const given = (id) => byId(id).value;
  const words = given("f-text").toLowerCase();
  const low = given("f-low") === "" ? -Infinity : Number(given("f-low"));
  const high = given("f-high") === "" ? Infinity : Number(given("f-high"));
  const isBounded = low > -Infinity || high < Infinity;
  const found = [...samples.keys()].filter((index) => {
    const sample = samples[index];
    return text[index].includes(words)
      && (given("f-iteration") === "" || sample.iteration === Number(given("f-iteration")))
      && (given("f-choice") === "" || sample.choice === given("f-choice"))
      && (given("f-reason") === "" || sample.reason === given("f-reason"))
      && (!isBounded || (sample.reward !== null && sample.reward >= low && sample.reward <= high));
  });
  const [name, direction] = given("f-sort").split("-");
  const sign = direction === "up" ? 1 : -1;
  const rank = (index) => samples[index][name];
  const order = (one, other) => {
    if (rank(one) === null || rank(other) === null) return (rank(one) === null) - (rank(other) === null);
    return sign * (rank(one) - rank(other));
  };
  return found.sort(order); // stable; what has no number comes last
}

startSamples();
startTimeline();
drawAll();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("beforeprint", drawForPaper);
addEventListener("afterprint", drawForScreen);
