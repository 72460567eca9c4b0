// The program, the details of an operation, the plan and the estimates beside the timeline.

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
  const waits = [...new Set([...ops.waits[k], late])].filter((w) => w !== -1);
  if (waits.length) found.push(["waits for", ...waits.map((w) => chip(w, w === late))]);
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
