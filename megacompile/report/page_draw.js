// What the canvases show: streams, memory, and what is pointed at.

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
    What was ``found`` is drawn two pixels wide and in full; all of it ``earlier`` by so many seconds. */
function drawOrder(context, order, row, top, height, labels, found = false, earlier = 0) {
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
  for (let i = firstAfter(order, to, view.from + earlier); i < order.length; i++) {
    const k = order[i];
    if (from[k] - earlier >= view.to) break;
    const a = LEFT + (from[k] - earlier - view.from) * scale, b = LEFT + (to[k] - earlier - view.from) * scale;
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
    if (!dimmed()) {
      drawOrder(base, order, row, ...at, true);
      base.filter = "opacity(.4)"; // of the step before
      drawOrder(base, late[row][index], row, ...at, false, false, rows[row].step);
    } else {
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
  const level = (value) => new Float64Array(columns).fill(value, Math.max(0, Math.floor(x(0) - LEFT)), Math.max(0, end));
  const [stays, slots] = [level(data.stays), level(data.stays + data.slots)];
  memoryScale();
  for (const [heights, colour] of [[total, colours.own], [kept, colours.kept], [slots, colours.slots], [stays, colours.stays]]) {
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
  const fixed = [["stays there", data.stays, colours.stays], ["weight slots", data.slots, colours.slots]];
  const sized = ([text, size, colour]) => [inner() > 420 ? `${text} ${bytes(size)}` : text, colour];
  const legend = [...fixed.filter(([, size]) => size > data.peak / 1000).map(sized), ["kept between", colours.kept], ["of the block that runs", colours.own]];
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
  for (const wait of [...new Set([...ops.waits[k], found])]) {
    const other = wait < 0 ? ~wait : wait;
    if (wait === -1 || ops.stream[other] === ops.stream[k]) continue;
    const [ax, ay, bx, by] = [x(endOf(wait)), middle(other), x(ops.start[k]), middle(k)];
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
