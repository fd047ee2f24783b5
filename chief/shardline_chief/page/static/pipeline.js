// The recent passes of a pipeline: a row per stage of a replica, time to the right, and what each stage is like.
import { figure, plural, seconds } from "./format.js";
import { make } from "./svg.js";
import { fill } from "./tables.js";

const LANE = 22; // height of a pass
const STASH = 14; // height of the curve of the microbatches held
const GAP = 16;
const LABEL = 150; // width of the names
const AXIS = 20;
const NARROW = 13; // a narrower pass has no number in it

export class Pipeline {
  constructor(section) {
    this.section = section;
    this.place = section.querySelector(".timeline");
    this.asking = false;
    this.drawn = "";
    new ResizeObserver(() => this.draw()).observe(this.place);
  }

  show(view) {
    this.section.hidden = !view.stages.length;
    if (this.section.hidden) return;
    fill(
      this.section.querySelector("table"),
      view.stages.map((stage) => ({
        key: String(stage.stage),
        cells: [
          `stage ${stage.stage}`,
          stage.tasks.join(", "),
          { text: `${(100 * stage.bubble).toFixed(0)} %`, share: stage.bubble },
          ...[stage.forward_s, stage.backward_s].map((value) => ({ text: seconds(value), kind: "number" })),
          { text: figure(stage.held), kind: "number" },
          { text: plural(stage.behind, "update"), kind: "number" },
        ],
      })),
    );
    this.ask();
  }

  async ask() {
    if (this.asking || document.hidden) return;
    this.asking = true;
    try {
      const answer = await fetch("api/passes", { signal: AbortSignal.timeout(5000) });
      const text = answer.ok ? await answer.text() : this.drawn;
      if (text !== this.drawn) {
        this.drawn = text;
        this.draw();
      }
    } catch {
      // The feed tells when the chief is gone; what was drawn stays.
    } finally {
      this.asking = false;
    }
  }

  draw() {
    const width = this.place.clientWidth;
    if (!this.drawn || width < 2 * LABEL) return;
    const { rows, passes } = JSON.parse(this.drawn);
    if (!passes.length) return;
    const end = Math.max(...passes.map((one) => one[5]));
    const x = (time) => LABEL + ((width - LABEL - 4) * time) / end;
    const each = LANE + STASH + GAP;
    const picture = make("svg", { width, height: rows.length * each + AXIS, role: "img" });
    picture.setAttribute("aria-label", `passes of ${plural(rows.length, "stage")}, ${seconds(end / 1000)}`);
    const most = Math.max(...passes.map((one) => one[7]));
    rows.forEach((row, at) => {
      const top = at * each;
      picture.append(
        make("text", { x: 0, y: top + 15, class: "name" }, `stage ${row.stage}${several(rows) ? `, replica ${row.replica}` : ""}`),
        make("text", { x: 0, y: top + 31, class: "note" }, row.task),
        make("rect", { x: LABEL, y: top, width: width - LABEL - 4, height: LANE, class: "idle" }),
      );
      const own = passes.filter((one) => one[0] === at);
      own.forEach((one) => picture.append(...pass(one, top, x)));
      picture.append(...stash(own, top + LANE + 2, x, most));
    });
    axis(picture, rows.length * each, end, x);
    this.place.replaceChildren(picture);
  }
}

function several(rows) {
  return rows.some((row) => row.replica !== rows[0].replica);
}

function pass([, step, microbatch, back, start, end, version, held], top, x) {
  const [left, wide] = [x(start), Math.max(1, x(end) - x(start) - 0.5)];
  const shade = `${back ? "backward" : "forward"}${step % 2 ? " odd" : ""}`;
  const box = make("rect", { x: left, y: top, width: wide, height: LANE, rx: 2, class: shade });
  const way = back ? "backward" : "forward";
  const told = [`step ${step}, microbatch ${microbatch}, ${way}`, seconds((end - start) / 1000), `version ${version}`];
  box.append(make("title", {}, [...told, `holds ${plural(held, "microbatch").replace("batchs", "batches")}`].join("\n")));
  if (wide < NARROW) return [box];
  return [box, make("text", { x: left + wide / 2, y: top + 15, class: "inside" }, microbatch)];
}

// Microbatches held, as a line; the version of the parameters where it changes.
function stash(own, top, x, most) {
  const level = (count) => top + STASH - (STASH * count) / Math.max(1, most);
  let path = "";
  let before = 0;
  let named = -1;
  const found = [];
  let free = -Infinity;
  for (const [, , , back, start, end, version, held] of own) {
    path += `${path ? "L" : "M"}${x(start)},${level(before)}V${level(held)}H${x(end)}V${level(held - back)}`;
    before = held - back;
    if (version !== named && x(start) > free) {
      const label = make("text", { x: x(start), y: top + STASH + 9, class: "version" }, `v${version}`);
      found.push(label);
      free = x(start) + 10 + 7 * String(version).length;
    }
    named = version;
  }
  return [make("path", { d: path, class: "stash" }), ...found];
}

function axis(picture, top, end, x) {
  const step = [1, 2, 5].flatMap((unit) => [0.1, 1, 10, 100, 1000, 10000].map((ten) => unit * ten)).sort((a, b) => a - b);
  const chosen = step.find((size) => end / size <= 8) ?? end;
  for (let time = 0; time <= end; time += chosen) {
    picture.append(make("text", { x: x(time), y: top + 14, class: "note" }, time ? seconds(time / 1000) : "0"));
  }
}
