"use strict";
// Filters, theme, and the interactive figures of the gallery. The data are those of lit_memory/report/charts.py.
document.documentElement.classList.add("script");
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const cards = [...document.querySelectorAll(".card")];

// Theme: that of the system until the button is pressed.
const system = matchMedia("(prefers-color-scheme: dark)");
const memory = {
  get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
  set: (name) => { try { localStorage.setItem("theme", name); } catch { /* a page opened from a file may have none */ } },
};
const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  document.documentElement.toggleAttribute("data-dark", isDark());
  document.querySelector("#theme span").textContent = isDark() ? "dark" : "light";
  $("theme").setAttribute("aria-label", `Now ${isDark() ? "dark" : "light"}; change to ${isDark() ? "light" : "dark"}`);
  for (const redraw of drawn.values()) redraw();
}

// Areas of equal size: Chart.js gives all points one radius.
const SIZES = { triangle: 1.35, rectRot: 1.15, star: 1.3, cross: 1.2, crossRot: 1.2 };
const size = (look, radius) => radius * (SIZES[look.point] || 1);

// A figure: canvas, legend of buttons, caption. Host element -> what draws it again.
const drawn = new Map();
const digits = (value) => Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });

// A colour of the pictures, which are made for white: on a dark page as much lighter as it takes to be seen.
function color(name) {
  const parts = [1, 3, 5].map((i) => parseInt(name.slice(i, i + 2), 16));
  const light = ([r, g, b]) => [r, g, b].map((c) => (c / 255) ** 2.2).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let mixed = parts;
  for (let share = 0; isDark() && light(mixed) < 0.22; share += 0.05) mixed = parts.map((c) => Math.round(c + (255 - c) * share));
  return "#" + mixed.map((c) => c.toString(16).padStart(2, "0")).join("");
}
const faint = (name) => color(name) + "26";
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The parts of a point: position, mean, std, interval from low to high, words for x.
const [X, Y, STD, LOW, HIGH, WORDS] = [0, 1, 2, 3, 4, 5];

// Mean; around it the interval, as a band or a bar, or every seed, as a thin line or a small point; the paper's points.
function datasets(series) {
  const { look, points } = series, ink = color(look.color), common = { group: series.group, series };
  const quiet = { ...common, quiet: true, pointRadius: 0, pointHitRadius: 0, borderColor: ink, fill: false };
  const inner = points.filter((p) => p[LOW] !== null), parts = [];
  if (series.paper.length) {
    const at = series.paper.map(([x, y]) => ({ x, y, p: [x, y, null, null, null, "the paper's value"] }));
    parts.push({ ...common, data: at, paper: true, showLine: series.line, borderColor: ink, borderWidth: 1.3, borderDash: [3, 3], fill: false,
      pointStyle: look.point, pointRotation: look.turn, pointRadius: size(look, 5), pointBackgroundColor: css("--card"), pointBorderColor: ink });
  }
  if (series.line && inner.length) {
    const edge = (i) => inner.map((p) => ({ x: p[X], y: p[i] }));
    parts.push({ ...quiet, data: edge(HIGH), borderWidth: 0 });
    parts.push({ ...quiet, data: edge(LOW), borderWidth: 0, fill: "+1", backgroundColor: faint(look.color) });
  } else if (series.line && !series.crowd && series.seeds.length > 1) {
    for (const own of series.seeds) {
      parts.push({ ...quiet, data: own.map((y, i) => ({ x: points[i][X], y })), borderWidth: 1, borderColor: ink + "77" });
    }
  } else if (!series.line && !series.crowd) {
    for (const p of inner) parts.push({ ...quiet, data: [{ x: p[X], y: p[LOW] }, { x: p[X], y: p[HIGH] }], borderWidth: 1.6 });
    const own = points.flatMap((p, i) => series.seeds.map((values) => ({ x: p[X], y: values[i] })));
    parts.push({ ...quiet, data: own, showLine: false, pointRadius: 2.5, pointBorderWidth: 0, pointBackgroundColor: ink + "77" });
  }
  const open = look.point.startsWith("cross") || look.point === "star";
  parts.push({
    ...common, data: points.map((p) => ({ x: p[X], y: p[Y], p })), showLine: series.line, fill: false, pointHitRadius: 12,
    borderColor: series.crowd ? ink + "99" : ink, borderWidth: series.crowd || series.small ? 1.2 : 2, borderDash: look.dash,
    pointStyle: look.point, pointRotation: look.turn, pointRadius: series.small ? 1.5 : size(look, series.crowd ? 4 : 5),
    pointHoverRadius: size(look, 7), pointBackgroundColor: ink, pointBorderColor: open ? ink : css("--card"), pointBorderWidth: open ? 2 : 1,
  });
  return parts;
}

