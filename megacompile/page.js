"use strict";
// Draws one schedule. Data are columns: the n-th entry of each belongs to the n-th operation.
// One canvas holds what changes with the view, the other what changes with the pointer.

const data = JSON.parse(document.getElementById("data").textContent);
const { ops, streams, kinds, blocks, groups, measured } = data;
const count = ops.kind.length;
const byId = (id) => document.getElementById(id);

function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// ---- words ---------------------------------------------------------------------------------------

function seconds(value) {
  const size = Math.abs(value);
  if (size >= 1) return `${value.toFixed(size >= 100 ? 1 : 3)} s`;
  if (size >= 1e-3) return `${(value * 1e3).toFixed(size >= 0.1 ? 1 : 3)} ms`;
  return `${(value * 1e6).toFixed(1)} µs`;
}

function scaled(value, unit) {
  const step = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]].find(([size]) => Math.abs(value) >= size);
  const [size, prefix] = step ?? [1, ""];
  return `${Number((value / size).toPrecision(3))} ${prefix}${unit}`;
}

const bytes = (value) => scaled(value, "B");
const short = (name) => name.replace(/^(model|transformer|module)\./, "");
const subject = (k) =>
  ops.group[k] >= 0 ? short(groups[ops.group[k]].name) : ops.block[k] >= 0 ? short(blocks[ops.block[k]].name) : "";
const micro = (k) => (data.microBatches > 1 && ops.block[k] >= 0 ? ` · micro-batch ${ops.micro[k]}` : "");
const title = (k) => `${kinds[ops.kind[k]]} ${subject(k)}`.trim();

// ---- who belongs to whom -------------------------------------------------------------------------

const groupOfName = new Map(groups.map((group, index) => [group.name, index]));
const lanes = streams.map(() => []);
const byLine = new Map();
const successors = ops.kind.map(() => []);
for (let k = 0; k < count; k++) {
  lanes[ops.stream[k]].push(k);
  if (!byLine.has(ops.line[k])) byLine.set(ops.line[k], []);
  byLine.get(ops.line[k]).push(k);
  for (const wait of ops.waits[k]) if (wait >= 0) successors[wait].push(k);
}
const places = new Int32Array(count); // of each operation in its stream
for (const lane of lanes) lane.forEach((k, index) => (places[k] = index));
const before = (k) => (places[k] > 0 ? lanes[ops.stream[k]][places[k] - 1] : -1);

/** What an operation starts right after: of all that it waits for, what ends last. */
function cause(k) {
  let found = before(k);
  for (const wait of ops.waits[k])
    if (wait >= 0 && (found < 0 || ops.end[wait] >= ops.end[found])) found = wait;
  return found;
}

/** Operations that share the block, or the weights of the block. */
function relatives(k) {
  const block = ops.block[k];
  const group = block >= 0 ? (groupOfName.get(blocks[block].name) ?? -1) : ops.group[k];
  const name = group >= 0 ? groups[group].name : "";
  return all((j) => (block >= 0 && ops.block[j] === block) || (group >= 0 && ops.group[j] === group)
    || (name && ops.block[j] >= 0 && blocks[ops.block[j]].name === name));
}

function all(test) {
  const found = [];
  for (let k = 0; k < count; k++) if (test(k)) found.push(k);
  return found;
}

// ---- state ---------------------------------------------------------------------------------------

const rows = [{ from: ops.start, to: ops.end, tone: measured ? "predicted" : "" }];
if (measured) rows.push({ from: measured.start, to: measured.end, tone: "measured" });
const timed = rows.map((row) =>
  lanes.map((lane) => lane.filter((k) => row.from[k] !== null && row.to[k] > row.from[k]).sort((a, b) => row.from[a] - row.from[b])));
let first = 0, last = data.stepSeconds;
for (const row of rows) {
  for (let k = 0; k < count; k++) if (row.from[k] !== null) {
    first = Math.min(first, row.from[k]);
    last = Math.max(last, row.to[k]);
  }
}
const view = { from: first, to: last };
const state = { hover: null, pin: null, hits: null, kind: null, current: -1 };
const stats = { base: 0, over: 0, rectangles: 0, milliseconds: [] };

