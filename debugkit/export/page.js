// Draws a trace: the timeline, the rows of the KV cache after the chosen event, and the event itself.
// The data is what debugkit.export.html puts into #trace; nothing is fetched and nothing is stored.
"use strict";
(() => {
const trace = JSON.parse(document.getElementById("trace").textContent);
const $ = (id) => document.getElementById(id);
const PASSES = ["prefill", "decode", "verify"];
const LANES = [
  {name: "passes", types: PASSES, height: 46},
  {name: "layers", types: ["layer"], height: 26},
  {name: "samples", types: ["sample"], height: 32},
  {name: "cache", types: ["sync", "truncate"], height: 32},
  {name: "marks", types: ["watch", "counted", "crash", "hang"], height: 32},
];
const UNITS = {prefill: 2.6, decode: 1, sync: 1.8, truncate: 1.4, layer: .5, sample: 1};
const MANY = 200;  // columns: more are drawn narrow, without words
const DENSE = 400;  // rows of the cache: more are drawn as squares
const state = {request: null, chosen: 0, axis: "order", timer: 0};
let tiles = [];  // of the rows
let bars = [];  // of the events
let spans = new Map();  // of the sampled tokens, by event

// ---- small things ---------------------------------------------------------------------------------

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (key === "class") node.className = value;
    else if (key === "style") Object.assign(node.style, value);
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}

const plural = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;
const number = (x) => String(Number(x.toPrecision(3)));
const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
const word = (id) => trace.words[id] === undefined ? null : visible(trace.words[id]);
const short = (id) => word(id) ?? String(id);
const named = (id) => word(id) === null ? `token ${id}` : `token ${id} “${word(id)}”`;
const rowsOf = ([from, to]) => to - from === 1 ? `row ${from}` : `rows ${from} to ${to - 1}`;

function duration(us) {
  if (us < 1000) return `${us.toFixed(0)} µs`;
  return us < 1e6 ? `${number(us / 1000)} ms` : `${number(us / 1e6)} s`;
}

function pairs(list, entries, group = false) {
  list.replaceChildren(...entries.flatMap(([name, value]) => {
    const both = [make("dt", {}, name), make("dd", {}, value)];
    return group ? [make("div", {}, ...both)] : both;
  }));
}

// ---- the page's head ------------------------------------------------------------------------------

function head() {
  $("command").textContent = trace.command;
  $("where").textContent = trace.where.join(" · ");
  $("verdict").textContent = trace.end;
  $("verdict").classList.toggle("bad", trace.bad);
  $("note").textContent = trace.notes.join(" ");
  if (trace.requests.length > 6) {
    const select = make("select", {"aria-label": "Request"});
    trace.requests.forEach((r, i) => select.append(make("option", {value: i}, label(r))));
    select.addEventListener("change", () => open(Number(select.value)));
    $("requests").append(select);
  } else if (trace.requests.length > 1) {
    trace.requests.forEach((r, i) => {
      const button = make("button", {type: "button"}, label(r));
      button.addEventListener("click", () => open(i));
      $("requests").append(button);
    });
  }
}

const label = (r) => `${r.number ? `Request ${r.number}` : "Before any request"}: ${r.title}`;

function open(index, chosen = trace.requests[index].events.findIndex(isPass)) {
  pause();
  state.request = trace.requests[index];
  state.index = index;
  const r = state.request;
  [...$("requests").children].forEach((child, i) => {
    if (child.tagName === "SELECT") child.value = String(index);
    else child.setAttribute("aria-pressed", String(i === index));
  });
  $("title").replaceChildren(r.title, make("span", {}, r.end ? `, ${r.end}` : ""));
  pairs($("facts"), trace.sessions > 1 ? [["session", String(r.session)], ...r.facts] : r.facts, true);
  answer(r);
  $("lanes").setAttribute("aria-label", `Events of ${label(r)}`);
  layOut();
  buildRows(r);
  choose(chosen);
}

function answer(r) {
  spans = new Map();
  $("answer").replaceChildren(...r.answer.ids.map((id, i) => {
    const text = r.answer.text[i];
    const plain = text !== undefined && text !== "";
    const span = make("span", {class: plain ? "" : "id", title: named(id)}, plain ? text : short(id));
    span.dataset.event = r.answer.events[i];
    spans.set(r.answer.events[i], span);
    return span;
  }));
}

// ---- the timeline ---------------------------------------------------------------------------------

// Event order: a column for each event; samples and layers lie in the column of their pass.
function columns(events) {
  const boxes = [];
  let x = 0;
  events.forEach((e, i) => {
    const parent = e.of === undefined ? undefined : boxes[e.of];
    if (e.type === "sample" && parent) {
      boxes[i] = {x: parent.x + e.slot * UNITS.sample, w: UNITS.sample};
      return;
    }
    const units = e.type === "verify" ? e.args.n_tokens : UNITS[e.type] ?? 1.8;
    if (e.type === "layer" && parent) {
      const at = parent.x + (parent.inside ?? 0);
      parent.inside = (parent.inside ?? 0) + units;
      parent.w = Math.max(parent.w, parent.inside);
      boxes[i] = {x: at, w: units};
      x = Math.max(x, parent.x + parent.w);
      return;
    }
    boxes[i] = {x, w: units};
    x += units;
  });
  return {boxes, span: x};
}

function layOut() {
  const r = state.request;
  const gutter = matchMedia("(max-width: 760px)").matches ? 58 : 72;
  const room = Math.max(200, $("scroll").clientWidth - gutter - 12);
  const lanes = LANES.filter((lane) => r.events.some((e) => lane.types.includes(e.type)));
  let top = 0;
  for (const lane of lanes) {
    lane.top = top;
    top += lane.height;
  }
  const axis = state.axis === "time" ? 20 : 0;
  const placed = state.axis === "time" ? byTime(r.events, room) : byOrder(r.events, room);
  const width = gutter + placed.width + 8;
  const box = $("lanes");
  Object.assign(box.style, {height: `${top + axis}px`, width: `${width}px`});
  bars = r.events.map((e, i) => bar(e, i, placed.boxes[i], gutter,
    lanes.find((lane) => lane.types.includes(e.type))));
  box.replaceChildren(
    ...lanes.map((lane) => make("div", {class: "lane", "aria-hidden": "true", style: {
      top: `${lane.top}px`, height: `${lane.height}px`, width: `${width}px`}},
    make("span", {}, lane.name))),
    ...placed.ticks.map(([x, text]) => make("div", {class: "tick", "aria-hidden": "true",
      style: {left: `${gutter + x}px`}}, text)),
    ...bars,
  );
  for (const button of $("axis").children) {
    button.setAttribute("aria-checked", String(button.dataset.axis === state.axis));
    button.tabIndex = button.dataset.axis === state.axis ? 0 : -1;
  }
}

function byOrder(events, room) {
  const {boxes, span} = columns(events);
  const least = span > MANY ? 9 : 34;
  const unit = Math.min(64, Math.max(least, room / Math.max(1, span)));
  return {ticks: [], width: span * unit,
    boxes: boxes.map((b) => ({x: b.x * unit, w: b.w * unit - (unit > 12 ? 3 : 1)}))};
}

function byTime(events, room) {
  const ends = events.map((e) => e.at + (e.takes ?? 0));
  const whole = Math.max(1, ...ends.slice(-1), ends.reduce((a, b) => Math.max(a, b), 0));
  const takes = events.filter((e) => PASSES.includes(e.type) && e.takes).map((e) => e.takes)
    .sort((a, b) => a - b);
  const median = takes[takes.length >> 1] ?? whole;
  const scale = Math.max(room / whole, Math.min(8 / median, 60000 / whole));  // pixels per µs
  const boxes = events.map((e) => ({x: e.at * scale, w: Math.max(3, (e.takes ?? 0) * scale)}));
  const samples = events.map((e, i) => e.type === "sample" ? i : -1).filter((i) => i >= 0);
  samples.forEach((i, n) => {  // as much room for its word as there is up to the next
    const next = samples[n + 1] === undefined ? boxes[i].x + 60 : boxes[samples[n + 1]].x;
    boxes[i].w = Math.max(3, Math.min(60, next - boxes[i].x - 3));
  });
  const step = niceStep(90 / scale);
  const ticks = [];
  for (let us = 0; us <= whole; us += step) ticks.push([us * scale, duration(us)]);
  return {boxes, ticks, width: whole * scale + 64};
}

function niceStep(us) {
  const power = 10 ** Math.floor(Math.log10(us));
  return power * ([1, 2, 5, 10].find((n) => n * power >= us) ?? 10);
}

function bar(e, i, {x, w}, gutter, lane) {
  const tall = lane.height - 8;
  const node = make("div", {
    class: `bar ${e.type}`, role: "option", id: `e${i}`, "aria-selected": "false",
    "aria-label": `${e.name}: ${e.say}`, title: e.say,
    style: {left: `${gutter + x}px`, width: `${w}px`, top: `${lane.top + 4}px`, height: `${tall}px`},
  });
  if (e.takes === null && PASSES.includes(e.type)) node.classList.add("open");
  if (e.type === "verify") {
    const n = e.args.n_tokens;
    for (let row = 0; row < n && w / n >= 3; row++) {
      node.append(make("i", {class: row >= n - (e.wrong ?? 0) ? "wrong" : "right"}));
    }
  }
  const text = caption(e, w);
  if (text) node.append(make("b", {class: e.wrong ? "first" : ""}, text));
  return node;
}

// The longest wording that fits a bar of this width.
function caption(e, width) {
  const nth = e.name.split(" ")[1] ?? "";
  if (e.type === "verify" && e.wrong) width /= e.args.n_tokens;
  const choices = {
    prefill: [`prefill ${e.args?.n_tokens}`, `${e.args?.n_tokens}`],
    decode: [e.name, nth],
    verify: [e.name, nth],
    sync: [`keep ${e.keep ?? "?"}`, `${e.keep ?? "?"}`],
    truncate: e.cut ? [`−${plural(e.cut[1] - e.cut[0], "row")}`, `−${e.cut[1] - e.cut[0]}`] : ["−0"],
    layer: [`layer ${e.args?.layer}`, `${e.args?.layer}`],
    sample: [short(e.token)],
    counted: [`${e.n} more`, `+${e.n}`],
  }[e.type] ?? [e.name];
  const fits = choices.find((text) => text.length * 7.2 + 6 <= width);
  if (fits !== undefined || e.type !== "sample") return fits ?? "";
  return width >= 18 ? choices[0].slice(0, Math.floor((width - 4) / 8)) : "";
}

// ---- the rows of the cache ------------------------------------------------------------------------

function buildRows(r) {
  const dense = r.n_rows > DENSE;
  $("rows").classList.toggle("dense", dense);
  tiles = [];
  for (let row = 0; row < r.n_rows; row++) {
    const node = make("div", {class: "row", role: "listitem"});
    node.dataset.row = row;
    if (!dense) node.append(make("small", {}, String(row)), make("span", {}, ""));
    tiles.push({node, text: node.lastChild, shown: null});
  }
  $("rows").replaceChildren(...tiles.map((tile) => tile.node));
  const entries = [["held", "from before"], ["kept", "kept"], ["prefill", "prefill"],
    ["decode", "decode"], ["verify", "verify"], ["unseen", "written unseen"],
    ["struck truncate", "taken back"]];
  const used = new Set(r.events.flatMap((e) => [
    e.write && e.type, e.keep && "kept", e.unseen && "unseen",
    (e.cut || e.lost) && "struck truncate"]));
  $("legend").replaceChildren(...entries.filter(([kind]) => used.has(kind)
    || (kind === "held" && r.before && !used.has("kept"))).map(([kind, text]) =>
    make("span", {class: kind}, make("i"), text)));
}

// What each row holds after the event with index `last`.
function rowsAfter(r, last) {
  const rows = Array.from({length: r.n_rows}, (_, row) => ({
    kind: row < r.before ? "held" : "", id: r.known[row], by: -1, struck: false, again: 0}));
  const fill = ([from, to], kind, by) => {
    for (let row = from; row < to; row++) {
      Object.assign(rows[row], {kind, by, struck: false, id: undefined});
    }
  };
  const strike = ([from, to], by) => {
    for (let row = from; row < to && row < rows.length; row++) {
      Object.assign(rows[row], {kind: "", struck: true, by, again: rows[row].again + 1});
    }
  };
  r.events.slice(0, last + 1).forEach((e, i) => {
    if (e.lost) strike(e.lost, i);
    if (e.unseen) fill(e.unseen, "unseen", i);
    if (e.keep) for (let row = 0; row < e.keep; row++) rows[row].kind = "kept";
    if (e.write) fill(e.write, e.type, i);
    for (const [row, id] of Object.entries(e.ids ?? {})) if (rows[row]) rows[row].id = id;
    if (e.cut) strike(e.cut, i);
  });
  return rows;
}

function showRows(r, chosen) {
  const rows = rowsAfter(r, chosen);
  const event = r.events[chosen];
  const inside = ([from, to], row) => from <= row && row < to;
  let filled = 0;
  rows.forEach((state, row) => {
    filled += state.kind !== "";
    const now = event && [event.write, event.cut, event.type === "counted" && event.unseen,
      event.keep && [0, event.keep]].some((range) => range && inside(range, row));
    const shown = [state.kind && `full ${state.kind}`, state.struck && "struck",
      state.again && !state.struck && "again", now && "now"].filter(Boolean).join(" ");
    const text = state.id === undefined ? "" : short(state.id);
    const tile = tiles[row];
    if (tile.shown === shown + text) return;
    tile.shown = shown + text;
    tile.node.className = `row ${shown}`;
    tile.node.dataset.by = state.by;
    if (tile.text) tile.text.textContent = text;
    tile.node.title = rowTitle(r, row, state);
    tile.node.setAttribute("aria-label", tile.node.title);
  });
  const layers = trace.layers ? ` × ${plural(trace.layers, "layer")}` : "";
  $("cache-title").replaceChildren("KV cache ",
    make("span", {}, `after ${event?.type === "layer" ? "the whole pass" : "this event"}: `
      + `${plural(filled, "row")}${layers}`));
  const first = tiles.find((tile) => tile.node.classList.contains("now"));
  if (first) reveal($("rows"), first.node, "Top", "Height");
}

function rowTitle(r, row, state) {
  const token = state.id === undefined ? "" : `, ${named(state.id)}`;
  const by = r.events[state.by];
  if (state.struck) return `row ${row}: taken back by ${by.name}${token}`;
  const times = state.again ? `; taken back ${plural(state.again, "time")} before` : "";
  if (state.kind === "kept") return `row ${row}: kept from before${token}`;
  if (state.kind === "held") return `row ${row}: there from before${token}`;
  if (state.kind === "unseen") return `row ${row}: written while nobody looked${times}`;
  if (state.kind) return `row ${row}: written by ${by.name}${token}${times}`;
  return `row ${row}: empty`;
}

// ---- the chosen event -----------------------------------------------------------------------------

function showEvent(r, chosen) {
  const e = r.events[chosen];
  $("event").className = e.type;
  $("event-title").textContent = e.name;
  $("say").textContent = e.say;
  const entries = [];
  if (e.token !== undefined) entries.push(["token", named(e.token)]);
  if (e.position !== undefined) entries.push(["position", String(e.position)]);
  if (e.type === "sample" && e.of !== undefined) {
    entries.push(["logits of", r.events[e.of].name + (e.slot ? `, its row ${e.slot}` : "")]);
  }
  if (e.args?.n_tokens !== undefined) entries.push(["n_tokens", String(e.args.n_tokens)]);
  if (e.seq) entries.push(["seq_len", e.seq[1] === null ? `${e.seq[0]} at entry`
    : `${e.seq[0]} at entry, ${e.seq[1]} at return`]);
  if (e.ret !== undefined && e.ret !== null) {
    entries.push(["returns", e.ret === 0 ? "0 (KESTREL_OK)" : `status ${e.ret}`]);
  }
  entries.push(["at", duration(Math.max(0, e.at)) + " after the request's first event"]);
  if (e.takes !== null) entries.push(["takes", `${duration(e.takes)} without pauses`]);
  if (e.paused) entries.push(["held", `${duration(e.paused)} by the debugger`]);
  if (e.thread !== undefined) entries.push(["thread", String(e.thread)]);
  pairs($("details"), entries);
  const most = Math.max(1, ...(e.layers ?? []));
  $("layers").replaceChildren(...(e.layers ?? []).map((n, layer) => make("div", {class: "level"},
    `layer ${layer}`, make("div", {style: {width: `${100 * n / most}%`}}), String(n))));
  showStack(e);
}

function showStack(e) {
  const stack = e.stack === undefined ? [] : trace.stacks[e.stack];
  $("stack-title").hidden = stack.length === 0;
  let level = 0;
  $("stack").replaceChildren(...stack.map((frame) => {
    if (frame.collapsed !== undefined) {
      level += frame.collapsed;
      const owners = frame.of.join(" and ") || "other code";
      return make("li", {}, make("span", {class: "fold"},
        `… ${plural(frame.collapsed, "frame")} of ${owners}`));
    }
    const where = frame.line ? `${frame.file}:${frame.line}` : frame.file;
    const line = [`#${level++} `, make("strong", {}, frame.func), " ",
      make("span", {class: "file"}, where)];
    const args = Object.entries(frame.args).map(([name, value]) => `${name}=${value}`);
    if (!args.length) return make("li", {}, ...line);
    const more = make("details", {}, make("summary", {title: "arguments"}, ...line),
      make("span", {class: "args"}, args.join(", ")));
    more.open = level === 1;
    return make("li", {}, more);
  }));
}

// Scrolls a box, and never the page, so far that a child is in its middle.
function reveal(box, child, edge, size) {
  const at = child[`offset${edge}`] - (edge === "Top" ? box.offsetTop : 0);
  const now = box[`scroll${edge}`];
  const room = box[`client${size}`];
  const margin = Math.min(90, room / 4);
  if (at < now + margin || at + child[`offset${size}`] > now + room - margin / 2) {
    box[`scroll${edge}`] = at - room / 3;
  }
}

function choose(index) {
  const r = state.request;
  bars[state.chosen]?.setAttribute("aria-selected", "false");
  spans.get(state.chosen)?.classList.remove("now");
  state.chosen = Math.max(0, Math.min(index, r.events.length - 1));
  bars.forEach((node, i) => node.classList.toggle("later", i > state.chosen));
  if (!bars.length) {
    showRows(r, -1);
    return;
  }
  bars[state.chosen].setAttribute("aria-selected", "true");
  $("lanes").setAttribute("aria-activedescendant", `e${state.chosen}`);
  reveal($("scroll"), bars[state.chosen], "Left", "Width");
  const span = spans.get(state.chosen);
  if (span) {
    span.classList.add("now");
    reveal($("answer"), span, "Top", "Height");
  }
  $("place").textContent = `event ${state.chosen + 1} of ${r.events.length}`;
  showRows(r, state.chosen);
  showEvent(r, state.chosen);
  remember();
}

// ---- walking --------------------------------------------------------------------------------------

function remember() {
  const hash = `#request=${state.index + 1}&event=${state.chosen + 1}&axis=${state.axis}`;
  try {
    history.replaceState(null, "", hash);
  } catch {
    // a page inside another one may not; it only loses its address
  }
}

function step(from, way, wanted = () => true) {
  const events = state.request.events;
  let i = from + way;
  while (i >= 0 && i < events.length && !wanted(events[i])) i += way;
  if (i >= 0 && i < events.length) choose(i);
}

const isPass = (e) => PASSES.includes(e.type);
const walk = {
  first: () => choose(0),
  last: () => choose(state.request.events.length - 1),
  back: () => step(state.chosen, -1),
  on: () => step(state.chosen, 1),
  play: () => state.timer ? pause() : play(),
};

function play() {
  const last = state.request.events.length - 1;
  if (state.chosen === last) choose(0);
  state.timer = setInterval(() => {
    walk.on();
    if (state.chosen === last) pause();
  }, 600);
  playing("❚❚", "Pause");
}

function pause() {
  clearInterval(state.timer);
  state.timer = 0;
  playing("▶", "Play");
}

function playing(sign, name) {
  const button = document.querySelector("[data-go=play]");
  button.textContent = sign;
  button.setAttribute("aria-label", name);
}

function setAxis(axis) {
  state.axis = axis;
  layOut();
  choose(state.chosen);
}

function onKey(key) {
  if (key.ctrlKey || key.metaKey || key.altKey || key.target.closest("select, input")) return;
  const onButton = key.target.closest("button") !== null;
  const inLanes = $("lanes").contains(key.target);
  const keys = {
    ArrowLeft: walk.back, ArrowRight: walk.on, Home: walk.first, End: walk.last,
    ArrowUp: inLanes ? () => step(state.chosen, -1, isPass) : null,
    ArrowDown: inLanes ? () => step(state.chosen, 1, isPass) : null,
    " ": onButton ? null : walk.play,
    t: () => setAxis(state.axis === "time" ? "order" : "time"),
    n: () => state.index + 1 < trace.requests.length && open(state.index + 1),
    p: () => state.index > 0 && open(state.index - 1),
  };
  const act = keys[key.key.length === 1 ? key.key.toLowerCase() : key.key];
  if (!act || !state.request) return;
  key.preventDefault();
  if (key.key !== " ") pause();
  act();
}

function listen() {
  $("lanes").addEventListener("click", (click) => {
    const bar = click.target.closest(".bar");
    if (bar) choose(Number(bar.id.slice(1)));
  });
  $("rows").addEventListener("click", (click) => {
    const by = Number(click.target.closest(".row")?.dataset.by ?? -1);
    if (by >= 0) choose(by);
  });
  $("answer").addEventListener("click", (click) => {
    if (click.target.dataset.event !== undefined) choose(Number(click.target.dataset.event));
  });
  $("axis").addEventListener("click", (click) => {
    if (click.target.dataset.axis) setAxis(click.target.dataset.axis);
  });
  $("controls").addEventListener("click", (click) => {
    const go = click.target.closest("button")?.dataset.go;
    if (go && go !== "play") pause();
    if (go) walk[go]();
  });
  document.addEventListener("keydown", onKey);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;  // a phone's bars come and go
    width = innerWidth;
    layOut();
    choose(state.chosen);
  });
}

head();
if (trace.requests.length) {
  const asked = new URLSearchParams(location.hash.slice(1));
  const given = (name) => Number.parseInt(asked.get(name), 10);
  if (asked.get("axis") === "time") state.axis = "time";
  listen();
  open(Math.max(0, Math.min(given("request") || 1, trace.requests.length) - 1),
    given("event") ? given("event") - 1 : undefined);
} else {
  document.querySelector("main").hidden = true;
}
})();
