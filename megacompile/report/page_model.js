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

/** When what is waited for ends: of the step before (~k), that step's length earlier. */
const endOf = (wait) => (wait >= 0 ? ops.end[wait] : ops.end[~wait] - data.stepSeconds);

/** What an operation starts right after: of all that it waits for, what ends last; -1: nothing. */
function cause(k) {
  let found = before(k);
  for (const wait of ops.waits[k])
    if (wait !== -1 && (found === -1 || endOf(wait) >= endOf(found))) found = wait;
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

const rows = [{ from: ops.start, to: ops.end, step: data.stepSeconds, tone: measured ? "predicted" : "" }];
if (measured) rows.push({ from: measured.start, to: measured.end, step: measured.stepSeconds, tone: "measured" });
const timed = rows.map((row) =>
  lanes.map((lane) => lane.filter((k) => row.from[k] !== null && row.to[k] > row.from[k]).sort((a, b) => row.from[a] - row.from[b])));
/** What goes on into the next step, as Adam does: the forward of this one waits for that of the step before. */
const late = timed.map((orders, row) => orders.map((order) => order.filter((k) => rows[row].to[k] > rows[row].step)));
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
  const names = ["card", "ink", "soft", "faint", "rule", "lane", "accent", "alarm", "stays", "slots", "kept", "own"];
  colours = Object.fromEntries(names.map((name) => [name, value(name)]));
  colours.kinds = kinds.map(value);
}