// ---- geometry ------------------------------------------------------------------------------------

const stage = byId("stage");
const base = byId("base").getContext("2d");
const over = byId("over").getContext("2d");
const LEFT = 112, RIGHT = 16, STRIP = 24, AXIS = 42, GAP = 5;
const tall = Math.max(0, Math.min(1, (window.innerHeight - 720) / 400)); // 0 on a small screen, 1 on a large one
const ROW = Math.round((measured ? 17 : 25) + 7 * tall), LANE = ROW * rows.length, MEMORY = Math.round(112 + 90 * tall);
const lanesTop = AXIS + 8;
const laneTop = (stream) => lanesTop + stream * (LANE + GAP);
const memoryTop = laneTop(streams.length) + 18;
const HEIGHT = memoryTop + MEMORY + 10;
let width = 0, pixels = 1, colours = {}, strip = null;
stage.style.height = `${HEIGHT}px`;

const inner = () => Math.max(1, width - LEFT - RIGHT);
const x = (time) => LEFT + ((time - view.from) / (view.to - view.from)) * inner();
const time = (px) => view.from + ((px - LEFT) / inner()) * (view.to - view.from);

function resize() {
  width = stage.clientWidth;
  pixels = window.devicePixelRatio || 1;
  for (const context of [base, over]) {
    context.canvas.width = Math.round(width * pixels);
    context.canvas.height = Math.round(HEIGHT * pixels);
    context.setTransform(pixels, 0, 0, pixels, 0, 0);
  }
  strip = null;
  draw();
}

function readColours() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(`--${name}`).trim();
  const names = ["card", "ink", "soft", "faint", "rule", "lane", "accent", "alarm", "slots", "kept", "own"];
  colours = Object.fromEntries(names.map((name) => [name, value(name)]));
  colours.kinds = kinds.map((kind) => value(kind) || value("other"));
}

// ---- drawing -------------------------------------------------------------------------------------

/** The first of ``order`` whose operation ends after ``moment``; ends rise along a stream. */
function firstAfter(order, ends, moment) {
  let low = 0, high = order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (ends[order[middle]] > moment) high = middle; else low = middle + 1;
  }
  return low;
}

/** Draw operations of one stream; what is narrower than a pixel shares it, paler where little runs.
    What was ``found`` is drawn two pixels wide and in full. */
function drawOrder(context, order, row, top, height, labels, found = false) {
  const { from, to } = rows[row];
  const scale = inner() / (view.to - view.from);
  const stop = width - RIGHT;
  let column = -1, covered = 0, colour = "", drawn = 0;
  const flush = () => {
    if (column < 0) return;
    context.globalAlpha = found ? 1 : Math.min(1, Math.max(0.3, covered));
    context.fillStyle = colour;
    context.fillRect(column, top, found ? 2 : 1, height);
    drawn++;
    column = -1;
  };
  for (let i = firstAfter(order, to, view.from); i < order.length; i++) {
    const k = order[i];
    if (from[k] >= view.to) break;
    const a = LEFT + (from[k] - view.from) * scale, b = LEFT + (to[k] - view.from) * scale;
    if (b - a < 1) {
      const pixel = Math.max(LEFT, Math.floor(a));
      if (pixel !== column) { flush(); column = pixel; covered = 0; colour = colours.kinds[ops.kind[k]]; }
      covered += b - a;
      continue;
    }
    flush();
    const left = Math.max(LEFT, a), right = Math.min(stop, b);
    context.globalAlpha = 1;
    context.fillStyle = colours.kinds[ops.kind[k]];
    context.fillRect(left, top, Math.max(1, right - left - (b - a > 4 ? 0.75 : 0)), height);
    drawn++;
    if (labels && right - left > 34) label(context, k, left, right, top, height);
  }
  flush();
  context.globalAlpha = 1;
  stats.rectangles += drawn;
}

