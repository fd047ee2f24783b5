// Curves by uPlot, of this run and of those beside it. The chief sends what changed since the last time; points are kept
// by the number of their bin.
/* global uPlot */
import { bytes, clock, figure, seconds } from "./format.js";

const HEIGHT = 180;
const FAINT = "55"; // opacity of what was smoothed

export class Curves {
  // log, smoothing: elements that choose how they are drawn; legend: where the runs are named.
  constructor(place, { log, smoothing, legend }) {
    Object.assign(this, { place, log, smoothing, legend });
    this.runs = new Map([["", new Map()]]); // by name, "" = this one: curves by name, {axis, bins: Map of bin to [x, y]}
    this.charts = new Map();
    this.drawing = 0;
    this.observer = new ResizeObserver((entries) => entries.forEach(({ target }) => this.fit(target)));
    // Colours, scales and lines are chosen when a chart is made.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.renew());
    for (const choice of [log, smoothing]) choice.addEventListener("input", () => this.renew());
  }

  take(news) {
    const beside = Object.entries(news.beside ?? {});
    if (beside.some(([name]) => !this.runs.has(name))) {
      for (const [name] of beside) if (!this.runs.has(name)) this.runs.set(name, new Map());
      this.name(news.run);
      this.renew();
    }
    for (const [name, part] of [["", news], ...beside]) update(this.runs.get(name), part);
    // Drawing waits for the next frame, and a hidden page draws nothing.
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  // The legend of several runs.
  name(own) {
    this.legend.replaceChildren(
      ...[...this.runs.keys()].map((name, at) => {
        const item = document.createElement("li");
        item.append(key(at), name || own);
        return item;
      }),
    );
    this.legend.hidden = false;
  }

  renew() {
    for (const { plot, figure: box } of this.charts.values()) {
      plot.destroy();
      box.remove();
    }
    this.charts.clear();
    this.draw();
  }

  draw() {
    this.drawing = 0;
    for (const spec of this.specs()) {
      const lines = this.lines(spec);
      if (!lines.some(({ points }) => points[0].length)) continue;
      const data = uPlot.join(lines.map(({ points }) => points));
      let chart = this.charts.get(spec.title);
      if (!chart) {
        chart = this.make(spec, lines, data);
        this.charts.set(spec.title, chart);
      }
      chart.plot.setData(data);
      chart.now.replaceChildren(...lines.flatMap((line, at) => latest(spec, line, data[at + 1], this.runs.size)));
      chart.box.setAttribute("aria-label", `${spec.title}, now ${chart.now.textContent}`);
    }
  }

  specs() {
    const names = [...new Set([...this.runs.values()].flatMap((curves) => [...curves.keys()]))].sort();
    const logged = names.filter((name) => name.startsWith("logged/"));
    const scores = names.filter((name) => name.startsWith("evaluation/"));
    return [
      { title: "Training loss", names: ["loss"], labels: ["loss"], text: figure },
      ...scores.map((name) => ({
        title: `Evaluated ${name.slice("evaluation/".length)}`,
        names: [name],
        labels: [name.slice("evaluation/".length)],
        text: figure,
        dots: true,
      })),
      ...logged.map((name) => {
        const label = name.slice("logged/".length);
        const words = label.replaceAll("_", " ");
        return { title: words[0].toUpperCase() + words.slice(1), names: [name], labels: [label], text: figure };
      }),
      { title: "Bytes/s", names: ["push", "pull"], labels: ["push", "pull"], text: (v) => `${bytes(v)}/s`, zero: true },
      { title: "Steps/s", names: ["steps"], labels: ["steps/s"], text: (v) => figure(v, 3), zero: true },
      { title: "Staleness", names: ["staleness"], labels: ["versions"], text: (v) => figure(v, 3), zero: true, least: 1 },
    ];
  }

  // What a chart draws: each curve of each run, and again as it was before smoothing.
  lines(spec) {
    const weight = Number(this.smoothing.value);
    const sharp = [...this.runs].flatMap(([run, curves], at) =>
      spec.names.map((name, second) => ({
        run,
        label: spec.labels[second],
        color: this.runs.size > 1 ? at : second,
        dashed: this.runs.size > 1 && second > 0,
        points: columns(curves.get(name), { logarithmic: this.log.checked && !spec.zero, aligned: this.runs.size > 1 }),
      })),
    );
    if (!weight) return sharp;
    const smooth = sharp.map((line) => ({ ...line, points: [line.points[0], smoothed(line.points[1], weight)] }));
    return [...smooth, ...sharp.map((line) => ({ ...line, faint: true }))];
  }

  axis(spec) {
    const curves = [...this.runs.values()].map((found) => found.get(spec.names[0]));
    return curves.find(Boolean)?.axis ?? "step";
  }

  make(spec, lines, data) {
    const figure = document.createElement("figure");
    figure.className = "card curve";
    const caption = document.createElement("figcaption");
    const title = document.createElement("span");
    title.textContent = spec.title;
    const now = document.createElement("span");
    now.className = "now";
    caption.append(title, now);
    const box = document.createElement("div");
    box.className = "plot";
    box.setAttribute("role", "img");
    figure.append(caption, box);
    this.place.append(figure);
    this.order();
    const along = this.axis(spec) === "step" ? "step" : this.runs.size > 1 ? "passed" : "time";
    const logarithmic = this.log.checked && !spec.zero;
    const plot = new uPlot(options(spec, lines, { along, logarithmic, width: box.clientWidth }), data, box);
    box.plot = plot;
    this.observer.observe(box);
    return { plot, figure, box, now };
  }

  // A curve that began later (an evaluation) still stands in its place.
  order() {
    const titles = this.specs().map((spec) => spec.title);
    const at = (figure) => titles.indexOf(figure.querySelector("figcaption span").textContent);
    const figures = [...this.place.children];
    const sorted = [...figures].sort((a, b) => at(a) - at(b));
    if (sorted.some((item, index) => item !== figures[index])) this.place.append(...sorted);
  }

  fit(box) {
    if (box.plot && box.clientWidth && box.clientWidth !== box.plot.width) {
      box.plot.setSize({ width: box.clientWidth, height: HEIGHT });
    }
  }
}

function update(curves, news) {
  if (news.reset) curves.clear();
  for (const [name, { axis, reset, points }] of Object.entries(news.curves)) {
    const curve = curves.get(name);
    const bins = reset || !curve ? new Map() : curve.bins;
    for (const [bin, x, y] of points) bins.set(bin, [x, y]);
    curves.set(name, { axis, bins });
  }
}

// A curve as ascending x and y. A logarithm has no place for what is not positive; runs beside each other all begin at
// time 0.
function columns(curve, { logarithmic, aligned }) {
  const rows = [...(curve?.bins.values() ?? [])].sort((a, b) => a[0] - b[0]);
  const from = aligned && curve?.axis === "time" ? rows[0]?.[0] ?? 0 : 0;
  return [rows.map(([x]) => x - from), rows.map(([, y]) => (logarithmic && y <= 0 ? null : y))];
}

// An exponential moving average that begins at the first value, as TensorBoard's: weight 0 to 1 is that of the past.
function smoothed(values, weight) {
  let sum = 0;
  let whole = 0;
  return values.map((value) => {
    if (value == null) return value;
    sum = sum * weight + value * (1 - weight);
    whole = whole * weight + 1 - weight;
    return sum / whole;
  });
}

function key(at) {
  const found = document.createElement("i");
  found.className = `key run${at}`;
  return found;
}

// The newest value of a line, beside its title.
function latest(spec, line, values, runs) {
  const value = values.findLast((item) => item != null);
  if (value == null || line.faint) return [];
  const text = spec.text(value);
  if (runs > 1) return line.dashed ? [] : [key(line.color), text];
  return spec.names.length === 1 ? [text] : [key(line.color), `${line.label} ${text}`];
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function options(spec, lines, { along, logarithmic, width }) {
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const grid = { stroke: color("--line"), width: 1 };
  const axis = { stroke: color("--soft"), font, grid, ticks: { show: false } };
  return {
    width: width || 320,
    height: HEIGHT,
    padding: [8, 20, 0, 0],
    cursor: { drag: { x: true, y: false }, points: { size: 7 }, dataIdx: (plot, series, at) => nearest(plot.data[series], at) },
    legend: { show: false },
    scales: {
      x: { time: false },
      y: { distr: logarithmic ? 3 : 1, range: (plot, low, high) => bounds(low, high, spec, logarithmic) },
    },
    axes: [
      { ...axis, space: 64, size: 26, values: (plot, ticks) => ticks.map((v) => AXES[along].tick(v)) },
      { ...axis, space: 34, size: (plot, texts) => 14 + 7 * Math.max(2, ...(texts ?? []).map((t) => (t ?? "").length)), values: (plot, ticks) => ticks.map((v) => (v == null ? "" : spec.text(v))) },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        label: line.label,
        stroke: color(`--run${line.color}`) + (line.faint ? FAINT : ""),
        width: line.faint ? 1 : 1.75,
        dash: line.dashed ? [5, 4] : undefined,
        spanGaps: true,
        points: { show: spec.dots && !line.faint ? true : undefined, size: 5 },
      })),
    ],
    plugins: [reading(spec, lines, along)],
  };
}

