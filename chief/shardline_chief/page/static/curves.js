// Curves by uPlot. The chief sends what changed since the last time; points are kept by the number of their bin.
/* global uPlot */
import { bytes, clock, figure } from "./format.js";

const HEIGHT = 180;

export class Curves {
  constructor(place) {
    this.place = place;
    this.points = new Map(); // by name: {axis, bins: Map of bin to [x, y]}
    this.charts = new Map();
    this.drawing = 0;
    this.observer = new ResizeObserver((entries) => entries.forEach(({ target }) => this.fit(target)));
    // Colours are read when a chart is made.
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.renew());
  }

  take(news) {
    if (news.reset) this.points.clear();
    for (const [name, { axis, reset, points }] of Object.entries(news.curves)) {
      const curve = this.points.get(name);
      const bins = reset || !curve ? new Map() : curve.bins;
      for (const [bin, x, y] of points) bins.set(bin, [x, y]);
      this.points.set(name, { axis, bins });
    }
    // Drawing waits for the next frame, and a hidden page draws nothing.
    this.drawing ||= requestAnimationFrame(() => this.draw());
  }

  renew() {
    for (const { plot } of this.charts.values()) plot.destroy();
    for (const { figure: box } of this.charts.values()) box.remove();
    this.charts.clear();
    this.draw();
  }

  draw() {
    this.drawing = 0;
    for (const spec of this.specs()) {
      const data = aligned(spec.names.map((name) => this.points.get(name)));
      if (!data[0].length) continue;
      let chart = this.charts.get(spec.title);
      if (!chart) {
        chart = this.make(spec, data);
        this.charts.set(spec.title, chart);
      }
      chart.plot.setData(data);
      chart.now.replaceChildren(...spec.names.flatMap((name, at) => latest(spec, data[at + 1], at)));
      chart.box.setAttribute("aria-label", `${spec.title}, now ${chart.now.textContent}`);
    }
  }

  specs() {
    const logged = [...this.points.keys()].filter((name) => name.startsWith("logged/")).sort();
    const scores = [...this.points.keys()].filter((name) => name.startsWith("evaluation/")).sort();
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

  make(spec, data) {
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
    const axis = this.points.get(spec.names[0])?.axis ?? "step";
    const plot = new uPlot(options(spec, axis, box.clientWidth), data, box);
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

// uPlot wants one ascending x for all series of a chart; a series without a point there has null.
function aligned(curves) {
  const bins = new Map();
  curves.forEach((curve, at) => {
    for (const [bin, [x, y]] of curve?.bins ?? []) {
      const row = bins.get(bin) ?? [x, ...curves.map(() => null)];
      row[at + 1] = y;
      bins.set(bin, row);
    }
  });
  const rows = [...bins.values()].sort((a, b) => a[0] - b[0]);
  return [0, ...curves.map((_, at) => at + 1)].map((column) => rows.map((row) => row[column]));
}

function latest(spec, values, at) {
  const value = values.findLast((item) => item != null);
  if (value == null) return [];
  const text = spec.text(value);
  if (spec.names.length === 1) return [text];
  const key = document.createElement("i");
  key.className = at ? "key second" : "key";
  return [key, `${spec.labels[at]} ${text}`];
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function options(spec, axis, width) {
  const font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const grid = { stroke: color("--line"), width: 1 };
  const lines = { stroke: color("--soft"), font, grid, ticks: { show: false } };
  const along = axis === "time" ? "time" : "step";
  return {
    width: width || 320,
    height: HEIGHT,
    padding: [8, 20, 0, 0],
    cursor: { drag: { x: true, y: false }, points: { size: 7 } },
    legend: { show: false },
    scales: {
      x: { time: false },
      y: { range: (plot, low, high) => bounds(low, high, spec) },
    },
    axes: [
      { ...lines, space: 64, size: 26, values: (plot, ticks) => ticks.map((v) => (along === "time" ? clock(v) : compact(v))) },
      { ...lines, space: 34, size: (plot, texts) => 14 + 7 * Math.max(2, ...(texts ?? []).map((t) => t.length)), values: (plot, ticks) => ticks.map((v) => spec.text(v)) },
    ],
    series: [
      {},
      ...spec.names.map((name, at) => ({
        label: spec.labels[at],
        stroke: color(at ? "--second" : "--accent"),
        width: 1.75,
        spanGaps: true,
        points: { show: spec.dots ? true : undefined, size: 5 },
      })),
    ],
    plugins: [reading(spec, along)],
  };
}

function bounds(low, high, spec) {
  if (low == null) return [0, 1];
  if (spec.zero) return [0, Math.max(high * 1.08, spec.least ?? 1e-9)];
  const room = (high - low) * 0.08 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

function compact(value) {
  if (Math.abs(value) >= 1e6) return `${figure(value / 1e6, 3)} M`;
  return Math.abs(value) >= 1e4 ? `${figure(value / 1e3, 3)} k` : figure(value);
}

// What lies under the cursor, as a text in the chart's upper corner.
function reading(spec, along) {
  let text;
  return {
    hooks: {
      init: (plot) => {
        text = document.createElement("output");
        text.className = "reading";
        plot.over.append(text);
      },
      setCursor: (plot) => {
        const { idx, left } = plot.cursor;
        text.hidden = idx == null || left < 0;
        if (text.hidden) return;
        const x = plot.data[0][idx];
        const values = spec.labels.map((label, at) => {
          const value = plot.data[at + 1][idx];
          return value == null ? "" : `${label} ${spec.text(value)}`;
        });
        text.textContent = [along === "time" ? clock(x) : `step ${figure(Math.round(x))}`, ...values].filter(Boolean).join("  ");
        text.classList.toggle("right", left < plot.over.clientWidth / 2);
      },
    },
  };
}