function label(context, k, left, right, top, height) {
  const room = Math.floor((right - left - 8) / 6.1);
  const name = subject(k) || kinds[ops.kind[k]];
  const text = name.length <= room ? name : name.match(/\d+$/)?.[0] ?? "";
  if (!text || text.length > room) return;
  context.fillStyle = "#fff";
  context.fillText(text, left + 5, top + height / 2 + 0.5);
}

const dimmed = () => state.kind !== null || state.hits !== null;
const shines = (k) => (state.kind === null || ops.kind[k] === state.kind) && (state.hits === null || state.hits.has(k));

function draw() {
  if (!width) return;
  const start = performance.now();
  stats.base++;
  stats.rectangles = 0;
  base.clearRect(0, 0, width, HEIGHT);
  base.textBaseline = "middle";
  drawStrip();
  drawAxis();
  streams.forEach((stream, index) => drawLane(stream, index));
  drawMemory();
  drawOver();
  stats.milliseconds.push(performance.now() - start);
}

function drawLane(stream, index) {
  const top = laneTop(index);
  base.fillStyle = colours.lane;
  base.fillRect(LEFT, top, inner(), LANE);
  base.fillStyle = colours.ink;
  base.font = "12px system-ui, sans-serif";
  base.textAlign = "right";
  base.fillText(stream.name, LEFT - 10, top + (measured ? ROW / 2 + 3 : LANE / 2));
  if (measured) {
    base.fillStyle = colours.faint;
    base.font = "10.5px system-ui, sans-serif";
    base.fillText("as measured", LEFT - 10, top + ROW * 1.5);
  }
  base.textAlign = "left";
  base.font = "11px system-ui, sans-serif";
  rows.forEach((_, row) => {
    const order = timed[row][index];
    const at = [top + row * ROW + 1, ROW - 2];
    if (measured && row === 0) base.filter = "saturate(.55)";
    if (!dimmed()) drawOrder(base, order, row, ...at, true);
    else {
      base.globalAlpha = 1;
      base.save();
      drawOrder(base, order, row, ...at, false);
      base.globalAlpha = 0.8;
      base.fillStyle = colours.lane;
      base.fillRect(LEFT, at[0] - 1, inner(), at[1] + 2);
      base.restore();
      drawOrder(base, order.filter(shines), row, ...at, true, true);
    }
    base.filter = "none";
  });
}

function drawAxis() {
  const span = view.to - view.from;
  const wanted = span / Math.max(2, inner() / 110);
  const power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= wanted);
  const far = Math.max(Math.abs(view.from), Math.abs(view.to));
  const [unit, name] = far >= 1 ? [1, "s"] : far >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  const digits = Math.max(0, -Math.floor(Math.log10(step * unit) + 1e-9));
  base.font = "11px system-ui, sans-serif";
  base.textAlign = "center";
  for (let i = Math.ceil(view.from / step); i * step <= view.to; i++) {
    const at = x(i * step);
    base.fillStyle = colours.rule;
    base.fillRect(at, AXIS, 1, HEIGHT - AXIS - 8);
    base.fillStyle = colours.soft;
    base.fillText(`${(i * step * unit).toFixed(digits)} ${name}`, Math.min(at, width - 30), AXIS - 7);
  }
}

function markStep(moment, text) {
  if (moment < view.from || moment > view.to) return;
  const at = x(moment);
  base.fillStyle = colours.accent;
  base.fillRect(at, AXIS, 1.5, HEIGHT - AXIS - 8);
  base.textAlign = at > width - 90 ? "right" : "left";
  base.fillText(text, at + (at > width - 90 ? -5 : 5), memoryTop + MEMORY - 8);
}

const memory = data.memory.map(([k, total]) => ({ k, total, kept: ops.kept[k] })).sort((a, b) => ops.start[a.k] - ops.start[b.k]);
const ceiling = data.budget <= 2.2 * data.peak ? Math.max(data.budget, data.peak) * 1.14 : data.peak * 1.35;
const memoryY = (value) => memoryTop + MEMORY - (value / ceiling) * MEMORY;

