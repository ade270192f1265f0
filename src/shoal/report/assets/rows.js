/* Plots of rows: all on one axis, one of them closer, the changes of a comparison, and histograms. */

/* What the marks mean, as far as any row has them. */
const legendOf = (group) => {
  const items = group.rows.flatMap((row) => row.series).filter(Boolean), has = (place) => items.some((item) => item.quantiles[place] !== null);
  return ["dot p50", has(1) && "bar p25 to p75", has(0) && "line p5 to p95", items.some((item) => item.few.length > 1) && "small dots samples"].filter(Boolean).join(", ");
};

const drawOverview = (element, group) => {
  const width = element.clientWidth, count = group.labels.length, marks = 13 * count;
  const labels = group.rows.map((row) => {
    const failed = row.failed.some((error) => error !== null);
    return { text: row.label + (failed ? "  failed" : ""), colour: failed ? colour("--bad") : "" };
  });
  const lines = stack(labels, width, marks);
  const traces = [];
  group.labels.forEach((label, report) => {
    const shade = series(group.colours[report]);
    const shown = group.rows.map((row, index) => ({ row, index, item: row.series[report] })).filter(({ item }) => item);
    const at = ({ index }) => lines.places[index].centre + 13 * (report - (count - 1) / 2);
    const base = { mode: "lines", hoverinfo: "skip" };
    /* a percentile that too few samples leave unknown is null */
    const spans = (entries, low, high) => entries.filter(({ item }) => item.quantiles[low] !== null)
      .map((entry) => [entry.item.quantiles[low], entry.item.quantiles[high], at(entry)]);
    const few = shown.flatMap((entry) => entry.item.few.map((sample) => [sample, at(entry)]));
    traces.push({ mode: "markers", hoverinfo: "skip", x: few.map(([x]) => x), y: few.map(([, y]) => y), marker: { color: shade, size: 4, opacity: 0.55 } });
    traces.push(Object.assign(segments(spans(shown, 0, 4)),
      base, { opacity: 0.55, line: { color: shade, width: 1.25 } }));
    traces.push(Object.assign(segments(spans(shown, 1, 3)),
      base, { opacity: 0.4, line: { color: shade, width: 7 } }));
    traces.push({
      mode: "markers", x: shown.map(({ item }) => item.quantiles[2]), y: shown.map(at),
      marker: { color: shade, size: 8, line: { color: colour("--paper"), width: 1.5 } },
      text: shown.map(({ row, item }) => {
        const q = item.quantiles.map((value) => (value === null ? null : number(value)));
        return `${count > 1 ? `<b>${escape(label)}</b>  ` : ""}${escape(row.label)}<br>p50 <b>${q[2]}</b> ${escape(group.unit)}` +
          (q[1] === null ? "" : `<br>p25 to p75: ${q[1]} to ${q[3]}`) + (q[0] === null ? "" : `<br>p5 to p95: ${q[0]} to ${q[4]}`) +
          `<br>${item.starts} starts, ${item.samples.toLocaleString("en")} samples`;
      }),
      hovertemplate: "%{text}<extra></extra>",
    });
  });
  const ends = group.rows.flatMap((row) => row.series.flatMap((item) => (item ? [...item.quantiles, ...item.few].filter((value) => value !== null) : [])));
  const scale = group.isLog ? decades(ends.filter((end) => end > 0), width) : {};
  Plotly.react(element, traces, layout(width, lines.height + 48, {
    xaxis: axis(Object.assign({ title: titled([`${group.unit}${group.isLog ? " (logarithmic)" : ""}`.trim(), legendOf(group)].filter(Boolean).join("  ·  ")), zeroline: false }, scale)),
    yaxis: lines.axis, annotations: lines.annotations,
  }), config);
};

