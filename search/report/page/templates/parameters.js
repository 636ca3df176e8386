"use strict";
// Every trained trial as a line through its parameters (parallel coordinates), and the metric against one of them (a slice).
function parameters(data, { css, colour, escaped, pick }) {
  const { points, measures, metric } = data.decide, trials = Object.keys(points).map(Number), select = document.getElementById("slice");
  if (trials.length < 2 || !measures.length) { document.getElementById("parameters-section").hidden = true; return () => {}; }
  const onFront = new Set([...document.querySelectorAll("button.row")].map((row) => Number(row.dataset.trial)));
  const short = (value) => Number.isInteger(value) ? String(value) : String(Number(value.toPrecision(3)));
  // A place from 0 to 1 for each value, and the texts along the axis.
  function axis(name, value, choices, log) {
    if (choices) return { name, value, place: (at) => choices.length < 2 ? 0.5 : choices.indexOf(at) / (choices.length - 1), ticks: choices.map((choice, at) => [choices.length < 2 ? 0.5 : at / (choices.length - 1), String(choice)]) };
    const scale = log ? Math.log10 : Number, found = trials.map(value).filter((at) => at !== null && (!log || at > 0)), low = Math.min(...found), high = Math.max(...found);
    if (!found.length) return { name, value, place: () => null, ticks: [] };
    return { name, value, place: (at) => high > low ? (scale(at) - scale(low)) / (scale(high) - scale(low)) : 0.5, ticks: high > low ? [[0, short(low)], [1, short(high)]] : [[0.5, short(low)]] };
  }
  const axes = Object.entries(data.colourings).map(([name, by]) => axis(name, (trial) => by.values[trial] ?? null, by.choices, by.log));
  axes.push(axis(measures[0].name, (trial) => points[trial].amounts[measures[0].key], null, true), axis(metric, (trial) => points[trial].value, null, false));
  const told = (trial) => escaped(`trial ${trial}: ${axes.map((at) => [at, at.value(trial)]).filter(([, value]) => value !== null).map(([at, value]) => `${at.name} ${typeof value === "number" ? short(value) : value}`).join(", ")}`);
  function lines(some, name, parts) {
    return {
      type: "scatter", mode: "lines+markers", marker: { size: 3 }, name, hoverinfo: "text", connectgaps: false, ...parts,
      x: some.flatMap(() => [...axes.keys(), null]), y: some.flatMap((trial) => [...axes.map((at) => { const value = at.value(trial); return value === null ? null : at.place(value); }), null]),
      customdata: some.flatMap((trial) => [...axes.map(() => trial), null]), text: some.flatMap((trial) => [...axes.map(() => told(trial)), ""]),
    };
  }
  function look(narrow) {
    return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), family: "system-ui, Liberation Sans, sans-serif", size: narrow ? 10 : 13 }, hovermode: "closest", legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0 }, showlegend: true };
  }
  function react(id, traces, layout) {
    const place = document.getElementById(id);
    Plotly.react(place, traces, layout, { displayModeBar: false, responsive: true });
    if (place.listening) return;
    place.listening = true;
    place.on("plotly_click", (event) => { const trial = event.points[0].customdata; if (trial !== undefined && trial !== null) pick(trial); });
  }
  const members = trials.filter((trial) => onFront.has(trial)), others = trials.filter((trial) => !onFront.has(trial));
  function draw() {
    const narrow = innerWidth < 740, line = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, fixedrange: true };
    const ends = axes.flatMap((at, x) => at.ticks.map(([y, text]) => ({ x, y, text: escaped(text), showarrow: false, yshift: y === 0 ? -11 : y === 1 ? 11 : 0, xshift: at.ticks.length > 2 && y > 0 && y < 1 ? 14 : 0, font: { color: css("--quiet"), size: narrow ? 9 : 12 } })));
    react("plot-parallel", [lines(others, "other trials", { line: { color: colour("other"), width: 1 }, opacity: 0.55 }), lines(members, "front", { line: { color: colour("front"), width: 2.2 } })], {
      ...look(narrow), annotations: ends, margin: { l: 40, r: 40, t: 20, b: 95 },
      xaxis: { ...line, tickvals: [...axes.keys()], ticktext: axes.map((at) => escaped(at.name)), range: [-0.2, axes.length - 0.8], automargin: true, ticklabelstandoff: 14 }, yaxis: { ...line, visible: false, range: [-0.06, 1.06] },
    });
    const by = data.colourings[select.value], chosen = axes.find((at) => at.name === select.value);
    const dots = (some, name, tone, size) => { const shown = some.filter((trial) => chosen.value(trial) !== null); return { type: "scatter", mode: "markers", name, hoverinfo: "text", x: shown.map((trial) => by.choices ? escaped(chosen.value(trial)) : chosen.value(trial)), y: shown.map((trial) => points[trial].value), customdata: shown, text: shown.map(told), marker: { color: colour(tone), size } }; };
    react("plot-slice", [dots(others, "other trials", "other", 7), dots(members, "front", "front", 9)], {
      ...look(narrow), margin: { l: 50, r: 10, t: 10, b: 85 }, xaxis: { ...line, type: by.choices ? "category" : by.log ? "log" : "linear", title: { text: escaped(select.value) }, automargin: true, ...(by.log ? { dtick: "D2" } : {}), ...(by.choices ? { categoryorder: "array", categoryarray: by.choices.map((choice) => escaped(choice)) } : {}) }, yaxis: { ...line, title: { text: escaped(metric) }, automargin: true },
    });
  }
  select.addEventListener("change", draw);
  return draw;
}