function drawMemory() {
  const columns = Math.ceil(inner());
  const total = new Float64Array(columns), kept = new Float64Array(columns);
  const fill = (from, to, high, low) => {
    if (to < view.from || from > view.to) return;
    const a = Math.max(0, Math.floor(x(from) - LEFT)), b = Math.min(columns - 1, Math.floor(x(to) - LEFT));
    for (let c = a; c <= b; c++) {
      if (high > total[c]) total[c] = high;
      if (low > kept[c]) kept[c] = low;
    }
  };
  memory.forEach((point, i) => {
    const next = memory[i + 1];
    fill(ops.start[point.k], ops.end[point.k], point.total, point.kept);
    if (next && ops.start[next.k] > ops.end[point.k]) fill(ops.end[point.k], ops.start[next.k], next.kept, next.kept);
  });
  const stop = Math.max(...memory.map((point) => ops.end[point.k]), 0);
  const end = Math.min(columns, Math.ceil(x(stop) - LEFT));
  const fixed = new Float64Array(columns).fill(data.fixed, Math.max(0, Math.floor(x(0) - LEFT)), Math.max(0, end));
  memoryScale();
  for (const [heights, colour] of [[total, colours.own], [kept, colours.kept], [fixed, colours.slots]]) {
    base.fillStyle = colour;
    base.beginPath();
    base.moveTo(LEFT, memoryY(0));
    for (let c = 0; c < columns; c++) {
      base.lineTo(LEFT + c, memoryY(heights[c]));
      base.lineTo(LEFT + c + 1, memoryY(heights[c]));
    }
    base.lineTo(LEFT + columns, memoryY(0));
    base.fill();
  }
  drawBudget();
  markPeak();
  markStep(data.stepSeconds, measured ? "predicted" : "next step");
  if (measured) markStep(measured.stepSeconds, "measured");
}

function markPeak() {
  const high = memory.reduce((best, point) => (point.total > best.total ? point : best), memory[0]);
  if (!high) return;
  const at = x((ops.start[high.k] + ops.end[high.k]) / 2), top = memoryY(high.total);
  if (at < LEFT || at > width - RIGHT) return;
  const near = Math.abs(top - memoryY(data.budget)) < 20; // the budget's line would cross the words
  base.fillStyle = colours.ink;
  base.beginPath(); base.arc(at, top, 3, 0, 7); base.fill();
  base.font = "600 11px system-ui, sans-serif";
  base.textAlign = at > width - 140 ? "right" : "left";
  base.fillText(`peak ${bytes(high.total)}`, at + (at > width - 140 ? -8 : 8), near ? top + 14 : Math.max(memoryTop + 6, top - 8));
}

function memoryScale() {
  const wanted = ceiling / 4, power = 10 ** Math.floor(Math.log10(wanted));
  const step = [1, 2, 5, 10].map((f) => f * power).find((s) => s >= wanted) ?? wanted;
  base.font = "11px system-ui, sans-serif";
  base.textAlign = "right";
  for (let value = 0; value < ceiling; value += step) {
    base.fillStyle = colours.rule;
    base.fillRect(LEFT, memoryY(value), inner(), 1);
    base.fillStyle = colours.soft;
    if (value) base.fillText(bytes(value), LEFT - 10, memoryY(value));
  }
  base.fillStyle = colours.ink;
  base.font = "12px system-ui, sans-serif";
  base.fillText("device memory", LEFT - 10, memoryTop + MEMORY - 7);
  const legend = [["weight slots", colours.slots], ["kept between", colours.kept], ["of the block that runs", colours.own]];
  base.textAlign = "left";
  base.font = "11px system-ui, sans-serif";
  let at = LEFT + 2;
  for (const [text, colour] of legend) {
    base.fillStyle = colour;
    base.fillRect(at, memoryTop - 13, 9, 9);
    base.fillStyle = colours.soft;
    base.fillText(text, at + 14, memoryTop - 8);
    at += base.measureText(text).width + 30;
  }
}

