// Moving, the pointer, search and keys; and the start.

function show(from, to) {
  const least = (last - first) * 2e-6, whole = last - first;
  const span = Math.min(whole, Math.max(least, to - from));
  from = Math.min(Math.max(first, (from + to) / 2 - span / 2), last - span);
  Object.assign(view, { from, to: from + span });
  redraw();
}

function zoom(factor, centre = (view.from + view.to) / 2) {
  show(centre - (centre - view.from) * factor, centre + (view.to - centre) * factor);
}

const move = (share) => { const by = (view.to - view.from) * share; show(view.from + by, view.to + by); };

/** Pin an operation and bring it into view, at the present zoom where it can be seen there. */
function go(k) {
  pin(focusOn(k));
  const length = Math.max(ops.end[k] - ops.start[k], 1e-12), span = view.to - view.from;
  if (ops.start[k] < view.from || ops.end[k] > view.to || (length / span) * inner() < 4) {
    const wide = (length / span) * inner() < 4 ? length * 60 : span;
    show(ops.start[k] + length / 2 - wide / 2, ops.start[k] + length / 2 + wide / 2);
  }
}

function zoomTo(k) {
  const length = Math.max(ops.end[k] - ops.start[k], 1e-9);
  show(ops.start[k] - 4 * length, ops.end[k] + 4 * length);
}

function neighbour(way) {
  const k = state.current;
  if (k < 0) { move(way * 0.2); return; }
  const next = lanes[ops.stream[k]][places[k] + way];
  if (next !== undefined) go(next);
}

function otherLane(way) {
  const k = state.current;
  const stream = k < 0 ? (way > 0 ? 0 : streams.length - 1) : ops.stream[k] + way;
  if (stream < 0 || stream >= streams.length) return;
  const order = timed[0][stream];
  if (!order.length) return;
  const moment = k < 0 ? (view.from + view.to) / 2 : (ops.start[k] + ops.end[k]) / 2;
  go(order[Math.min(order.length - 1, firstAfter(order, ops.end, moment))]);
}

function at(event) {
  const box = stage.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

/** The operation under the pointer, with two pixels of mercy; over memory the one that holds it. */
function hit(px, py) {
  if (px < LEFT || px > width - RIGHT) return -1;
  const moment = time(px), mercy = time(px + 2) - moment;
  if (py >= memoryTop) {
    const order = memory.map((point) => point.k);
    return order.find((k) => ops.start[k] <= moment && moment < ops.end[k]) ?? -1;
  }
  const stream = Math.floor((py - lanesTop) / (LANE + GAP));
  if (stream < 0 || stream >= streams.length) return -1;
  const inside = py - laneTop(stream);
  if (inside < 0 || inside >= LANE) return -1;
  const row = Math.min(rows.length - 1, Math.floor(inside / ROW));
  const order = timed[row][stream], { from, to } = rows[row];
  const i = firstAfter(order, to, moment), gap = (k) => Math.max(from[k] - moment, moment - to[k], 0);
  const nearest = [i, i - 1].filter((n) => n >= 0 && n < order.length).map((n) => order[n]).sort((a, b) => gap(a) - gap(b))[0];
  return nearest !== undefined && gap(nearest) <= mercy ? nearest : -1;
}

let drag = null;
stage.addEventListener("pointerdown", (event) => {
  const [px, py] = at(event);
  drag = { px, from: view.from, to: view.to, moved: false, strip: py < STRIP + 4 };
  stage.setPointerCapture(event.pointerId);
  if (drag.strip) travel(px);
});
stage.addEventListener("pointermove", (event) => {
  const [px, py] = at(event);
  if (!drag) { const k = hit(px, py); point(k < 0 ? null : focusOn(k)); return; }
  if (Math.abs(px - drag.px) > 3) { drag.moved = true; stage.classList.add("dragging"); }
  if (drag.strip) travel(px);
  else if (drag.moved) {
    const by = ((drag.px - px) / inner()) * (drag.to - drag.from);
    show(drag.from + by, drag.to + by);
  }
});
stage.addEventListener("pointerup", (event) => {
  const [px, py] = at(event);
  const click = drag && !drag.moved && !drag.strip;
  drag = null;
  stage.classList.remove("dragging");
  if (!click) return;
  const k = hit(px, py);
  pin(k < 0 || state.current === k ? null : focusOn(k));
});
stage.addEventListener("pointerleave", () => point(null));
stage.addEventListener("dblclick", (event) => { const k = hit(...at(event)); if (k >= 0) { pin(focusOn(k)); zoomTo(k); } });
stage.addEventListener("wheel", (event) => {
  event.preventDefault();
  const [px] = at(event);
  const unit = event.deltaMode === 1 ? 20 : 1;
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(((event.deltaX || event.deltaY) * unit) / inner());
  else zoom(Math.exp(Math.max(-60, Math.min(60, event.deltaY * unit)) * 0.004), time(Math.max(LEFT, px)));
}, { passive: false });

function travel(px) {
  const centre = first + ((px - LEFT) / inner()) * (last - first), span = view.to - view.from;
  show(centre - span / 2, centre + span / 2);
}

const search = byId("search");
const words = ops.kind.map((_, k) => {
  const names = [ops.block[k] >= 0 ? blocks[ops.block[k]].name : "", ops.group[k] >= 0 ? groups[ops.group[k]].name : ""];
  return `${kinds[ops.kind[k]]} ${streams[ops.stream[k]].name} ${names.join(" ")} micro-batch ${ops.micro[k]} `.toLowerCase();
});

/** All words must occur; a word that ends in a digit ends there, so that layers.7 is not layers.77. */
function find(text) {
  const wanted = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return null;
  const tests = wanted.map((word) => {
    const plain = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    return /\d$/.test(word) ? new RegExp(`${plain}(?!\\d)`) : new RegExp(plain);
  });
  return new Set(all((k) => tests.every((test) => test.test(words[k]))));
}

search.addEventListener("input", () => {
  state.hits = find(search.value);
  byId("found").textContent = state.hits ? `${state.hits.size} found` : "";
  redraw();
});
search.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && state.hits?.size) {
    const order = [...state.hits].sort((a, b) => ops.start[a] - ops.start[b]);
    const index = order.indexOf(state.current) + (event.shiftKey ? -1 : 1);
    const k = order[(index + order.length) % order.length];
    go(k);
    byId("found").textContent = `${order.indexOf(k) + 1} of ${order.length}`;
  }
  if (event.key === "Escape") { clearAll(); search.blur(); }
  event.stopPropagation();
});