const AXES = {
  step: { tick: compact, text: (x) => `step ${figure(Math.round(x))}` },
  time: { tick: clock, text: clock },
  passed: { tick: (x) => (x ? seconds(x) : "0"), text: (x) => `after ${seconds(x)}` },
};

function bounds(low, high, spec, logarithmic) {
  if (low == null) return logarithmic ? [0.1, 1] : [0, 1];
  if (logarithmic) return [low / 1.2, high * 1.2];
  if (spec.zero) return [0, Math.max(high * 1.08, spec.least ?? 1e-9)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function compact(value) {
  if (Math.abs(value) >= 1e6) return `${figure(value / 1e6, 3)} M`;
  return Math.abs(value) >= 1e4 ? `${figure(value / 1e3, 3)} k` : figure(value);
}

// The row nearest to this one that has a value: not all lines have points at the same places.
function nearest(values, at) {
  for (let away = 0; away < values.length; away += 1) {
    if (values[at - away] != null) return at - away;
    if (values[at + away] != null) return at + away;
  }
  return null;
}

// What lies under the cursor, as a text in the chart's upper corner.
function reading(spec, lines, along) {
  let text;
  return {
    hooks: {
      init: (plot) => {
        text = document.createElement("output");
        text.className = "reading";
        plot.over.append(text);
      },
      setCursor: (plot) => {
        const { idx, idxs, left } = plot.cursor;
        text.hidden = idx == null || left < 0;
        if (text.hidden) return;
        const values = lines.map((line, at) => {
          const value = line.faint ? null : plot.data[at + 1][idxs[at + 1]];
          return value == null ? "" : [line.run, line.label, spec.text(value)].filter(Boolean).join(" ");
        });
        text.textContent = [AXES[along].text(plot.data[0][idx]), ...values].filter(Boolean).join("  ");
        text.classList.toggle("right", left < plot.over.clientWidth / 2);
      },
    },
  };
}