function drawBudget() {
  const inside = data.budget <= ceiling;
  const at = inside ? memoryY(data.budget) : memoryTop + 2;
  base.fillStyle = base.strokeStyle = colours.alarm;
  base.lineWidth = 1.5;
  if (inside) {
    base.setLineDash([6, 4]);
    base.beginPath(); base.moveTo(LEFT, at); base.lineTo(width - RIGHT, at); base.stroke();
    base.setLineDash([]);
  }
  base.font = "600 11px system-ui, sans-serif";
  base.textAlign = "right";
  base.fillText(`budget ${bytes(data.budget)}${inside ? "" : ", above this picture ↑"}`, width - RIGHT - 4, at + (inside ? -8 : 6));
}

/** The whole step in small, with the part that is shown; drawn once per size and theme. */
function drawStrip() {
  if (strip === null) {
    strip = document.createElement("canvas");
    strip.width = Math.max(1, Math.round(inner() * pixels));
    strip.height = STRIP * pixels;
    const context = strip.getContext("2d");
    context.scale(pixels, pixels);
    const saved = { ...view };
    Object.assign(view, { from: first, to: last });
    const row = rows.length - 1, height = (STRIP - 2) / streams.length;
    context.translate(-LEFT, 0);
    streams.forEach((_, index) => drawOrder(context, timed[row][index], row, 1 + index * height, Math.max(1, height - 0.5), false));
    Object.assign(view, saved);
    stats.rectangles = 0;
  }
  base.fillStyle = colours.lane;
  base.fillRect(LEFT, 2, inner(), STRIP);
  base.drawImage(strip, LEFT, 2, inner(), STRIP);
  const a = LEFT + ((view.from - first) / (last - first)) * inner();
  const b = LEFT + ((view.to - first) / (last - first)) * inner();
  base.fillStyle = colours.card;
  base.globalAlpha = 0.72;
  base.fillRect(LEFT, 2, a - LEFT, STRIP);
  base.fillRect(b, 2, LEFT + inner() - b, STRIP);
  base.globalAlpha = 1;
  base.strokeStyle = colours.accent;
  base.lineWidth = 1.5;
  base.strokeRect(a, 2.5, Math.max(3, b - a), STRIP - 1);
}

// ---- what is pointed at --------------------------------------------------------------------------

const shown = () => state.hover ?? state.pin;

function drawOver() {
  stats.over++;
  over.clearRect(0, 0, width, HEIGHT);
  const focus = shown();
  if (!focus) return;
  over.globalAlpha = state.pin ? 0.66 : 0.5;
  over.fillStyle = colours.card;
  over.fillRect(LEFT, lanesTop - 2, inner(), memoryTop - lanesTop - 14);
  over.globalAlpha = 1;
  over.font = "11px system-ui, sans-serif";
  over.textBaseline = "middle";
  const bright = new Set(focus.near.length < count ? [...focus.near, ...focus.here] : focus.here);
  rows.forEach((_, row) => streams.forEach((_, index) => {
    const top = laneTop(index) + row * ROW + 1;
    drawOrder(over, timed[row][index].filter((k) => bright.has(k)), row, top, ROW - 2, true, focus.here.length === 1);
  }));
  if (focus.here.length <= 400) for (const k of focus.here) outline(k);
  if (focus.here.length === 1) { drawCauses(focus.here[0]); drawMoment(focus.here[0]); }
}

function outline(k) {
  rows.forEach((row, index) => {
    if (row.from[k] === null) return;
    const a = Math.max(LEFT - 2, x(row.from[k])), b = Math.min(width - RIGHT + 2, x(row.to[k]));
    if (b < LEFT || a > width - RIGHT) return;
    over.strokeStyle = colours.ink;
    over.lineWidth = 1.5;
    over.strokeRect(a - 0.5, laneTop(ops.stream[k]) + index * ROW + 0.5, Math.max(2, b - a), ROW - 1);
  });
}

