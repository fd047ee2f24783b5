// The machines with their tasks, workers to the left and servers to the right, and the bytes per second between them.
import { rate } from "./format.js";
import { make } from "./svg.js";

const NODE = [150, 24]; // width and height of a task
const EDGE = 12; // between a machine's edge and its tasks
const HEAD = 20; // height of a line of text
const GAP = 10;
const LABEL = [140, 13];
const SPOTS = [0.5, 0.35, 0.65, 0.2, 0.8, 0.43, 0.57, 0.28, 0.72]; // where on an edge its label may stand
const NARROWEST = 640; // on a narrower screen it is scrolled

export class Topology {
  constructor(section) {
    this.section = section;
    this.place = section.querySelector(".links");
    this.drawn = "";
    new ResizeObserver(() => this.draw()).observe(this.place);
  }

  show(view) {
    this.section.hidden = !view.topology;
    this.found = view.topology;
    this.draw();
  }

  draw() {
    const width = Math.max(NARROWEST, this.place.clientWidth - 2);
    const wanted = JSON.stringify([width, this.found]);
    if (!this.found || wanted === this.drawn) return;
    this.drawn = wanted;
    const { machines, edges, marked } = this.found;
    this.section.querySelector(".count").textContent = marked;
    const { boxes, nodes, height } = layout(machines, width);
    const picture = make("svg", { width, height, role: "img", "aria-label": marked || "topology" });
    picture.append(...boxes.flatMap(machine));
    const most = Math.max(1, ...edges.map((one) => one.out_bytes_per_s + one.in_bytes_per_s));
    const taken = [];
    const drawn = edges.map((one) => edge(one, nodes, most, taken));
    // Labels come last, so that no line crosses them.
    picture.append(...drawn.map(([line]) => line), ...[...nodes.values()].flatMap(task), ...drawn.map(([, label]) => label));
    this.place.replaceChildren(picture);
  }
}

// A machine spans the columns of its tasks, and stands below those that share one of them.
export function layout(machines, width) {
  const columns = [...new Set(machines.flatMap((one) => one.nodes.map((node) => node.column)))].sort();
  const apart = (width - NODE[0] - 2 * EDGE) / Math.max(1, columns.length - 1);
  const left = (column) => EDGE + columns.indexOf(column) * apart;
  const free = new Map(columns.map((column) => [column, 0]));
  const nodes = new Map();
  const boxes = machines.map(({ name, others, marked, nodes: held }) => {
    const own = held.map((node) => node.column);
    const [first, last] = [Math.min(...own), Math.max(...own)];
    const across = columns.filter((column) => first <= column && column <= last);
    const top = Math.max(...across.map((column) => free.get(column)));
    const below = new Map(across.map((column) => [column, top + HEAD * (others ? 2 : 1) + GAP / 2]));
    for (const node of held) {
      const y = below.get(node.column);
      below.set(node.column, y + NODE[1] + GAP);
      nodes.set(node.name, { ...node, x: left(node.column), y });
    }
    const bottom = Math.max(...below.values());
    across.forEach((column) => free.set(column, bottom + GAP));
    return { name, others, marked, x: left(first) - EDGE, y: top, width: left(last) - left(first) + NODE[0] + 2 * EDGE, height: bottom - top };
  });
  return { boxes, nodes, height: Math.max(...free.values()) };
}

function machine({ name, others, marked, x, y, width, height }) {
  const inside = x + EDGE;
  const found = [
    make("rect", { x: x + 1, y: y + 1, width: width - 2, height: height - 2, rx: 8, class: marked ? "machine marked" : "machine" }),
    make("text", { x: inside, y: y + HEAD - 3, class: "name" }, name),
  ];
  if (others) found.push(make("text", { x: inside, y: y + 2 * HEAD - 5, class: "note" }, others));
  return found;
}

function task({ name, x, y }) {
  return [
    make("rect", { x, y, width: NODE[0], height: NODE[1], rx: 4, class: "task" }),
    make("text", { x: x + NODE[0] / 2, y: y + 16, class: "inside" }, name),
  ];
}

// A line, and its label where no other one is.
function edge(one, nodes, most, taken) {
  const [from, to] = [nodes.get(one.start), nodes.get(one.end)];
  const same = from.column === to.column;
  const own = from === to ? 8 : 0; // tasks of one node among each other
  const begin = [from.x + NODE[0], from.y + NODE[1] / 2 - own];
  const end = [to.x + (same ? NODE[0] : 0), to.y + NODE[1] / 2 + own];
  const bend = same ? 60 : 0;
  const points = [begin, [begin[0] + bend, begin[1]], [end[0] + bend, end[1]], end];
  const [out, back] = [one.out_bytes_per_s, one.in_bytes_per_s];
  const kind = `edge${one.marked ? " marked" : ""}${out + back ? "" : " idle"}`;
  const line = make("path", { d: `M${points[0]}C${points.slice(1).join(" ")}`, class: kind, "stroke-width": 1 + (3 * (out + back)) / most });
  line.append(make("title", {}, `${one.start} to ${one.end}: ${rate(out)}, back: ${rate(back)}`));
  const spots = SPOTS.map((part) => [0, 1].map((axis) => bezier(points.map((point) => point[axis]), part)));
  const open = ([x, y]) => taken.every(([left, top]) => Math.abs(left - x) > LABEL[0] || Math.abs(top - y) > LABEL[1]);
  const spot = spots.find(open) ?? spots[0];
  taken.push(spot);
  const [x, y] = [spot[0] + (same ? LABEL[0] / 2 : 0), spot[1] + 4];
  return [line, make("text", { x, y, class: `label${one.marked ? " marked" : ""}` }, `→ ${rate(out)} ← ${rate(back)}`)];
}

function bezier([a, b, c, d], t) {
  const s = 1 - t;
  return s ** 3 * a + 3 * s * s * t * b + 3 * s * t * t * c + t ** 3 * d;
}