function clearAll() {
  search.value = "";
  byId("found").textContent = "";
  state.hits = null;
  setKind(null);
  pin(null);
  redraw();
}

const KEYS = {
  ArrowLeft: () => neighbour(-1), ArrowRight: () => neighbour(1),
  ArrowUp: () => otherLane(-1), ArrowDown: () => otherLane(1),
  "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), w: () => zoom(0.6), s: () => zoom(1 / 0.6),
  0: () => show(first, last), a: () => move(-0.2), d: () => move(0.2),
  f: () => state.current >= 0 && zoomTo(state.current),
  c: () => {
    const found = state.current >= 0 ? cause(state.current) : -1;
    if (found !== -1) go(found < 0 ? ~found : found);
  },
  "/": () => search.focus(), Escape: clearAll, "?": () => byId("help").showModal(),
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || byId("help").open) return;
  const inPane = event.target.closest?.("#lines, #plan, [role=tabpanel]") && event.key.startsWith("Arrow");
  if (!KEYS[event.key] || inPane) return;
  event.preventDefault();
  KEYS[event.key]();
});
document.querySelectorAll("[data-do]").forEach((button) =>
  button.addEventListener("click", () => ({ in: KEYS["+"], out: KEYS["-"], all: KEYS[0] })[button.dataset.do]()));
document.querySelectorAll("[data-tab]").forEach((tab) => tab.addEventListener("click", () => { openTab(tab.dataset.tab); showDetail(); }));
byId("help-open").addEventListener("click", KEYS["?"]);

function setKind(kind) {
  state.kind = kind;
  document.querySelectorAll("#legend button").forEach((b) => b.setAttribute("aria-pressed", String(Number(b.dataset.kind) === kind && kind !== null)));
  redraw();
}

function buildHead() {
  document.title = `${data.title} – megacompile`;
  byId("title").textContent = data.title;
  const part = (name, text) => make("div", { className: name, textContent: text });
  for (const [name, value, note] of data.facts)
    byId("facts").append(make("div", { className: "fact" }, part("name", name), part("value", value), part("note", note)));
  const busy = make("div", { className: "fact streams" });
  for (const stream of streams) {
    const meter = make("i");
    meter.style.width = `${Math.min(100, stream.share * 100)}%`;
    busy.append(part("name", stream.name), make("div", { className: "meter" }, meter), part("note", `${Math.round(stream.share * 100)} % busy`));
  }
  byId("facts").append(busy);
  kinds.forEach((kind, index) => {
    if (!all((k) => ops.kind[k] === index && rows.some((row) => row.to[k] > row.from[k])).length) return;
    const button = make("button", {}, make("span", { className: "swatch" }), kind);
    button.dataset.kind = index;
    button.setAttribute("aria-pressed", "false");
    button.addEventListener("click", () => setKind(state.kind === index ? null : index));
    byId("legend").append(button);
  });
}

function paint() {
  readColours();
  document.querySelectorAll("#legend button").forEach((b) => (b.firstChild.style.background = colours.kinds[b.dataset.kind]));
  strip = null;
  redraw();
}

buildHead();
buildCode();
buildPlan();
buildEstimates();
showDetail();
paint();
new ResizeObserver(resize).observe(stage);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { paint(); showDetail(); });
window.page = { data, view, state, stats, x, time, laneTop, ROW, memoryTop, show, go, find, cause, late };