function drawCauses(k) {
  const middle = (j) => laneTop(ops.stream[j]) + ROW / 2;
  const found = cause(k);
  for (const wait of [...new Set([...ops.waits[k].filter((w) => w >= 0), found])]) {
    if (wait < 0 || ops.stream[wait] === ops.stream[k]) continue;
    const [ax, ay, bx, by] = [x(ops.end[wait]), middle(wait), x(ops.start[k]), middle(k)];
    if (Math.max(ax, bx) < LEFT || Math.min(ax, bx) > width) continue;
    over.save();
    over.beginPath(); over.rect(LEFT, 0, inner(), HEIGHT); over.clip();
    over.strokeStyle = over.fillStyle = wait === found ? colours.accent : colours.soft;
    over.lineWidth = wait === found ? 2 : 1;
    over.beginPath();
    over.moveTo(ax, ay);
    over.bezierCurveTo(ax + 14, ay, bx - 14, by, bx, by);
    over.stroke();
    over.beginPath(); over.arc(bx, by, 2.5, 0, 7); over.fill();
    over.restore();
  }
}

/** A line through memory where the operation runs. */
function drawMoment(k) {
  const a = Math.max(LEFT, x(ops.start[k])), b = Math.min(width - RIGHT, x(ops.end[k]));
  if (b < LEFT || a > width - RIGHT) return;
  over.fillStyle = colours.accent;
  over.globalAlpha = 0.28;
  over.fillRect(a, memoryTop, Math.max(1.5, b - a), MEMORY);
  over.globalAlpha = 1;
}

const focusOn = (k) => ({ here: [k], near: relatives(k), line: ops.line[k] });
const focusOnLine = (line) => ({ here: byLine.get(line), near: [], line });
function focusOnRow(row) {
  const [, , members, loose] = data.plan.rows[row];
  const blockSet = new Set(members), groupSet = new Set(loose);
  for (const b of members) if (groupOfName.has(blocks[b].name)) groupSet.add(groupOfName.get(blocks[b].name));
  return { here: all((k) => blockSet.has(ops.block[k]) || groupSet.has(ops.group[k])), near: [], line: 0, row };
}

let asked = 0;
function point(focus) {
  if (focus === null && state.hover === null) return;
  state.hover = focus;
  later();
}

function pin(focus, scroll = true) {
  state.pin = focus;
  state.hover = null;
  state.current = focus && focus.here.length === 1 ? focus.here[0] : -1;
  if (state.current >= 0) openTab("detail");
  later(scroll);
}

/** Show what is pointed at, at the next frame, once. */
function later(scroll = true) {
  if (asked) return;
  asked = requestAnimationFrame(() => {
    asked = 0;
    drawOver();
    showLines(scroll);
    showDetail();
    document.querySelectorAll("tr[data-row]").forEach((tr) => tr.classList.toggle("pinned", state.pin?.row === Number(tr.dataset.row)));
  });
}

let drawing = 0;
function redraw() {
  if (!drawing) drawing = requestAnimationFrame(() => { drawing = 0; draw(); });
}

// ---- code ----------------------------------------------------------------------------------------

const lineElements = [];
const TOKENS = /("""|"[^"]*"|#.*$)|\b(def|for|in|pass|return|import)\b|\b(\d+)\b|\b(rt\.\w+|range|step)\b/g;

function buildCode() {
  const pane = byId("lines");
  let prose = false;
  data.source.forEach((text, index) => {
    const line = make("span", { className: "line" });
    const fences = text.split('"""').length - 1;
    if (prose || fences) line.append(make("span", { className: fences && !prose ? "s" : "c", textContent: text }));
    else appendTokens(line, text);
    if (fences % 2) prose = !prose;
    if (!text) line.append(" ");
    if (byLine.has(index + 1)) line.classList.add("runs");
    line.dataset.line = index + 1;
    lineElements.push(line);
  });
  pane.append(...lineElements);
  const lineAt = (event) => Number(event.target.closest(".line.runs")?.dataset.line ?? 0);
  pane.addEventListener("pointerover", (event) => point(lineAt(event) ? focusOnLine(lineAt(event)) : null));
  pane.addEventListener("pointerleave", () => point(null));
  pane.addEventListener("click", (event) => {
    const line = lineAt(event);
    if (line) pin(state.pin?.line === line && state.current < 0 ? null : focusOnLine(line));
  });
}

