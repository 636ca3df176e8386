"use strict";
// Limits on the front, another axis for its figure, and two points side by side.
function decisions(data, { css, colour, escaped, pick, redraw }) {
  const { points, measures, metric, higher } = data.decide;
  const onFront = [...document.querySelectorAll("button.row")].map((row) => Number(row.dataset.trial));
  const all = Object.keys(points).map(Number);
  const sliders = new Map();
  const element = (name, parts = {}) => Object.assign(document.createElement(name), parts);
  const better = (left, right) => higher ? left > right : left < right;
  const short = (value) => String(Number(value.toPrecision(4)));
  let axis = measures[0]?.key, selected = null;

  // One slider for each measure and one for the metric; each steps through the values there are, so that every step matters.
  const wanted = measures.map((measure) => ({ ...measure, label: `${measure.name} at most`, of: (trial) => points[trial].amounts[measure.key], text: (trial) => points[trial].texts[measure.key], loose: "last", keeps: (value, limit) => value <= limit }));
  wanted.push({ key: "metric", label: `${metric} at ${higher ? "least" : "most"}`, of: (trial) => points[trial].value, text: (trial) => short(points[trial].value), loose: higher ? "first" : "last", keeps: (value, limit) => higher ? value >= limit : value <= limit });
  for (const slider of wanted) {
    const trials = onFront.filter((trial) => points[trial]).sort((a, b) => slider.of(a) - slider.of(b));
    if (trials.length < 2) continue;
    const start = slider.loose === "last" ? trials.length - 1 : 0;
    const input = element("input", { type: "range", id: `limit-${slider.key}`, min: 0, max: trials.length - 1, step: 1, value: start });
    const output = element("output", { htmlFor: input.id });
    const label = element("label", { htmlFor: input.id, textContent: slider.label });
    const box = element("div", { className: "limit" });
    box.append(label, input, output);
    document.getElementById("limits").append(box);
    const at = () => trials[Number(input.value)];
    const tell = () => { output.textContent = free() ? "no limit" : slider.text(at()); input.setAttribute("aria-valuetext", output.textContent); };
    const free = () => Number(input.value) === start;
    sliders.set(slider.key, { holds: (trial) => free() || slider.keeps(slider.of(trial), slider.of(at())), line: () => free() ? null : slider.of(at()), reset: () => { input.value = start; tell(); } });
    input.addEventListener("input", () => { tell(); apply(); });
    tell();
  }
  function remaining() { return onFront.filter((trial) => points[trial] && [...sliders.values()].every((slider) => slider.holds(trial))); }
  function best(trials) { return trials.reduce((top, trial) => top === null || better(points[trial].value, points[top].value) ? trial : top, null); }
  function apply() {
    const left = new Set(remaining());
    for (const row of document.querySelectorAll("button.row")) row.closest("tr").hidden = points[row.dataset.trial] !== undefined && !left.has(Number(row.dataset.trial));
    const top = best([...left]), say = document.getElementById("remains");
    say.textContent = top === null ? "Nothing on the front is within these limits." :
      `${left.size} of ${onFront.length} points remain. Best: trial ${top}, ${metric} ${short(points[top].value)}, ${measures.map((measure) => `${measure.name} ${points[top].texts[measure.key]}`).join(", ")}.`;
    document.getElementById("pick-remaining").disabled = top === null;
    redraw();
  }
  document.getElementById("pick-remaining").addEventListener("click", () => { const top = best(remaining()); if (top !== null) pick(top); });
  document.getElementById("no-limits").addEventListener("click", () => { for (const slider of sliders.values()) slider.reset(); apply(); });

  if (measures.length > 1) {
    document.getElementById("axes").hidden = false;
    document.getElementById("axis").append(...measures.map((measure) => element("option", { value: measure.key, textContent: measure.name })));
    document.getElementById("axis").addEventListener("change", (event) => { axis = event.target.value; redraw(); });
  }
  // The front's figure over another measure: its own points, and which of them nothing beats there.
  function traces() {
    const sorted = all.toSorted((a, b) => points[a].amounts[axis] - points[b].amounts[axis] || (higher ? -1 : 1) * (points[a].value - points[b].value));
    const front = [];
    for (const trial of sorted) if (!front.length || better(points[trial].value, points[front.at(-1)].value)) front.push(trial);
    const others = all.filter((trial) => !front.includes(trial)), name = measures.find((measure) => measure.key === axis).name;
    const drawn = (trials, parts) => ({ type: "scatter", x: trials.map((trial) => points[trial].amounts[axis]), y: trials.map((trial) => points[trial].value), customdata: trials, text: trials.map((trial) => escaped(`trial ${trial}: ${metric} ${short(points[trial].value)}, ${name} ${points[trial].texts[axis]}`)), hoverinfo: "text", ...parts });
    return [
      drawn(others, { mode: "markers", name: "other trials", marker: { color: colour("other"), size: 7 } }),
      drawn(front, { mode: "lines+markers", name: `front by ${name}`, line: { shape: "hv", color: colour("front") }, marker: { color: colour("front"), size: 9 } }),
    ];
  }
  function adapt(drawn, layout) {
    const other = axis !== measures[0]?.key, line = (parts) => ({ type: "line", xref: "x", yref: "y", line: { color: css("--accent"), width: 1.5, dash: "dash" }, ...parts });
    if (other) { drawn = traces(); layout.xaxis = { ...layout.xaxis, title: { text: measures.find((measure) => measure.key === axis).name } }; }
    const most = sliders.get(axis)?.line() ?? null, least = sliders.get("metric")?.line() ?? null;
    layout.shapes = [];
    if (most !== null) layout.shapes.push(line({ x0: most, x1: most, yref: "paper", y0: 0, y1: 1 }));
    if (least !== null) layout.shapes.push(line({ xref: "paper", x0: 0, x1: 1, y0: least, y1: least }));
    return [drawn, layout];
  }

  // Two points side by side.
  const choices = document.getElementById("compare");
  function normal(z) { // the standard normal distribution function, within 1e-7 (Abramowitz and Stegun 26.2.17)
    const t = 1 / (1 + 0.2316419 * Math.abs(z)), tail = Math.exp(-z * z / 2) / Math.sqrt(2 * Math.PI) * t * (0.31938153 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))));
    return z > 0 ? 1 - tail : tail;
  }
  function verdict(one, two) {
    const [a, b] = [points[one], points[two]], ahead = better(a.value, b.value) ? one : two, behind = ahead === one ? two : one;
    const gap = Math.abs(a.value - b.value), text = `Trial ${ahead} is ahead of trial ${behind} by ${short(gap)} in ${metric}`;
    if (gap === 0) return `Both have the same ${metric}.`;
    if (a.std === null || b.std === null) return `${text}. The chance that it is better is not known, since they were not both repeated (confirm: in the study file).`;
    const chance = normal(gap / Math.max(Math.hypot(a.std, b.std), 1e-300));
    return `${text}; the chance that it is better is ${chance > 0.99 ? "over 99" : Math.round(100 * chance)} % (${a.runs} and ${b.runs} runs).`;
  }
  function compare() {
    const one = selected, two = Number(choices.value);
    if (!points[one] || !points[two]) { document.getElementById("verdict").textContent = "Select a completed trial."; return; }
    document.getElementById("verdict").textContent = verdict(one, two);
    document.getElementById("this-one").textContent = `trial ${one}`;
    document.getElementById("other-one").textContent = `trial ${two}`;
    const rows = (trial) => new Map([[metric, short(points[trial].value)], ...measures.map((each) => [each.name, points[trial].texts[each.key]]), ...data.trials[trial].settings]);
    const [ours, theirs] = [rows(one), rows(two)], names = [...new Set([...ours.keys(), ...theirs.keys()])].filter((name) => ours.get(name) !== theirs.get(name));
    document.getElementById("differences").replaceChildren(...names.map((name) => {
      const row = element("tr");
      row.append(...[name, ours.get(name) ?? "", theirs.get(name) ?? ""].map((text) => element("td", { textContent: text })));
      return row;
    }));
    const place = document.getElementById("plot-comparison"), curves = [one, two].filter((trial) => points[trial].curve.length > 1);
    place.hidden = curves.length === 0;
    if (!curves.length || !document.getElementById("comparison").open) return;
    const style = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
    Plotly.react(place, curves.map((trial) => ({ type: "scatter", mode: "lines+markers", name: `trial ${trial}`, x: points[trial].curve.map((at) => at[0]), y: points[trial].curve.map((at) => at[1]), line: { color: colour(trial === one ? "front" : "other") } })), {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), family: "system-ui, Liberation Sans, sans-serif" }, margin: { l: 50, r: 10, t: 10, b: 40 },
      xaxis: { ...style, title: { text: "samples trained on" } }, yaxis: { ...style, title: { text: escaped(metric) } }, showlegend: true, legend: { orientation: "h", y: 1.12 },
    }, { displayModeBar: false, responsive: true });
  }
  function select(trial) {
    selected = trial;
    const kept = Number(choices.value), others = onFront.filter((other) => other !== trial && points[other]);
    choices.replaceChildren(...others.map((other) => element("option", { value: other, textContent: `${other}: ${metric} ${short(points[other].value)}, ${points[other].texts[measures[0].key]}` })));
    if (others.includes(kept)) choices.value = kept;
    document.getElementById("comparison").hidden = others.length === 0;
    if (others.length) compare();
  }
  choices.addEventListener("change", compare);
  document.getElementById("comparison").addEventListener("toggle", compare);
  return { adapt, apply, select, recolour: () => { if (selected !== null && choices.value) compare(); } };
}
