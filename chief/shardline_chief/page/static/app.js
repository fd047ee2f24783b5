// The chief's page: takes what the chief says and writes it down; decides nothing.
import { Curves } from "./curves.js";
import { Feed } from "./feed.js";
import { NONE, bytes, count, figure, moment, percent, plural, rate, seconds } from "./format.js";
import { Pipeline } from "./pipeline.js";
import { fill } from "./tables.js";
import { Topology } from "./topology.js";

const at = (id) => document.getElementById(id);

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(view) {
  written = view.written;
  head(view);
  standstill(view);
  progress(view);
  figures(view);
  pipeline.show(view);
  topology.show(view);
  tasks(view);
  shards(view);
  checkpoints(view);
  events(view);
  put(at("out"), view.out_dir);
}

function head(view) {
  const name = view.job || "Shardline";
  const share = view.progress == null ? "" : `${Math.floor(view.progress * 100)} % `;
  document.title = `${share}${name} – Shardline`;
  put(at("job"), name);
  const mode = { sync: "synchronous", async: "asynchronous" }[view.mode];
  const replicas = view.mode === "sync" && view.replicas ? plural(view.replicas, "replica") : "";
  put(at("about"), [mode, view.rule, replicas, ...view.codecs.map(codec)].filter(Boolean).join(" · "));
}

// The alert changes with the tasks only: a screen reader would read out each second.
function standstill(view) {
  const still = view.standstill;
  const card = at("still");
  card.hidden = !still;
  document.body.classList.toggle("standing", Boolean(still));
  if (!still) return;
  put(card.firstElementChild, `No step since ${moment(still.since)}${still.whom ? `: waiting for ${still.whom}` : ""}`);
  put(card.lastElementChild, `For ${seconds(still.seconds)}${still.facts ? `; awaited: ${still.facts}` : ""}`);
}

function progress(view) {
  put(at("doing"), view.doing);
  const { unit, asked, passes } = view.counting;
  const each = passes > 1 ? ` of ${plural(passes, "pass")}` : "";
  const updates = asked === unit ? "" : `, ${plural(view.step, unit)}`;
  put(at("step"), count(view.steps ? view.done : view.step));
  put(at("steps"), view.steps ? ` of ${plural(view.steps, asked)}${each}${updates}` : ` ${unit}s${each}`);
  const bar = at("bar");
  bar.hidden = view.progress == null;
  if (!bar.hidden) bar.value = view.progress;
  const left = view.left_s == null ? "" : `${seconds(view.left_s)} left`;
  put(at("left"), view.phase === "ended" && view.seconds ? `took ${seconds(view.seconds)}` : left);
  const reason = at("reason");
  reason.hidden = !view.reason || (view.phase === "ended" && view.exit_code === 0 && view.reason === "done");
  reason.classList.toggle("bad", view.exit_code !== 0);
  put(reason, view.reason);
  const faults = at("faults");
  faults.hidden = !view.faults.length;
  put(faults, view.faults.join(" · "));
}

function figures(view) {
  const found = [
    ["Training loss", figure(view.loss)],
    ...Object.entries(view.evaluation?.metrics ?? {}).map(([name, value]) => [
      name.charAt(0).toUpperCase() + name.slice(1),
      figure(value),
      `evaluated at step ${count(view.evaluation.step)}`,
    ]),
    [`${view.counting.unit.replace(/^./, (first) => first.toUpperCase())}s/s`, figure(view.steps_per_s || null, 3)],
    ["Push", rate(view.push_bytes_per_s)],
    ["Pull", rate(view.pull_bytes_per_s)],
    ["Staleness", figure(view.staleness, 3), view.staleness ? `at most ${count(view.staleness_max)}` : ""],
    ["Trained for", view.seconds ? seconds(view.seconds) : NONE],
  ];
  const list = at("figures");
  found.forEach(([name, value, note = ""], index) => {
    const group = list.children[index] ?? list.appendChild(document.createElement("div"));
    if (!group.children.length) {
      group.append(document.createElement("dt"), document.createElement("dd"));
      group.lastChild.append(document.createTextNode(""), " ", document.createElement("small"));
    }
    put(group.firstChild, name);
    const [text, , small] = group.lastChild.childNodes;
    if (text.data !== value) text.data = value;
    put(small, note);
  });
  while (list.children.length > found.length) list.lastChild.remove();
}