function appendTokens(line, text) {
  let done = 0;
  for (const match of text.matchAll(TOKENS)) {
    const [word, string, keyword, number] = match;
    const name = string ? (string.startsWith("#") ? "c" : "s") : keyword ? "w" : number ? "d" : "f";
    line.append(text.slice(done, match.index), make("span", { className: name, textContent: word }));
    done = match.index + word.length;
  }
  line.append(text.slice(done));
}

let marked = [];
function showLines(scroll) {
  for (const line of marked) line.classList.remove("here", "near");
  const focus = shown();
  const turn = focus?.here.length === 1 ? ops.turn[focus.here[0]] : null;
  byId("place").textContent = !focus?.line ? "" : `line ${focus.line}${turn === null ? "" : `, i = ${turn}`}, ${byLine.get(focus.line).length} × per step`;
  if (!focus) { marked = []; return; }
  const near = new Set(focus.near.map((k) => ops.line[k]));
  if (focus.row !== undefined) for (const k of focus.here) near.add(ops.line[k]);
  marked = [...near].map((n) => lineElements[n - 1]);
  for (const line of marked) line.classList.add("near");
  if (!focus.line) return;
  const here = lineElements[focus.line - 1];
  here.classList.add("here");
  marked.push(here);
  const pane = byId("lines");
  const [top, bottom] = [here.offsetTop - pane.offsetTop, here.offsetTop - pane.offsetTop + here.offsetHeight];
  const overCode = pane.matches(":hover");
  if (scroll && !overCode && (top < pane.scrollTop || bottom > pane.scrollTop + pane.clientHeight))
    pane.scrollTop = top - pane.clientHeight / 2;
}

// ---- details -------------------------------------------------------------------------------------

function showDetail() {
  const focus = shown(), panel = byId("detail");
  if (panel.hidden) return;
  if (!focus) {
    panel.replaceChildren(make("p", { className: "hint", textContent:
      "Point at an operation, a line of the program or a row of the plan: what belongs together lights up in all of them. A click pins it." }));
    return;
  }
  if (focus.here.length !== 1) { panel.replaceChildren(...manyDetail(focus)); return; }
  const k = focus.here[0];
  const list = make("dl");
  for (const [name, ...value] of detailRows(k)) list.append(make("dt", { textContent: name }), make("dd", {}, ...value));
  panel.replaceChildren(heading(k, state.pin === focus ? "pinned" : ""), list);
}

function heading(k, note) {
  const swatch = make("span", { className: "swatch" });
  swatch.style.background = colours.kinds[ops.kind[k]];
  return make("h2", {}, swatch, title(k), make("small", { textContent: `on ${streams[ops.stream[k]].name}${micro(k)}${note ? ` · ${note}` : ""}` }));
}

function manyDetail(focus) {
  const totals = new Map();
  for (const k of focus.here) {
    const [n, s, b] = totals.get(ops.kind[k]) ?? [0, 0, 0];
    totals.set(ops.kind[k], [n + 1, s + ops.end[k] - ops.start[k], b + ops.bytes[k]]);
  }
  const name = focus.row !== undefined ? data.plan.rows[focus.row][0] : `line ${focus.line}`;
  const list = make("dl");
  for (const [kind, [n, s, b]] of totals)
    list.append(make("dt", { textContent: kinds[kind] }), make("dd", { textContent: `${n} ×, ${seconds(s)} in all${b ? `, ${bytes(b)}` : ""}` }));
  return [make("h2", { textContent: name }), list];
}

