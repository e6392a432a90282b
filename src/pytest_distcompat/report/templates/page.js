"use strict";
(async () => {
  // JSON, by gzip and in base64.
  const packed = Uint8Array.from(atob(document.getElementById("report").textContent), (one) => one.charCodeAt(0));
  const report = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
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
  const bytes = (value) => {
    const power = Math.min(3, Math.max(1, Math.floor(Math.log2(value || 1) / 10)));
    return `${+(value / 1024 ** power).toPrecision(3)} ${["KiB", "MiB", "GiB"][power - 1]}`;
  };

  // A text whose URLs are links; html.py has the same pattern.
  const linked = (parent, name, text, attributes) => {
    const element = put(parent, name, null, attributes);
    text.split(/(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}])/).forEach((part, at) => {
      if (at % 2) put(element, "a", part, { href: part, rel: "noopener" });
      else element.append(part);
    });
    return element;
  };

  // ---- commands, each with a button that copies it
  const copyable = (pre) => {
    const box = document.createElement("div");
    box.className = "copyable";
    pre.replaceWith(box);
    box.append(pre);
    const button = put(box, "button", "Copy", { type: "button", class: "copy", "aria-live": "polite", title: "Copy the command" });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(pre.textContent);
      } catch {
        // A page without the permission, or from plain http.
        getSelection().selectAllChildren(pre);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
  };
  const command = (parent, text) => copyable(put(parent, "pre", text, { class: "command" }));
  document.querySelectorAll("pre.command").forEach(copyable);

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

  // ---- the address has the filters and the open cell: #strategy=fsdp2&status=red&cell=...
  let opened = "";
  const address = () => {
    const fields = [...new FormData(filters), ["cell", opened]].filter(([, value]) => value);
    history.replaceState(null, "", fields.length ? `#${new URLSearchParams(fields)}` : location.pathname + location.search);
  };
  const changed = () => { filter(); address(); };
  filters.addEventListener("input", changed);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(changed));
  const restore = () => {
    const wanted = new URLSearchParams(location.hash.slice(1));
    for (const field of filters.querySelectorAll("[name]")) {
      field.value = wanted.get(field.name) || "";
      // A select has no such option: the address is of another report.
      if (field.selectedIndex === -1) field.value = "";
    }
    filter();
    const asked = results.get(wanted.get("cell"));
    if (asked) open(asked);
    else if (dialog.open) dialog.close();
    return asked;
  };
  addEventListener("hashchange", () => {
    if (!restore() && location.hash.includes("=")) document.getElementById("matrix").scrollIntoView();
  });

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
      mesh(row);
      dtypes(row);
      names(row);
      const others = siblings(row);
      curves(row, others);
      memory(row, others);
      sent(row);
      bars(row, others);
    }
    opened = `${key}:${result.check}`;
    address();
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  };
  dialog.addEventListener("close", () => { opened = ""; address(); });
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
      if (result.reason) linked(body, "p", result.reason);
      if (result.message && result.message !== result.reason) linked(body, "pre", result.message);
      const details = [`${number(result.seconds)} s`];
      if (result.rank !== null) details.push(`cause on rank ${result.rank}`);
      put(body, "p", details.join(", "), { class: "hint" });
      if (result.reproduce) { put(body, "p", "Reproduce:"); command(body, result.reproduce); }
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
      if (run.message) linked(details, "p", run.message);
      for (const [index, rank] of run.ranks.entries()) {
        const one = put(details, "details", null, index ? {} : { open: "" });
        put(one, "summary", `${rank.rank === null ? "all ranks" : `rank ${rank.rank}`}: ${rank.message}`);
        for (const [part, title] of [["text"], ["collectives"], ["stack", "Stack at the time limit"], ["output", "Last output"]]) {
          if (rank[part] && title) put(one, "p", `${title}:`);
          if (rank[part]) linked(one, "pre", rank[part]);
        }
      }
      if (run.command) command(details, run.command);
    }
  };

  const table = (heads, parent = dialog) => {
    const scroll = put(parent, "div", null, { class: "scroll" });
    const made = put(scroll, "table", null, { class: "data" });
    const head = put(put(made, "thead"), "tr");
    for (const text of heads) put(head, "th", text, { scope: "col" });
    return put(made, "tbody");
  };

  // Who holds what: each rank at its place on the mesh, with a picture of the tensor and its part of it. The last dimension runs across.
  const mesh = ({ mesh: found }) => {
    if (!found) return;
    const section = put(dialog, "section", null, { id: "mesh" });
    put(section, "h3", "Mesh: who holds what");
    const label = put(section, "label", "Parameter ");
    const select = put(label, "select");
    found.layouts.forEach((layout, at) => layout.names.forEach((name) => put(select, "option", name, { value: at })));
    const box = put(section, "div");
    const draw = () => {
      const { shape, placement, parts } = found.layouts[select.value];
      const regions = [...new Set(parts)], across = found.dims[found.dims.length - 1], down = found.dims.slice(0, -1);
      const held = regions.length > 1 ? "ranks of one colour hold the same part" : "all ranks hold the same";
      box.replaceChildren();
      put(box, "p", `${shape.join(" x ") || "a number"}; ${placement || "no mesh"}; ${held}`, { class: "hint" });
      const body = table(["", ...Array.from({ length: across.size }, (_, at) => `${across.name} ${at}`)], box);
      const lines = new Map();
      for (const [index, { rank, at }] of found.ranks.entries()) {
        const key = at.slice(0, -1).join(", ");
        if (!lines.has(key)) {
          lines.set(key, put(body, "tr"));
          put(lines.get(key), "th", down.map(({ name }, place) => `${name} ${at[place]}`).join(", "), { scope: "row" });
          for (let place = 0; place < across.size; place += 1) put(lines.get(key), "td");
        }
        const cell = lines.get(key).cells[at[at.length - 1] + 1];
        put(cell, "strong", `rank ${rank}`);
        tensor(cell, shape, parts[index], colour(regions.indexOf(parts[index])));
        put(cell, "span", parts[index]);
      }
    };
    select.addEventListener("change", draw);
    draw();
  };
  // A tensor of one dimension is a column; of more than two the first two are drawn. A flat piece has no place in it.
  const tensor = (parent, shape, part, tone) => {
    const svg = put(parent, "svg", null, { viewBox: "0 0 60 40", "aria-hidden": "true" });
    const cuts = part.includes("flat") || part === "none" ? [] : [0, 1].map((dim) => {
      const text = part === "all" ? ":" : part.split(", ")[dim] || ":";
      return text === ":" ? [[0, 1]] : text.split(" + ").map((one) => one.split(":").map((value) => value / shape[dim]));
    });
    const [width, height] = [shape.length > 1 ? 60 : 16, 40];
    put(svg, "rect", null, { class: "whole", width, height });
    for (const [top, bottom] of cuts[0] || []) {
      for (const [left, right] of cuts[1]) put(svg, "rect", null, { x: left * width, y: top * height, width: (right - left) * width, height: (bottom - top) * height }).style.fill = tone;
    }
  };

  const dtypes = (row) => {
    if (!row.dtypes.length) return;
    put(dialog, "h3", "Dtypes, expected and actual on all ranks");
    const body = table(["of", "expected", "actual"]);
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
    const charts = [["loss", "Loss"], ["grad_norm", "Gradient norm"]].flatMap(([name, title]) => {
      const lines = others.filter((one) => (one.steps[name] || []).length)
        .map((one) => ({ label: one.cell, values: one.steps[name], own: one === row, colour: colour(others.indexOf(one)) }));
      const reference = row.steps[`reference_${name}`] || [];
      if (reference.length) lines.push({ label: "reference, one process in float32", values: reference, kind: "reference", colour: "#8b949e" });
      const resumed = row.steps[`resumed_${name}`] || [];
      if (resumed.length) lines.push({ label: "this cell, resumed from its checkpoint", values: resumed, kind: "resumed", colour: "var(--text)" });
      return [{ title, lines }, difference(name, title, row, others)];
    }).filter(({ lines }) => lines.length);
    if (!charts.length) return;
    put(dialog, "h3", "Strategies over each other");
    const grid = put(dialog, "div", null, { class: "charts" });
    for (const { title, lines, band } of charts) chart(grid, title, lines, band);
  };

  // How far each strategy is from its reference, relative to it, over what is allowed.
  const difference = (name, title, row, others) => {
    const off = (one) => {
      const there = one.steps[`reference_${name}`] || [];
      let largest = 0;
      return (one.steps[name] || []).slice(0, there.length).map((value, at) => {
        largest = Math.max(largest, Math.abs(there[at]));
        return value === null || there[at] === null ? null : Math.abs(value - there[at]) / (Math.abs(there[at]) || largest || 1);
      });
    };
    const lines = others.map((one) => ({ label: one.cell, values: off(one), own: one === row, colour: colour(others.indexOf(one)) }));
    return { title: `${title}: relative difference to the reference`, lines: lines.filter((line) => line.values.length), band: row.steps[`${name}_tolerance`] || [] };
  };

  // With a band (what is allowed at each step) the axis is logarithmic, and 0 is at its lower end.
  const chart = (parent, title, lines, band) => {
    const [width, height, left, bottom, top] = [520, 240, 46, 26, 10];
    const known = lines.flatMap((line) => line.values).filter((value) => value !== null);
    if (!known.length) return;
    const count = Math.max(...lines.map((line) => line.values.length));
    const positive = band && [...known, ...band].filter((value) => value > 0);
    const least = band && 10 ** Math.floor(Math.log10(Math.min(...positive, 1e-6)));
    const scaled = (value) => band ? Math.log10(Math.max(value, least)) : value;
    const low = scaled(Math.min(...known, ...(band ? [least] : []))), high = band ? Math.ceil(scaled(Math.max(...positive, 10 * least))) : Math.max(...known);
    const x = (step) => left + (count < 2 ? 0 : step * (width - left - 12) / (count - 1));
    const y = (value) => top + (high === low ? 0.5 : (high - scaled(value)) / (high - low)) * (height - top - bottom);
    const figure = put(parent, "figure");
    put(figure, "figcaption", title);
    const svg = put(figure, "svg", null, { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} by step: ${lines.map((line) => line.label).join(", ")}` });
    const allowed = (band || []).slice(0, count).map((value, at) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`);
    if (allowed.length) {
      const area = put(svg, "polygon", null, { class: "band", points: [`${x(0)},${y(0)}`, ...allowed, `${x(allowed.length - 1)},${y(0)}`].join(" ") });
      put(area, "title", `allowed: ${number(band[0])}`);
    }
    for (const share of [0, 0.5, 1]) {
      const value = band ? 10 ** Math.round(low + share * (high - low)) : low + share * (high - low);
      put(svg, "line", null, { class: "axis", x1: left, x2: width - 8, y1: y(value), y2: y(value) });
      put(svg, "text", band ? value.toExponential(0) : number(value), { x: left - 5, y: y(value) + 4, "text-anchor": "end" });
    }
    for (const at of [...new Set([0, Math.floor((count - 1) / 2), count - 1])]) put(svg, "text", `step ${at + 1}`, { x: x(at), y: height - 8, "text-anchor": at ? at === count - 1 ? "end" : "middle" : "start" });
    const legend = put(figure, "ul", null, { class: "legend" });
    // The cell's own curve on top of the others, what resumed on that.
    const rank = (line) => line.own ? 1 : line.kind === "resumed" ? 2 : 0;
    for (const line of [...lines].sort((one, other) => rank(one) - rank(other))) {
      const parts = [[]];
      line.values.forEach((value, at) => value === null ? parts.push([]) : parts[parts.length - 1].push(`${x(at).toFixed(1)},${y(value).toFixed(1)}`));
      for (const points of parts.filter((part) => part.length)) {
        const drawn = points.length > 1 ? put(svg, "polyline", null, { points: points.join(" ") }) : put(svg, "circle", null, { cx: points[0].split(",")[0], cy: points[0].split(",")[1], r: 3 });
        drawn.setAttribute("class", `curve ${line.own ? "own" : line.kind || ""}`);
        drawn.style.stroke = line.colour;
        put(drawn, "title", line.label);
        if (line.kind === "resumed" && points.length > 1) for (const [cx, cy] of points.map((point) => point.split(","))) put(svg, "circle", null, { class: "curve resumed", cx, cy, r: 4 }).style.stroke = line.colour;
      }
      const item = put(legend, "li");
      put(item, "i", null, { class: line.kind || "" }).style.color = line.colour;
      put(item, "span", line.own ? `${line.label} (this cell)` : line.label);
    }
    if (allowed.length) {
      const item = put(legend, "li");
      put(item, "i", null, { class: "allowed" });
      put(item, "span", `allowed: ${number(Math.max(...band))}`);
    }
  };

  // What each rank holds: unlike the process's peak that says on the CPU too what is sharded.
  const memory = (row, others) => {
    const kinds = [["parameters", "parameters"], ["gradients", "gradients"], ["optimizer", "optimizer state"]];
    const held = (one) => {
      const parts = kinds.map(([kind]) => one.tensor_bytes[kind] || []);
      return (parts[0] || []).map((_, rank) => ({ one, rank, sizes: parts.map((part) => part[rank] || 0) }));
    };
    const whole = ({ sizes }) => sizes.reduce((sum, size) => sum + size, 0);
    const most = (ranks) => ranks.sort((one, other) => whole(other) - whole(one)).slice(0, 1);
    const found = [...held(row), ...others.filter((one) => one !== row).flatMap((one) => most(held(one)))];
    const largest = Math.max(0, ...found.map(whole));
    if (!largest) return;
    put(dialog, "h3", "Memory after step 3: each rank of this cell, and the fullest rank under other strategies");
    const body = table(["cell", "rank", ...kinds.map(([, title]) => title), "together", ""]);
    body.parentElement.classList.add("memory");
    kinds.forEach((_, at) => { put(body.parentElement.tHead.rows[0].cells[at + 2], "i").style.color = colour(at); });
    for (const { one, rank, sizes } of found) {
      const line = put(body, "tr", null, one === row ? { class: "own" } : {});
      put(line, "th", one.cell, { scope: "row" });
      for (const text of [rank, ...sizes.map(bytes), bytes(whole({ sizes }))]) put(line, "td", text);
      const stack = put(put(line, "td"), "div", null, { class: "stack" });
      sizes.forEach((size, at) => Object.assign(put(stack, "i", null, { title: `${kinds[at][1]}: ${bytes(size)}` }).style, { color: colour(at), width: `${100 * size / largest}%` }));
    }
  };

  const sent = (row) => {
    if (!(row.sent || []).length) return;
    put(dialog, "h3", "Simulated: what rank 0 sends in a step, in a ring");
    const body = table(["collective", "mesh", "ranks", "calls", "bytes"]);
    for (const one of row.sent) {
      const line = put(body, "tr");
      put(line, "th", one.collective, { scope: "row" });
      for (const text of [one.mesh, one.ranks, one.calls, bytes(one.bytes)]) put(line, "td", text);
    }
  };

  const bars = (row, others) => {
    const kinds = [
      // On the CPU it is the process's, most of which is libraries.
      ["Peak memory of the GPU, on the rank that needed most", (one) => report.session.device === "cpu" ? 0 : Math.max(0, ...one.memory), bytes],
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
    const devices = [...new Set(spans.map((span) => span.device))].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
    // Rows of one GPU that runs share differ at the end of their names: GPU-8932f937….place-2-of-4
    const label = (device) => {
      const at = device.indexOf(".place-"), place = at < 0 ? "" : device.slice(at), most = 24 - place.length;
      const name = at < 0 ? device : device.slice(0, at);
      return `${name.length > most ? `${name.slice(0, most - 1)}…` : name}${place}`;
    };
    const known = [...spans, ...(report.session.gaps || [])];
    const begin = Math.min(...known.map((span) => span.begin)), end = Math.max(...known.map((span) => span.end));
    // An older report does not say what its gaps were.
    const gaps = report.session.gaps || devices.flatMap((device) => {
      const own = spans.filter((span) => span.device === device).sort((one, other) => one.begin - other.begin);
      let at = begin;
      const free = [];
      for (const span of [...own, { begin: end, end }]) {
        if (span.begin > at) free.push({ device, begin: at, end: span.begin, why: "no run" });
        at = Math.max(at, span.end);
      }
      return free;
    });
    const left = 20 + 7 * Math.max(...devices.map((device) => label(device).length)), width = 1200, line = 24;
    const x = (at) => left + (end > begin ? (at - begin) / (end - begin) : 0) * (width - left - 10);
    const svg = put(document.getElementById("timeline-chart"), "svg", null, { viewBox: `0 0 ${width} ${devices.length * line + 26}`, role: "img", "aria-label": `Who had which of ${devices.length} devices, over ${number(end - begin)} seconds` });
    devices.forEach((device, at) => put(svg, "text", label(device), { x: 6, y: at * line + 17 }));
    for (const gap of gaps) {
      const [row, wide] = [devices.indexOf(gap.device), x(gap.end) - x(gap.begin)];
      if (wide < 3) continue;
      const rect = put(svg, "rect", null, { class: "gap", x: x(gap.begin), y: row * line + 8, width: wide, height: line - 16 });
      put(rect, "title", `${gap.why}: ${number(gap.end - gap.begin)} s`);
      const fits = gap.why.length * 6 < wide ? gap.why : wide > 60 ? `${gap.why.slice(0, wide / 6 - 2)}…` : "";
      if (fits) put(svg, "text", fits, { class: "gap", x: x(gap.begin) + wide / 2, y: row * line + 16, "text-anchor": "middle" });
    }
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
  restore();
})();