// Such as "topk up, 66x smaller, error 88 %, owed 1.2".
function codec(used) {
  return [
    `${used.codec} ${used.way}`,
    used.ratio == null ? "" : `${figure(used.ratio, 3)}x smaller`,
    used.error == null ? "" : `error ${figure(100 * used.error, 3)} %`,
    used.owed == null ? "" : `owed ${figure(used.owed, 3)}`,
  ].filter(Boolean).join(", ");
}

function number(text) {
  return { text, kind: "number" };
}

function tasks(view) {
  const alive = view.tasks.filter((task) => task.state === "alive").length;
  put(at("tasks-count"), view.tasks.length ? `${alive} of ${view.tasks.length} alive` : "");
  fill(
    at("tasks"),
    view.tasks.map((task) => ({
      key: task.name,
      cells: [
        task.name,
        { text: task.state, kind: "chips", chip: task.state },
        number(task.heard_s == null ? NONE : `${seconds(Math.max(0.1, task.heard_s))} ago`),
        number(count(task.step)),
        number(figure(task.steps_per_s || null, 3)),
        number(rate(task.push_bytes_per_s)),
        number(rate(task.pull_bytes_per_s)),
        {
          ...number(task.compute_s == null ? NONE : seconds(task.data_s + task.compute_s + task.exchange_s)),
          title: task.compute_s == null ? "" : `data ${seconds(task.data_s)}, compute ${seconds(task.compute_s)}, exchange ${seconds(task.exchange_s)}, `
            + `of which ${seconds(task.blocked_s)} waiting for other workers`
            + (task.drift == null ? "" : `; drift ${figure(task.drift, 3)}`),
        },
        {
          ...number(figure(task.staleness, 3)),
          title: task.gap == null ? "" : `parameters moved by ${figure(task.gap, 3)} (RMS) during a push`,
        },
        number(percent(task.cores)),
        number(bytes(task.resident_bytes)),
        { text: has(task), title: task.gpu_bytes == null ? "" : "of the GPU, by all processes" },
        { text: task.incarnation, kind: "soft" },
        { text: task.address, kind: "soft" },
      ],
    })),
  );
}

// Such as "replicas 0–2 on cuda:1 (93 %, 4.1 GB)".
function has(task) {
  const [one, numbers] = task.shards.length ? ["shard", task.shards] : ["replica", task.replicas];
  const held = numbers.length ? `${one}${numbers.length === 1 ? "" : "s"} ${ranges(numbers)}` : "";
  const device = task.device === "cpu" || !task.device ? "" : `on ${task.device}`;
  const gpu = task.gpu_bytes == null ? "" : `(${percent(task.gpu_share)}, ${bytes(task.gpu_bytes)})`;
  return [held, device, gpu].filter(Boolean).join(" ");
}