function detailRows(k) {
  const length = ops.end[k] - ops.start[k];
  const found = [["predicted", `${seconds(length)}, from ${seconds(ops.start[k])} to ${seconds(ops.end[k])}`]];
  if (measured && measured.start[k] !== null) {
    const took = measured.end[k] - measured.start[k];
    found.push(["measured", `${seconds(took)}, from ${seconds(measured.start[k])}${length > 0 ? `: ${(took / length).toFixed(2)} × predicted` : ""}`]);
  }
  if (ops.bytes[k]) found.push(["moves", `${bytes(ops.bytes[k])}${length > 0 ? `, ${bytes(ops.bytes[k] / length)}/s` : ""}`]);
  if (ops.flops[k]) found.push(["computes", `${scaled(ops.flops[k], "FLOP")}${length > 0 ? `, ${scaled(ops.flops[k] / length, "FLOP/s")}` : ""}`]);
  const point = memory.find((entry) => entry.k === k);
  if (point) found.push(["device memory", `${bytes(point.total)} while it runs, ${bytes(point.kept)} of it there before`]);
  if (ops.block[k] >= 0) found.push(["block", `${blocks[ops.block[k]].name}: ${blocks[ops.block[k]].text}`]);
  const group = ops.group[k] >= 0 ? ops.group[k] : ops.block[k] >= 0 ? groupOfName.get(blocks[ops.block[k]].name) : undefined;
  if (group !== undefined) found.push(["weights", `${bytes(groups[group].bytes)}; ${groups[group].text.replace("weights ", "")}`]);
  const late = cause(k);
  const waits = [...new Set([...ops.waits[k], late])].filter((w) => w !== -1 && w >= -count);
  if (late >= 0 || waits.length) found.push(["waits for", ...waits.map((w) => chip(w, w === late))]);
  const next = successors[k].slice(0, 8);
  if (next.length) found.push(["then", ...next.map((s) => chip(s, false)), successors[k].length > 8 ? `and ${successors[k].length - 8} more` : ""]);
  return found;
}

function chip(wait, binding) {
  const k = wait < 0 ? ~wait : wait;
  const text = `${title(k)}${wait < 0 ? ", step before" : micro(k)}`;
  const button = make("button", { className: binding ? "chip cause" : "chip", textContent: text, title: binding ? "the last of them to end" : "" });
  button.addEventListener("click", () => go(k));
  return button;
}

// ---- plan and estimates --------------------------------------------------------------------------

function buildPlan() {
  const body = data.plan.rows.map(([name, text], row) => {
    const tr = make("tr", { tabIndex: 0 }, make("td", { textContent: name }), make("td", { textContent: text }));
    tr.dataset.row = row;
    tr.addEventListener("pointerenter", () => point(focusOnRow(row)));
    tr.addEventListener("pointerleave", () => point(null));
    const toggle = () => pin(state.pin?.row === row ? null : focusOnRow(row));
    tr.addEventListener("click", toggle);
    tr.addEventListener("keydown", (event) => event.key === "Enter" && toggle());
    return tr;
  });
  byId("plan").append(make("table", {}, ...body), make("p", { className: "hint", textContent: data.plan.whole }));
}

function buildEstimates() {
  if (!measured) return;
  document.querySelector('[data-tab="estimates"]').hidden = false;
  const head = make("tr", {}, ...["operation", "count", "predicted", "measured", "measured ÷ predicted", "off the most"].map((text, i) =>
    make("th", { textContent: text, className: i && i < 5 ? "n" : "" })));
  const body = measured.rows.map(([kind, n, predicted, took, worst]) => {
    const cells = [kind, n, seconds(predicted), seconds(took), predicted ? (took / predicted).toFixed(2) : "–", title(worst)];
    const tr = make("tr", { tabIndex: 0 }, ...cells.map((text, i) => make("td", { textContent: text, className: i && i < 5 ? "n" : "" })));
    tr.dataset.op = worst;
    tr.addEventListener("click", () => go(worst));
    return tr;
  });
  byId("estimates").append(make("table", {}, head, ...body));
}

function openTab(name) {
  document.querySelectorAll("[data-tab]").forEach((tab) => {
    tab.setAttribute("aria-selected", String(tab.dataset.tab === name));
    byId(tab.dataset.tab).hidden = tab.dataset.tab !== name;
  });
}

// ---- moving --------------------------------------------------------------------------------------

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

// ---- pointer -------------------------------------------------------------------------------------

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

// ---- search and keys -----------------------------------------------------------------------------

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
  c: () => state.current >= 0 && cause(state.current) >= 0 && go(cause(state.current)),
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

// ---- head ----------------------------------------------------------------------------------------

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
window.page = { data, view, state, stats, x, time, laneTop, ROW, memoryTop, show, go, find, cause };