function guides(chart, bounds) {
  const grey = css("--soft");
  return chart.guides.map((guide, i) => {
    const points = guide.points
      || (guide.x !== undefined ? [[guide.x, bounds.low], [guide.x, bounds.high]] : [[bounds.left, guide.y], [bounds.right, guide.y]]);
    return { group: guide.name, quiet: true, guide: true, data: points.map(([x, y]) => ({ x, y })), borderColor: grey, borderWidth: 1.3,
      borderDash: i % 2 ? [2, 4] : [7, 5], pointRadius: 0, pointHitRadius: 0, fill: false };
  });
}

const limits = (bounds) => ({ min: bounds.low, max: bounds.high });

// The chart without what the legend hides; the whole one if that is all of it.
function visible(chart, hidden) {
  const series = chart.series.filter((own) => !hidden.has(own.group) && own.points.length);
  return series.length ? { ...chart, series, guides: chart.guides.filter((guide) => !hidden.has(guide.name)) } : chart;
}

function extent(chart) {
  const xs = [...chart.ticks.map((tick) => tick[0]), ...chart.guides.flatMap((guide) => guide.x ?? [])], ys = [];
  for (const series of chart.series) {
    for (const p of series.points) { xs.push(p[X]); ys.push(p[Y], ...[p[LOW], p[HIGH]].filter((y) => y !== null && !series.crowd)); }
    if (!series.crowd) ys.push(...series.seeds.flat().filter((y) => y !== null), ...series.paper.map(([, y]) => y));
  }
  for (const guide of chart.guides) if (guide.y !== undefined) ys.push(guide.y);
  const pad = (chart.series.some((s) => s.line) ? 0.03 : 0.08) * (Math.max(...xs) - Math.min(...xs) || 1);
  const shown = ys.filter((y) => !chart.log || y > 0), low = Math.min(...shown), high = Math.max(...shown);
  const room = 0.05 * (high - low || Math.abs(high) || 1), x = { left: Math.min(...xs) - pad, right: Math.max(...xs) + pad };
  if (chart.share) return { ...x, low: -0.02, high: 1.03 };
  return chart.log ? { ...x, low: low / 1.2, high: high * 1.2 } : { ...x, low: low - room, high: high + room };
}

// Whether a value of a logarithmic axis is 1, 2, 3 or 5 of its decade.
const round = (value) => [1, 2, 3, 5].includes(Number((value / 10 ** Math.floor(Math.log10(value) + 1e-9)).toPrecision(6)));

function tooltip(chart) {
  return {
    filter: (item) => !item.dataset.quiet,
    callbacks: {
      title: (items) => (items.length ? items[0].raw.p[WORDS] : ""),
      label: (item) => {
        const { series } = item.dataset, p = item.raw.p, i = series.points.indexOf(p);
        const lines = [`${series.name}: ${digits(p[Y])}${p[STD] === null ? "" : ` ± ${digits(p[STD])}`}`];
        if (i < 0 || series.small) return lines;
        if (p[LOW] !== null) lines.push(`  95 % interval of the mean: ${digits(p[LOW])} to ${digits(p[HIGH])}`);
        const seeds = series.seeds.map((own) => own[i]).filter((value) => value !== null);
        return [...lines, `  ${seeds.length} seed${seeds.length > 1 ? "s" : ""}: ${seeds.map(digits).join(", ")}`];
      },
    },
  };
}