const drawSpread = (element, plot) => {
  const spread = plot.rows[choiceOf(plot)], several = plot.labels.length > 1;
  const width = element.clientWidth, traces = [], shapes = [], annotations = [];
  const ticks = { values: [], text: [] };
  let offset = 0;
  spread.reports.forEach((item, report) => {
    if (!item) return;
    const shade = series(plot.colours[report]);
    const x = [], y = [], names = [];
    item.starts.forEach((samples, start) => {
      samples.forEach((sample, index) => {
        x.push(offset + start + 1 + (samples.length > 1 ? index / (samples.length - 1) - 0.5 : 0) * 0.76);
        y.push(sample);
        names.push(start + 1);
      });
      ticks.values.push(offset + start + 1);
      ticks.text.push(String(start + 1));
    });
    const total = item.starts.length;
    traces.push({
      mode: "markers", x, y, customdata: names, marker: { color: shade, size: 3.5, opacity: 0.4 },
      hovertemplate: `start %{customdata}: %{y:.4~g} ${escape(spread.unit)}<extra></extra>`,
    });
    item.medians.forEach((median, start) => shapes.push({
      type: "line", x0: offset + start + 0.6, x1: offset + start + 1.4, y0: median, y1: median,
      line: { color: shade, width: 2.5 },
    }));
    shapes.push({
      type: "line", x0: offset + 0.5, x1: offset + total + 0.5, y0: item.median, y1: item.median,
      line: { color: colour("--muted"), width: 1, dash: "dot" },
    });
    if (several) annotations.push({
      xref: "x", x: offset + 0.6, xanchor: "left", yref: "paper", y: 1, yanchor: "bottom", showarrow: false,
      text: `<b>${escape(plot.labels[report])}</b>`, font: { color: shade, size: 12 },
    });
    offset += total + 1;
  });
  const every = Math.max(1, Math.ceil(ticks.values.length * 22 / Math.max(width - 60, 1)));
  const kept = (_, index) => index % every === 0;
  Plotly.react(element, traces, layout(width, 300, {
    margin: { l: 6, r: 12, t: several ? 26 : 10, b: 40 },
    xaxis: axis({
      title: titled(width < 560 ? "process start" : "process start; its samples from left to right in time, its median as a line"), range: [0.3, Math.max(offset - 0.3, 1.7)],
      tickvals: ticks.values.filter(kept), ticktext: ticks.text.filter(kept), showgrid: false, zeroline: false,
    }),
    yaxis: axis({ title: titled(spread.unit), zeroline: false }), shapes, annotations,
  }), config);
};

const drawForest = (element, { rows }) => {
  const width = element.clientWidth;
  const lines = stack(rows.map((row) => ({ text: row.label, colour: row.change === null ? colour(tones[row.verdict]) : "" })), width, 14);
  const traces = [];
  const judged = rows.map((row, index) => ({ row, index })).filter(({ row }) => row.change !== null);
  for (const { row, index } of judged) {
    const shade = colour(tones[row.verdict]), at = lines.places[index].centre;
    if (row.low !== null) traces.push({ mode: "lines", x: [row.low, row.high], y: [at, at], line: { color: shade, width: 2.5 }, hoverinfo: "skip" });
    traces.push({
      mode: "markers", x: [row.change], y: [at],
      marker: { size: 9, color: row.low === null ? colour("--paper") : shade, line: { color: shade, width: 2 } },
      text: [`${escape(row.label)}<br><b>${percent(row.change)}</b><br>${escape(row.text)}`], hovertemplate: "%{text}<extra></extra>",
    });
  }
  const ends = judged.flatMap(({ row }) => [row.low ?? row.change, row.high ?? row.change].map(Math.abs));
  const reach = Math.max(2, ...ends) * 1.08;
  Plotly.react(element, traces, layout(width, lines.height + 48, {
    xaxis: axis({ title: titled("median change; left is worse"), range: [-reach, reach], ticksuffix: "%", zeroline: true, zerolinecolor: colour("--muted"), zerolinewidth: 1.5 }),
    yaxis: lines.axis, annotations: lines.annotations,
  }), config);
};

/* The same percentiles of several reports, beside one another. */
const drawBars = (element, plot) => {
  const row = plot.rows[choiceOf(plot)], width = element.clientWidth;
  const traces = row.reports.map((values, report) => values && {
    type: "bar", name: plot.labels[report], x: row.names, y: values, marker: { color: series(plot.colours[report]) },
    text: values.map((value) => (value === null ? "" : number(value))), textposition: "outside", cliponaxis: false, textfont: { size: 10.5, color: colour("--muted") },
    hovertemplate: `<b>${escape(plot.labels[report])}</b> %{x}: %{text} ${escape(row.unit)}<extra></extra>`,
  }).filter(Boolean);
  Plotly.react(element, traces, layout(width, 290, {
    margin: { l: 6, r: 12, t: 22, b: 30 }, barmode: "group", bargap: 0.28, bargroupgap: 0.06,
    xaxis: axis({ type: "category", showgrid: false }), yaxis: axis({ title: titled(row.unit), rangemode: "tozero", zeroline: false }),
  }), config);
};

/* How many of all were how far behind: one bar for each class of them. */
const drawHistogram = (element, plot) => {
  const width = element.clientWidth;
  Plotly.react(element, [{
    type: "bar", x: plot.behind.map((behind) => behind + (plot.width - 1) / 2), y: plot.shares, width: 0.92 * plot.width,
    marker: { color: series(plot.colour) }, textposition: "none",
    text: plot.names.map((name, index) => `${name} behind: <b>${number(plot.shares[index])}%</b><br>${plot.counts[index].toLocaleString("en")} in all starts`),
    hovertemplate: "%{text}<extra></extra>",
  }], layout(width, 260, {
    xaxis: axis({ title: titled("updates behind"), zeroline: false, showgrid: false }),
    yaxis: axis({ title: titled("% of all"), rangemode: "tozero", zeroline: false }),
  }), config);
};