// [0, 1, 2, 5] as "0–2, 5".
function ranges(numbers) {
  const parts = [];
  for (const item of numbers) {
    const last = parts.at(-1);
    if (last && item === last[1] + 1) last[1] = item;
    else parts.push([item, item]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
}

// Where a second copy of a shard is, and whether it could take over.
function standby(shard) {
  const text = `${shard.standby} ${shard.standby_state}`.trim();
  if (!shard.standby) return { text, kind: "soft" };
  if (shard.standby_state === "in step") return text;
  return { text, chip: "suspect", title: shard.standby_problem };
}

// How many rows a table has in a shard, and what became of others.
function rows(table) {
  const refused = `${count(table.below_admission)} gradients below admission, ${count(table.cap)} at the cap`;
  const looked = table.memory_hits + table.memory_misses;
  const disk = looked ? `, ${count(table.disk_rows)} rows on disk (${bytes(table.disk_bytes)}), ${count(table.memory_misses)} of ${count(looked)} looked up there` : "";
  return `${table.table}: ${count(table.rows)} rows, ${count(table.evicted)} evicted, ${refused}${disk}`;
}

function shards(view) {
  fill(
    at("shards"),
    view.shards.map((shard) => ({
      key: String(shard.shard),
      cells: [
        `shard ${shard.shard}`,
        shard.state === "alive" ? shard.ps : { text: `${shard.ps} ${shard.state}`, chip: shard.state },
        { text: shard.waiting_for.length ? `replica ${ranges(shard.waiting_for)}` : "", kind: "soft" },
        standby(shard),
        { text: bytes(shard.bytes), share: shard.share },
        { ...number(bytes(shard.held_bytes)), title: (shard.tables ?? []).map(rows).join("\n") },
        number(count(shard.version)),
        number(shard.staleness ? `${figure(shard.staleness, 3)}, at most ${count(shard.staleness_max)}` : figure(shard.staleness, 3)),
      ],
    })),
  );
}

function checkpoints(view) {
  at("no-checkpoints").hidden = view.checkpoints.length > 0;
  at("checkpoints").hidden = view.checkpoints.length === 0;
  fill(
    at("checkpoints"),
    view.checkpoints.map((item) => ({
      key: String(item.step),
      cells: [
        item.best ? `${count(item.step)} (best)` : count(item.step),
        number(bytes(item.bytes)),
        number(seconds(item.age_s)),
        { text: within(item.path, view.out_dir), kind: "soft path", title: item.path },
      ],
    })),
  );
}

// A path as seen from the results' folder.
function within(path, folder) {
  return path.startsWith(`${folder}/`) ? path.slice(folder.length + 1) : path;
}

let newest = "";

function events(view) {
  const last = view.events.at(-1);
  const mark = last ? `${last.time} ${last.sentence}` : "";
  if (mark === newest) return;
  newest = mark;
  at("events").replaceChildren(
    ...view.events.toReversed().map((event) => {
      const item = document.createElement("li");
      const time = document.createElement("time");
      const text = document.createElement("span");
      item.className = event.level;
      time.dateTime = new Date(event.time * 1000).toISOString();
      time.textContent = moment(event.time);
      text.textContent = event.sentence;
      item.append(time, text);
      return item;
    }),
  );
}

let written = null; // when a run's files last changed, where they are what is shown

function contact(state, since) {
  const when = moment(since / 1000);
  const still = document.body.classList.contains("standing") ? "; the job stands still" : "";
  const source = written == null ? "the chief" : "the viewer";
  put(
    at("contact"),
    {
      live: written == null ? (still ? `connected${still}` : "live") : `files of ${moment(written)}${still}`,
      unreached: `can't reach the chief; trying since ${when}`,
      lost: `lost contact with ${source} since ${when}`,
      over: written == null ? `the job has ended; last update at ${when}` : `the job has ended; files of ${moment(written)}`,
      ended: `${source} ended at ${when}; this is its last update`,
    }[state],
  );
  const alarm = state === "lost" || state === "unreached";
  at("contact").className = `contact ${{ live: "live" }[state] ?? (alarm ? "lost" : "ended")}`;
  document.body.classList.toggle("lost", alarm);
}

put(at("contact"), "connecting …");
const pipeline = new Pipeline(at("pipeline"));
const topology = new Topology(at("topology"));
const curves = new Curves(at("curves"), { log: at("log"), smoothing: at("smoothing"), legend: at("runs") });
new Feed({ onView: show, onHistory: (news) => curves.take(news), onContact: contact });
