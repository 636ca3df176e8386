"use strict";
(async () => {
  // Packed, the drawing library is a third of its size.
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (character) => character.charCodeAt(0));
  const unpacked = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")));
  document.head.append(Object.assign(document.createElement("script"), { textContent: await unpacked.text() }));
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  let picked = data.first, decide = null, redrawParameters = () => {};
  const coloured = document.getElementById("colouring");

  function colour(tone) { return data.tones[tone][root.classList.contains("dark") ? "dark" : "light"]; }
  function translucent(hex, opacity) { return hex + Math.round(opacity * 255).toString(16).padStart(2, "0"); }

  // Plotly reads a few HTML tags in any text.
  function escaped(text) { return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;"); }

  // The values of the parameter that points are coloured by, and how: categories by a palette, numbers by a scale.
  function colouring(figure) {
    const name = figure.name === "front" && coloured ? coloured.value : "";
    if (!name) return null;
    const { values, choices, log } = data.colourings[name];
    const numbers = Object.values(values).filter((value) => value !== null).map((value) => log ? Math.log10(value) : value);
    const ends = [Math.min(...numbers), Math.max(...numbers)];
    return { name, values, choices, log, ends };
  }
  function paint(trace, by, first) {
    const values = trace.customdata.map((trial) => by.values[trial] ?? null);
    if (by.choices) {
      const place = values.map((value) => by.choices.indexOf(value));
      trace.marker.color = place.map((at) => at < 0 ? colour("other") : data.palette[at % data.palette.length]);
      trace.marker.symbol = place.map((at) => data.symbols[Math.max(at, 0) % data.symbols.length]);
      return;
    }
    const ticks = [0, 1, 2, 3, 4].map((part) => by.ends[0] + (by.ends[1] - by.ends[0]) * part / 4);
    Object.assign(trace.marker, {
      color: values.map((value) => value === null ? null : by.log ? Math.log10(value) : value), cmin: by.ends[0], cmax: by.ends[1], colorscale: "Viridis", showscale: first, opacity: 0.95,
      colorbar: { title: { text: escaped(by.name), side: "right" }, thickness: 10, tickfont: { color: css("--ink") }, tickvals: ticks, ticktext: ticks.map((at) => (by.log ? 10 ** at : at).toPrecision(3) * 1) },
    });
  }
  // Points in the legend for each choice, which paint() draws in several traces.
  function keys(by) {
    return by?.choices ? by.choices.map((choice, at) => ({ type: "scatter", mode: "markers", x: [null], y: [null], name: escaped(`${by.name} ${choice}`), marker: { size: 9, color: data.palette[at % data.palette.length], symbol: data.symbols[at % data.symbols.length] } })) : [];
  }

  // Applies the current theme's colours to a figure; its data only name tones.
  function traces(figure) {
    const by = colouring(figure);
    let painted = false;
    return figure.traces.map((from) => {
      const trace = structuredClone(from), tone = colour(trace.tone);
      delete trace.tone;
      if (trace.fill) trace.fillcolor = translucent(tone, 0.18);
      else if (trace.mode === "lines") trace.line.color = tone;
      else if (Array.isArray(trace.marker.color)) {
        Object.assign(trace.marker, { colorscale: "Viridis", showscale: true, colorbar: { title: { text: trace.marker.title, side: "right" }, thickness: 10, tickfont: { color: css("--ink") } }, line: { color: css("--ink"), width: 0.5 } });
        delete trace.marker.title;
      } else {
        trace.marker.color = tone;
        if (root.classList.contains("dark")) trace.marker.opacity = Math.max(trace.marker.opacity, 0.85);
        if (by && trace.customdata && ["front", "other", "stopped"].includes(from.tone)) { paint(trace, by, !painted); painted = true; }
      }
      if (trace.error_y) trace.error_y.color = translucent(tone, 0.6);
      return trace;
    }).concat(keys(by));
  }
  function layout(figure, narrow) {
    const axis = (of) => Object.assign({ gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), automargin: true, fixedrange: narrow }, structuredClone(of));
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: css("--ink"), family: "system-ui, Liberation Sans, sans-serif", size: narrow ? 11 : 13 },
      margin: { l: 50, r: 10, t: 10, b: narrow ? 130 : 85 }, xaxis: axis(figure.x), yaxis: axis(figure.y), barmode: "overlay",
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 }, hovermode: "closest",
      hoverlabel: { align: "left" }, showlegend: figure.traces.some((trace) => trace.showlegend !== false),
    };
  }
  function draw() {
    if (coloured && !coloured.dataset.set) { coloured.value = data.coloured; coloured.dataset.set = "yes"; }
    const narrow = innerWidth < 740;
    for (const figure of data.figures) {
      const place = document.getElementById("plot-" + figure.name);
      const [shown, around] = figure.name === "front" && decide ? decide.adapt(traces(figure), layout(figure, narrow)) : [traces(figure), layout(figure, narrow)];
      Plotly.react(place, shown, around, { displayModeBar: false, responsive: true });
      if (!place.listening) {
        place.listening = true;
        place.on("plotly_click", (event) => { const trial = event.points[0].customdata; if (trial !== undefined) pick(trial); });
      }
    }
  }

  coloured?.addEventListener("change", draw);

  function showStatus(text) { document.getElementById("status").textContent = text; }
  async function copy(text, label) {
    try { await navigator.clipboard.writeText(text); }
    catch {
      // In some browsers a file opened from disk cannot use the clipboard API.
      const area = document.createElement("textarea");
      area.value = text; document.body.append(area); area.select();
      document.execCommand("copy"); area.remove();
    }
    showStatus(label + " copied");
  }
  function pick(number) {
    const trial = data.trials[number];
    if (!trial) return;
    picked = number;
    document.getElementById("picked-title").textContent = `Settings of trial ${trial.number}`;
    document.getElementById("picked-summary").textContent =
      trial.outcome === "complete" ? `${trial.accuracy} in ${trial.time}` : `${trial.outcome.replaceAll("_", " ")}${trial.message ? ": " + trial.message : ""}`;
    showExport();
    const body = document.getElementById("picked-settings");
    body.replaceChildren(...trial.settings.map(([name, value]) => {
      const row = document.createElement("tr"), cells = [name, value].map((text) => Object.assign(document.createElement("td"), { textContent: text }));
      const last = document.createElement("td"), press = Object.assign(document.createElement("button"), { type: "button", textContent: "copy" });
      press.setAttribute("aria-label", `copy ${name}`);
      press.addEventListener("click", () => copy(value, name));
      last.append(press); row.append(...cells, last);
      return row;
    }));
    for (const button of document.querySelectorAll("[data-trial]")) button.setAttribute("aria-pressed", String(Number(button.dataset.trial) === number));
    showStatus("");
    decide?.select(number);
  }
  // Only trials on the front can be exported, here as by `bsearch export`.
  function showExport() {
    const exports = data.exports[picked], name = document.getElementById("framework").value;
    document.getElementById("for-framework").hidden = !exports;
    document.getElementById("export").textContent = exports?.[name]?.text ?? `${name} cannot express these settings.`;
    document.getElementById("train-command").textContent = `bsearch train STUDY --pick ${picked}`;
    document.getElementById("picked-command").textContent = `bsearch export STUDY --to ${name} --pick ${picked}`;
  }
  function download(name, text, type) {
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(new Blob([text], { type })), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  for (const button of document.querySelectorAll("[data-trial]")) button.addEventListener("click", () => pick(Number(button.dataset.trial)));
  for (const button of document.querySelectorAll("[data-csv]")) button.addEventListener("click", () => download(button.dataset.csv + ".csv", data.csv[button.dataset.csv], "text/csv"));
  for (const button of document.querySelectorAll("[data-svg]")) button.addEventListener("click", () => Plotly.downloadImage(document.getElementById("plot-" + button.dataset.svg), { format: "svg", filename: button.dataset.svg, width: 960, height: 600 }));
  document.getElementById("framework")?.addEventListener("change", showExport);
  // All trials: sorted by a column, as numbers where both are some, and filtered by what a row holds.
  const every = document.querySelector("table.every tbody"), heads = [...document.querySelectorAll("table.every th")];
  heads.forEach((head, place) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of heads) other.setAttribute("aria-sort", other === head ? (down ? "descending" : "ascending") : "none");
    const cell = (row) => row.cells[place].textContent.trim(), empty = (text) => text === "" || text === "-";
    const order = (left, right) => isNaN(left) || isNaN(right) ? left.localeCompare(right) : left - right;
    const rows = [...every.rows].sort((left, right) => empty(cell(left)) - empty(cell(right)) || (down ? -1 : 1) * order(cell(left), cell(right)));
    every.append(...rows);
  }));
  document.getElementById("filter")?.addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of every.rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    showFiltered();
  });
  function showFiltered() { document.getElementById("filtered").textContent = `${[...every.rows].filter((row) => !row.hidden).length} of ${every.rows.length}`; }
  document.getElementById("copy-export")?.addEventListener("click", () => copy(document.getElementById("export").textContent, document.getElementById("framework").value));
  document.getElementById("copy-all")?.addEventListener("click", () => data.trials[picked] && copy(data.trials[picked].yaml, "settings"));

  function setTheme(dark) {
    root.classList.toggle("dark", dark);
    button.textContent = dark ? "Light" : "Dark";
    button.setAttribute("aria-label", dark ? "Light colours" : "Dark colours");
    draw();
    redrawParameters();
    decide?.recolour();
  }
  button.addEventListener("click", () => setTheme(!root.classList.contains("dark")));
  preferred.addEventListener("change", (event) => setTheme(event.matches));
  // Print in the light theme, at the width of the paper.
  let before = false;
  const sized = (width, height) => { for (const place of document.querySelectorAll(".js-plotly-plot")) Plotly.relayout(place, { width, height }); };
  addEventListener("beforeprint", () => { before = root.classList.contains("dark"); setTheme(false); sized(18 * 96 / 2.54, 11 * 96 / 2.54); }); // as in the style of print
  addEventListener("afterprint", () => { sized(null, null); setTheme(before); });
  if (document.getElementById("decide-section")) decide = decisions(data, { css, colour, escaped, pick, redraw: draw });
  if (document.getElementById("parameters-section")) redrawParameters = parameters(data, { css, colour, escaped, pick });
  setTheme(preferred.matches);
  decide?.apply();
  if (picked !== null) pick(picked);
})();
