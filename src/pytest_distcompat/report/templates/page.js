"use strict";
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const RED = new Set(["failed", "fixed?", "late", "crashed", "hung", "leaked", "error"]);
  const COLOURS = ["#3b82f6", "#e8590c", "#2f9e44", "#c2255c", "#9c36b5", "#0c8599", "#a17c00", "#7048e8"];
  const place = (result) => `${result.nodeid.slice(0, Math.max(0, result.nodeid.lastIndexOf("::test")))}:${result.cell}`;
  const results = new Map(report.results.map((result) => [`${place(result)}:${result.check}`, result]));
  const rows = new Map(report.cells.map((cell) => [`${cell.place}:${cell.cell}`, cell]));
  const runs = new Map(report.runs.map((run) => [run.id, run]));
  const byNode = new Map(report.results.map((result) => [result.nodeid, result]));

  // Whatever comes from a test goes through here, as text: never as markup.
  const put = (parent, name, text, attributes = {}) => {
    const element = parent.namespaceURI === SVG && name !== "foreignObject" || name === "svg"
      ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined && text !== null) element.textContent = text;
    parent.append(element);
    return element;
  };
  const SVG = "http://www.w3.org/2000/svg";
  const number = (value) => value >= 1000 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  const mebibytes = (value) => `${number(value / 2 ** 20)} MiB`;

  // ---- theme
  const root = document.documentElement;
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  // ---- filters
  const filters = document.getElementById("filters");
  const facets = new Map(report.results.map((result) => [result.cell, result.facets || {}]));
  const filter = () => {
    const wanted = Object.fromEntries(new FormData(filters));
    const words = wanted.text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0, all = 0;
    for (const table of document.querySelectorAll(".matrix")) {
      for (const cell of table.querySelectorAll("[data-check]")) cell.hidden = Boolean(wanted.check) && cell.dataset.check !== wanted.check;
      let here = 0;
      for (const row of table.tBodies[0].rows) {
        const facet = facets.get(row.dataset.cell) || {};
        const verdicts = [...row.querySelectorAll("td:not([hidden]) .verdict")];
        const fits = words.every((word) => row.dataset.cell.toLowerCase().includes(word))
          && (!wanted.driver || table.dataset.driver === wanted.driver)
          && (!wanted.strategy || facet.strategy === wanted.strategy)
          && (!wanted.precision || facet.precision === wanted.precision)
          && (!wanted.check || verdicts.length > 0)
          && (!wanted.status || verdicts.some(({ dataset: { status } }) => wanted.status === "red" ? RED.has(status) : status === wanted.status));
        row.hidden = !fits;
        all += 1;
        here += fits ? 1 : 0;
      }
      shown += here;
      table.parentElement.hidden = table.parentElement.previousElementSibling.hidden = here === 0;
    }
    document.getElementById("shown").textContent = `${shown} of ${all} cells`;
    rove();
  };
  filters.addEventListener("input", filter);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(filter));

  // ---- keyboard: a table is one stop of the Tab key, arrows move inside it
  const visible = (table) => [...table.querySelectorAll("tbody tr:not([hidden]) td:not([hidden]) .verdict")];
  const rove = () => {
    for (const table of document.querySelectorAll(".matrix")) {
      const buttons = visible(table);
      table.querySelectorAll('.verdict[tabindex="0"]').forEach((button) => { button.tabIndex = -1; });
      if (buttons.length) (buttons.find((button) => button.classList.contains("bad")) || buttons[0]).tabIndex = 0;
    }
  };
  const step = (button, key) => {
    const td = button.parentElement, tr = td.parentElement, table = tr.closest("table");
    if (key === "Home" || key === "End") {
      const line = visible(table).filter((one) => one.closest("tr") === tr);
      return key === "Home" ? line[0] : line[line.length - 1];
    }
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const line = visible(table).filter((one) => one.closest("tr") === tr);
      return line[line.indexOf(button) + (key === "ArrowRight" ? 1 : -1)];
    }
    let next = tr;
    while ((next = key === "ArrowDown" ? next.nextElementSibling : next.previousElementSibling)) {
      const found = next.hidden ? null : next.cells[td.cellIndex].querySelector(".verdict");
      if (found) return found;
    }
    return null;
  };
  document.addEventListener("keydown", (event) => {
    const button = event.target.closest ? event.target.closest(".matrix .verdict") : null;
    if (!button || !/^(Arrow|Home$|End$)/.test(event.key)) return;
    event.preventDefault();
    const next = step(button, event.key);
    if (!next) return;
    next.closest("table").querySelectorAll('.verdict[tabindex="0"]').forEach((one) => { one.tabIndex = -1; });
    next.tabIndex = 0;
    next.focus();
  });

  // ---- one cell
  const dialog = document.getElementById("detail");
  const open = (result) => {
    const key = place(result), row = rows.get(key);
    dialog.replaceChildren();
    const title = put(dialog, "div", null, { class: "title" });
    put(title, "h2", `${result.cell} (${result.driver})`, { id: "detail-title" });
    put(title, "button", "Close", { type: "button" }).addEventListener("click", () => dialog.close());
    verdicts(key, result);
    if (row) {
      stories(row);
      dtypes(row);
      names(row);
      const others = siblings(row);
      curves(row, others);
      bars(row, others);
    }
    history.replaceState(null, "", `#${encodeURIComponent(`${key}:${result.check}`)}`);
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  };
  dialog.addEventListener("close", () => history.replaceState(null, "", location.pathname + location.search));
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".matrix .verdict");
    if (button) open(results.get(button.dataset.place));
  });

  const verdicts = (key, chosen) => {
    const chips = put(dialog, "div", null, { class: "chips", role: "group", "aria-label": "Verdicts of this cell" });
    const body = put(dialog, "div", null, { id: "verdict" });
    const show = (result) => {
      body.replaceChildren();
      chips.querySelectorAll("button").forEach((chip) => chip.setAttribute("aria-pressed", String(chip.dataset.check === result.check)));
      put(body, "h3", `${result.check}: ${result.status}`);
      if (result.reason) put(body, "p", result.reason);
      if (result.message && result.message !== result.reason) put(body, "pre", result.message);
      const details = [`${number(result.seconds)} s`];
      if (result.rank !== null) details.push(`cause on rank ${result.rank}`);
      put(body, "p", details.join(", "), { class: "hint" });
      if (result.reproduce) { put(body, "p", "Reproduce:"); put(body, "pre", result.reproduce, { class: "command" }); }
    };
    for (const result of report.results.filter((one) => place(one) === key)) {
      const original = document.querySelector(`.verdict[data-place="${CSS.escape(`${key}:${result.check}`)}"]`);
      const chip = put(chips, "button", `${result.check} ${original ? original.textContent : result.status}`, { type: "button", class: original ? original.className : "" });
      chip.dataset.check = result.check;
      chip.addEventListener("click", () => show(result));
    }
    show(chosen);
  };

  const stories = (row) => {
    const own = row.runs.map((id) => runs.get(id)).filter(Boolean);
    if (!own.length) return;
    put(dialog, "h3", "Runs");
    const bad = (run) => run.ending !== "ok";
    for (const [place, run] of [...own.filter(bad), ...own.filter((one) => !bad(one))].entries()) {
      // The first that broke off; there may be many.
      const details = put(dialog, "details", null, bad(run) && !place ? { open: "" } : {});
      const summary = put(details, "summary");
      put(summary, "strong", run.name);
      put(summary, "span", ` ${run.cell}, ${number(run.seconds)} s: `);
      put(summary, "span", run.ending + (run.action ? ` in ${run.action}` : ""), { class: bad(run) ? "bad" : "good" });
      if (run.message) put(details, "p", run.message);
      for (const [index, rank] of run.ranks.entries()) {
        const one = put(details, "details", null, index ? {} : { open: "" });
        put(one, "summary", `${rank.rank === null ? "all ranks" : `rank ${rank.rank}`}: ${rank.message}`);
        for (const [part, title] of [["text"], ["collectives"], ["stack", "Stack at the time limit"], ["output", "Last output"]]) {
          if (rank[part] && title) put(one, "p", `${title}:`);
          if (rank[part]) put(one, "pre", rank[part]);
        }
      }
      if (run.command) put(details, "pre", run.command, { class: "command" });
    }
  };

  const table = (heads, parent = dialog) => {
    const scroll = put(parent, "div", null, { class: "scroll" });
    const made = put(scroll, "table", null, { class: "data" });
    const head = put(put(made, "thead"), "tr");
    for (const text of heads) put(head, "th", text, { scope: "col" });
    return put(made, "tbody");
  };

  const dtypes = (row) => {
    if (!row.dtypes.length) return;
    put(dialog, "h3", "Dtypes, expected and seen on all ranks");
    const body = table(["of", "expected", "seen"]);
    for (const { kind, expected, seen } of row.dtypes) {
      const line = put(body, "tr");
      put(line, "th", kind, { scope: "row" });
      put(line, "td", expected);
      const wrong = seen.length > 0 && (seen.length > 1 || seen[0] !== expected);
      put(line, "td", seen.join(", ") + (wrong ? "  (differs)" : "") || "nothing", { class: wrong ? "wrong" : "" });
    }
  };

  // A long name is cut at its dots and slashes, if at all.
  const dotted = (line, text, kind) => {
    const cell = put(line, "td", null, { class: kind });
    for (const part of text.split(/(?<=[./])/)) cell.append(part, document.createElement("wbr"));
  };

  const names = (row) => {
    if (!row.names.length) return;
    const odd = (one) => !one.unwrapped || !one.live;
    const details = put(dialog, "details", null, row.names.some(odd) ? { open: "" } : {});
    put(details, "summary", `Names: ${row.names.length} parameters, unwrapped and live on rank 0; = is the unwrapped name`);
    const body = table(["unwrapped name", "shape", "live name", "dtype", "kind", "here", "held", "in files"], details);
    for (const one of [...row.names.filter(odd), ...row.names.filter((other) => !odd(other))]) {
      const line = put(body, "tr");
      dotted(line, one.unwrapped || "none", one.unwrapped ? "name" : "name wrong");
      put(line, "td", one.shape.join(" x "));
      // What is only in a file is no parameter: nothing is stored or held of it.
      const same = one.live === one.unwrapped;
      dotted(line, one.live ? (same ? "=" : one.live) : one.key ? `key ${one.key}` : "none", one.live ? "name" : "name wrong");
      put(line, "td", one.loaded && one.dtype && one.loaded !== one.dtype ? `${one.loaded} -> ${one.dtype}` : one.dtype);
      put(line, "td", one.placement ? `${one.kind}, ${one.placement}` : one.kind);
      put(line, "td", one.live ? number(one.local) : "");
      put(line, "td", !one.live ? "" : one.held === null ? "flat" : String(one.held));
      dotted(line, one.files.join(", ") || "none", "name");
    }
  };

  // The same training under other strategies: all else is equal.
  const siblings = (row) => {
    const rest = ({ strategy, ...others }) => JSON.stringify(Object.entries(others).sort());
    return report.cells.filter((other) => other.place === row.place && rest(other.facets) === rest(row.facets));
  };
  const colour = (index) => COLOURS[index % COLOURS.length];

  const curves = (row, others) => {
    const charts = [["loss", "Loss"], ["grad_norm", "Gradient norm"]].map(([name, title]) => {
      const lines = others.filter((one) => (one.steps[name] || []).length)
        .map((one) => ({ label: one.cell, values: one.steps[name], own: one === row, colour: colour(others.indexOf(one)) }));
      const reference = row.steps[`reference_${name}`] || [];
      if (reference.length) lines.push({ label: "reference, one process in float32", values: reference, reference: true, colour: "#8b949e" });
      return { title, lines };
    }).filter(({ lines }) => lines.length);
    if (!charts.length) return;
    put(dialog, "h3", "Strategies over each other");
    const grid = put(dialog, "div", null, { class: "charts" });
    for (const { title, lines } of charts) chart(grid, title, lines);
  };

  const chart = (parent, title, lines) => {
    const [width, height, left, bottom, top] = [520, 240, 46, 26, 10];
    const known = lines.flatMap((line) => line.values).filter((value) => value !== null);
    if (!known.length) return;
    const low = Math.min(...known), high = Math.max(...known), count = Math.max(...lines.map((line) => line.values.length));
    const x = (step) => left + (count < 2 ? 0 : step * (width - left - 12) / (count - 1));
    const y = (value) => top + (high === low ? 0.5 : (high - value) / (high - low)) * (height - top - bottom);
    const figure = put(parent, "figure");
    put(figure, "figcaption", title);
    const svg = put(figure, "svg", null, { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} by step: ${lines.map((line) => line.label).join(", ")}` });
    for (const share of [0, 0.5, 1]) {
      const value = low + share * (high - low);
      put(svg, "line", null, { class: "axis", x1: left, x2: width - 8, y1: y(value), y2: y(value) });
      put(svg, "text", number(value), { x: left - 5, y: y(value) + 4, "text-anchor": "end" });
    }
    for (const at of [...new Set([0, Math.floor((count - 1) / 2), count - 1])]) put(svg, "text", `step ${at + 1}`, { x: x(at), y: height - 8, "text-anchor": at ? at === count - 1 ? "end" : "middle" : "start" });
    const legend = put(figure, "ul", null, { class: "legend" });
    // The cell's own curve last, on top of the others.
    for (const line of [...lines].sort((one, other) => Boolean(one.own) - Boolean(other.own))) {
      const parts = [[]];
      line.values.forEach((value, at) => value === null ? parts.push([]) : parts[parts.length - 1].push(`${x(at).toFixed(1)},${y(value).toFixed(1)}`));
      for (const points of parts.filter((part) => part.length)) {
        const drawn = points.length > 1 ? put(svg, "polyline", null, { points: points.join(" ") }) : put(svg, "circle", null, { cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 3 });
        drawn.setAttribute("class", `curve ${line.own ? "own" : line.reference ? "reference" : ""}`);
        drawn.setAttribute("stroke", line.colour);
        put(drawn, "title", line.label);
      }
      const item = put(legend, "li");
      put(item, "i").style.background = line.colour;
      put(item, "span", line.own ? `${line.label} (this cell)` : line.label);
    }
  };

  const bars = (row, others) => {
    const kinds = [
      ["Peak memory of the rank that needed most", (one) => Math.max(0, ...one.memory), mebibytes],
      ["Tokens a second and rank", (one) => one.cost.tokens_per_second || 0, number],
      ["Bytes of master and state a trained parameter", (one) => one.cost.state_bytes || 0, number],
    ];
    for (const [title, read, tell] of kinds) {
      const found = others.map((one) => [one, read(one)]).filter(([, value]) => value > 0);
      const most = Math.max(0, ...found.map(([, value]) => value));
      if (!found.length) continue;
      put(dialog, "h3", title);
      const grid = put(dialog, "div", null, { class: "bars" });
      for (const [one, value] of found) {
        put(grid, "span", one.cell, { class: "label" });
        put(grid, "div", null, { class: one === row ? "bar own" : "bar" }).style.width = `${100 * value / most}%`;
        put(grid, "span", tell(value));
      }
    }
  };

  // ---- timeline
  const timeline = () => {
    const spans = report.session.timeline || [];
    if (!spans.length) return;
    document.getElementById("timeline-section").hidden = false;
    const devices = [...new Set(spans.map((span) => span.device))].sort();
    const begin = Math.min(...spans.map((span) => span.begin)), end = Math.max(...spans.map((span) => span.end));
    const left = 20 + 7 * Math.max(...devices.map((device) => Math.min(device.length, 24))), width = 1200, line = 24;
    const x = (at) => left + (end > begin ? (at - begin) / (end - begin) : 0) * (width - left - 10);
    const svg = put(document.getElementById("timeline-chart"), "svg", null, { viewBox: `0 0 ${width} ${devices.length * line + 26}`, role: "img", "aria-label": `Who had which of ${devices.length} devices, over ${number(end - begin)} seconds` });
    devices.forEach((device, at) => put(svg, "text", device.length > 24 ? `${device.slice(0, 23)}…` : device, { x: 6, y: at * line + 17 }));
    for (const span of spans) {
      const result = byNode.get(span.who), run = runs.get(span.who);
      const bad = result && RED.has(result.status) || run && run.ending !== "ok";
      const rect = put(svg, "rect", null, { class: `run ${bad ? "bad" : ""}`, x: x(span.begin), y: devices.indexOf(span.device) * line + 3, width: Math.max(1, x(span.end) - x(span.begin)), height: line - 6 });
      put(rect, "title", `${span.who}${span.worker ? `, ${span.worker}` : ""}: ${number(span.end - span.begin)} s${bad ? ", ended badly" : ""}`);
      if (result) rect.addEventListener("click", () => open(result));
    }
    for (const share of [0, 0.25, 0.5, 0.75, 1]) put(svg, "text", `${number(share * (end - begin))} s`, { x: x(begin + share * (end - begin)), y: devices.length * line + 18, "text-anchor": share ? share === 1 ? "end" : "middle" : "start" });
  };

  timeline();
  filter();
  const asked = results.get(decodeURIComponent(location.hash.slice(1)));
  if (asked) open(asked);
})();
