/* Plots of lines with their bands, and the map of who waited for whom. */
const DASHES = ["solid", "dash", "dashdot"];

const lineTraces = (line, set, view, plot) => {
  const isIdeal = line.style === "ideal", entry = isIdeal ? null : set.series[line.series];
  const shade = isIdeal ? colour("--muted") : series(entry.colour);
  const points = line.x.map((x, index) => index).filter((index) => !(view.x.isLog && line.x[index] <= 0));
  const at = (values) => points.map((index) => (plot.y.isLog && values[index] <= 0 ? null : values[index]));
  const x = points.map((index) => line.x[index]);
  const traces = [];
  if (line.low && line.style === "line") {
    const low = at(line.low), high = at(line.high);
    const kept = x.map((_, index) => index).filter((index) => low[index] !== null && high[index] !== null);
    traces.push({
      mode: "lines", x: [...kept.map((index) => x[index]), ...kept.map((index) => x[index]).reverse()],
      y: [...kept.map((index) => high[index]), ...kept.map((index) => low[index]).reverse()],
      fill: "toself", fillcolor: faded(shade, 0.14), line: { width: 0 }, hoverinfo: "skip",
    });
  }
  const name = isIdeal ? "ideal" : `${entry.label}${line.style === "predicted" ? ", predicted" : ""}`;
  const dash = isIdeal ? "dot" : line.style === "predicted" ? "dash" : DASHES[line.report % DASHES.length];
  const isShort = points.length < 25 && line.style === "line" && !plot.y.isPercentile;
  const trace = {
    mode: line.style === "points" || isShort ? "lines+markers" : "lines", x, y: at(line.y), connectgaps: false,
    line: { color: shade, width: isIdeal ? 1.25 : 2, dash }, marker: { size: isShort ? 4 : 7, color: shade },
    text: points.map((index) => {
      const along = `${number(line.x[index])} ${view.x.unit || view.x.title}`, value = `${number(line.y[index])} ${plot.y.unit}`;
      const band = line.low ? `<br>starts: ${number(line.low[index])} to ${number(line.high[index])}` : "";
      return plot.y.isPercentile
        ? `<b>${escape(name)}</b><br>${line.y[index]}% within ${escape(along)}`
        : `<b>${escape(name)}</b><br>${escape(value)} at ${escape(along)}${band}`;
    }),
    hovertemplate: "%{text}<extra></extra>",
  };
  if (line.style === "points" && line.low) {
    trace.error_y = {
      type: "data", symmetric: false, color: shade, thickness: 1, width: 3,
      array: line.high.map((value, index) => Math.max(0, value - line.y[index])),
      arrayminus: line.low.map((value, index) => Math.max(0, line.y[index] - value)),
    };
  }
  return [...traces, trace];
};

const doublings = (values, width) => {
  const most = Math.max(...values), tickvals = [];
  for (let size = 1; size <= most * 1.01; size *= 2) tickvals.push(size);
  for (const value of values) if (!tickvals.includes(value) && values.length < 8) tickvals.push(value);
  tickvals.sort((a, b) => a - b);
  const every = Math.max(1, Math.ceil(tickvals.length * 38 / width));
  const kept = tickvals.filter((_, index) => (tickvals.length - 1 - index) % every === 0);
  const margin = Math.log10(most / Math.min(...values)) * 0.04 + 0.02;
  return {
    type: "log", tickvals: kept, ticktext: kept.map((value) => value.toLocaleString("en")),
    range: [Math.log10(Math.min(...values)) - margin, Math.log10(most) + margin],
  };
};

const drawLines = (element, plot) => {
  const set = data.sets[plot.set], width = element.clientWidth, height = 300;
  const view = plot.views[choiceOf(plot)] || plot.views[0];
  const lines = view.lines.filter((line) => line.style === "ideal" || !set.series[line.series].isHidden);
  const traces = lines.flatMap((line) => lineTraces(line, set, view, plot));
  const along = [...new Set(lines.flatMap((line) => line.x))].filter((x) => x > 0 || !(view.x.isLog || view.x.isDoubling));
  const values = lines.flatMap((line) => line.y).filter((value) => value > 0);
  const x = { title: titled(view.x.title), zeroline: false };
  if (view.x.isDoubling && along.length) Object.assign(x, doublings(along, width - 70));
  else if (view.x.isLog && along.length) Object.assign(x, decades(along, width - 70));
  const y = { title: titled(plot.y.title), zeroline: false };
  if (plot.y.isPercentile) Object.assign(y, { range: [0, 100], tickvals: [0, 25, 50, 75, 95], ticksuffix: "%" });
  else if (plot.y.isLog && values.length) Object.assign(y, decades(values, height - 60, 26));
  else if (plot.y.isShare && plot.views.length === 1) Object.assign(y, { rangemode: "tozero" });
  Plotly.react(element, traces, layout(width, height, {
    margin: { l: 6, r: 14, t: 8, b: 36 }, xaxis: axis(x), yaxis: axis(y),
  }), config);
};

const drawWaits = (element, plot) => {
  const width = element.clientWidth, count = plot.names.length, cell = Math.min(44, Math.max(14, (width - 70) / count));
  const names = plot.names.map(escape), x = [], y = [], values = [], hover = [];
  plot.values.forEach((line, row) => line.forEach((value, column) => {
    if (value === null) return;
    x.push(names[column]);
    y.push(names[row]);
    values.push(value);
    hover.push(`${names[row]} waited <b>${number(value)} ${escape(plot.unit)}</b> for ${names[column]}`);
  }));
  Plotly.react(element, [{
    mode: cell >= 30 ? "markers+text" : "markers", x, y, customdata: hover, hovertemplate: "%{customdata}<extra></extra>",
    text: values.map((value) => value.toLocaleString("en", { maximumSignificantDigits: 2 })), textfont: { size: 11 },
    marker: {
      symbol: "square", size: cell - 3, color: values, cmin: 0, cmax: plot.longest || 1,
      colorscale: [[0, colour("--faint")], [1, colour("--s0")]], showscale: false, line: { width: 0 },
    },
  }], layout(Math.min(width, cell * count + 90), cell * count + 62, {
    margin: { l: 6, r: 8, t: 8, b: 40 },
    xaxis: axis({ title: titled(`waited for (${plot.unit})`), type: "category", categoryarray: names, range: [-0.5, count - 0.5], showgrid: false, fixedrange: true }),
    yaxis: axis({ title: titled("who waited"), type: "category", categoryarray: names, range: [count - 0.5, -0.5], showgrid: false, fixedrange: true }),
  }), config);
};