function options(chart, bounds) {
  const text = css("--text"), line = css("--line"), soft = css("--soft");
  const title = (words) => ({ display: true, text: words, color: text });
  return {
    animation: false, responsive: true, maintainAspectRatio: false, interaction: { mode: "nearest", intersect: false, axis: "xy" },
    plugins: { legend: { display: false }, tooltip: tooltip(chart) },
    scales: {
      x: {
        type: "linear", min: bounds.left, max: bounds.right, title: title(chart.x), grid: { display: false }, border: { color: soft },
        afterBuildTicks: (axis) => { axis.ticks = chart.ticks.map(([value]) => ({ value })); },
        ticks: { color: text, autoSkip: true, maxRotation: 40, callback: (value) => chart.ticks.find((tick) => tick[0] === value)?.[1] },
      },
      y: {
        type: chart.log ? "logarithmic" : "linear", ...limits(bounds), title: title(chart.y), border: { color: soft },
        grid: { color: line },
        ticks: { color: text, includeBounds: false, callback: (value) => (chart.log && !round(value) ? null : digits(value)) },
      },
    },
    onClick: (event, items) => { const card = items[0] && items[0].element.$context.dataset.series?.card; if (card) show(card); },
  };
}

function draw(host, chart) {
  const hidden = new Set();
  const redraw = () => {
    Chart.getChart(host.querySelector(".plot canvas"))?.destroy();
    host.replaceChildren();
    if (!chart) return;
    if (!chart.series.some((series) => series.points.length)) {
      host.textContent = "None of these reports has what this figure needs.";
      return;
    }
    const plot = document.createElement("div"), canvas = document.createElement("canvas");
    plot.className = "plot";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${chart.y} against ${chart.x}, interactive; the numbers are in the table of the report.`);
    plot.append(canvas);
    const bounds = extent(visible(chart, hidden));
    const sets = [...chart.series.flatMap(datasets).reverse(), ...guides(chart, bounds)];
    for (const set of sets) set.hidden = hidden.has(set.group);
    host.append(plot, legend(chart, hidden, () => {
      for (const set of sets) set.hidden = hidden.has(set.group);
      Object.assign(view.options.scales.y, limits(extent(visible(chart, hidden))));
      view.update();
    }));
    const words = document.createElement("figcaption");
    words.textContent = captioned(chart);
    host.append(words);
    const view = new Chart(canvas, { type: "line", data: { datasets: sets }, options: options(chart, bounds) });
  };
  drawn.set(host, redraw);
  redraw();
}

function legend(chart, hidden, changed) {
  const host = document.createElement("div"), groups = new Map();
  host.className = "legend";
  for (const series of chart.series) if (series.points.length && !groups.has(series.group)) groups.set(series.group, series.look);
  for (const guide of chart.guides) groups.set(guide.name, null);
  for (const [name, look] of groups) {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Show or hide";
    button.setAttribute("aria-pressed", String(!hidden.has(name)));
    button.append(sample(look, chart.series.some((series) => series.line)), name);
    button.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      changed();
    });
    host.append(button);
  }
  return host;
}

// What a name of the legend looks like: its line and its point; a grey line for a guide.
function sample(look, line) {
  const canvas = document.createElement("canvas"), scale = devicePixelRatio || 1, ink = look ? color(look.color) : css("--soft");
  [canvas.width, canvas.height] = [30 * scale, 14 * scale];
  canvas.ariaHidden = "true";
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  Object.assign(pen, { strokeStyle: ink, fillStyle: ink, lineWidth: 2 });
  pen.setLineDash(look ? look.dash : [5, 3]);
  pen.beginPath();
  if (line || !look) { pen.moveTo(0, 7); pen.lineTo(30, 7); }
  pen.stroke();
  pen.setLineDash([]);
  if (look) Chart.helpers.drawPoint(pen, { pointStyle: look.point, rotation: look.turn, radius: size(look, 5), borderWidth: 2 }, 15, 7);
  return canvas;
}

const HOW = "Mean over seeds; point at a value for its seeds, and press a name to hide it. ";
const MANY = "A point is an arm of a report, in the colour of its architecture; press it to go to the report. "
  + "Left out: arms whose state is not known, and reports that do not say how long the contexts of their training are.";
const SPREAD = "Bands and bars: 95 % interval of the mean; below five seeds, every seed is shown instead.";
const EVERY = "Every run by itself; press a name to hide its runs.";
const SHARES = "The share of an arm’s runs that have come that far by a step; press a name to hide it.";
function captioned(chart) {
  if (chart.id === "training") return EVERY;
  if (chart.id === "reached") return SHARES;
  if (chart.series.some((series) => series.crowd)) return HOW + MANY;
  return HOW + SPREAD + (chart.series.some((series) => series.paper.length) ? " Hollow: the paper’s values." : "");
}

// The dialog with the figures of one report.
function explore(card) {
  const found = data.cards[card];
  $("explorer-title").textContent = $(`${card}-title`).textContent;
  const choose = (chart) => {
    draw($("explorer-chart"), chart);
    for (const tab of $("tabs").children) tab.setAttribute("aria-pressed", String(tab.textContent === chart.name));
  };
  $("tabs").replaceChildren(...found.map((chart) => {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.textContent = chart.name;
    tab.addEventListener("click", () => choose(chart));
    return tab;
  }));
  $("explorer").showModal();
  choose(found[0]);
}
$("close").addEventListener("click", () => $("explorer").close());
$("explorer").addEventListener("click", (event) => { if (event.target === $("explorer")) $("explorer").close(); });
$("explorer").addEventListener("close", () => { draw($("explorer-chart"), null); drawn.delete($("explorer-chart")); });
for (const button of document.querySelectorAll(".explore")) button.addEventListener("click", () => explore(button.dataset.card));

// Filters.
const filters = ["paper", "verdict", "evidence"];
function filter() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const card of cards) {
    const text = card.dataset.words;
    card.hidden = !(filters.every((name) => !$(name).value || card.dataset[name] === $(name).value) && words.every((word) => text.includes(word)));
  }
  const shown = cards.filter((card) => !card.hidden).length;
  $("shown").textContent = `${shown} of ${cards.length}`;
  $("nothing").hidden = shown > 0;
}
function show(anchor) {
  if ($(anchor).hidden) { document.querySelector("main > form").reset(); filter(); }
  location.hash = "";
  location.hash = anchor;
}
for (const name of filters) $(name).addEventListener("change", filter);
$("search").addEventListener("input", filter);
document.querySelector("main > form").addEventListener("submit", (event) => event.preventDefault());
document.querySelector("main > form").addEventListener("reset", () => setTimeout(filter));
for (const link of document.querySelectorAll("#leaderboard th a")) {
  link.addEventListener("click", (event) => { event.preventDefault(); show(link.hash.slice(1)); });
}

// Commands to copy.
for (const button of document.querySelectorAll(".copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    } catch {
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
  });
}

// The leaderboard's figures.
function board() {
  const card = $("task").value, found = card ? data.cards[card] : data.board;
  const state = found.find((chart) => chart.id === "state"), other = found.find((chart) => chart.id === (card ? "figure" : "length"));
  draw($("board-state"), state || { series: [] });
  draw($("board-length"), other);
}
$("task").addEventListener("change", board);
system.addEventListener("change", () => setTheme());
$("theme").addEventListener("click", () => { setTheme(isDark() ? "light" : "dark"); memory.set(document.documentElement.dataset.theme); });
Chart.defaults.font.family = "system-ui, sans-serif";
Chart.defaults.font.size = 13;
setTheme(memory.get());
board();
