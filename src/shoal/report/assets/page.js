"use strict";
(() => {
  const data = JSON.parse(document.getElementById("shoal-data").textContent);
  const root = document.documentElement;
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const series = (number) => colour(`--s${number % 8}`);
  const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const several = data.labels.length > 1;
  const tones = {
    better: "--good", fixed: "--good", worse: "--bad", failed: "--bad", "failed-in-both": "--bad",
    "too-few-starts": "--unsure", "no-difference": "--quiet",
  };
  const config = {
    displaylogo: false, responsive: false,
    displayModeBar: "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
  };

  const number = (value) => {
    const size = Math.abs(value);
    if (size !== 0 && (size >= 1e9 || size < 1e-4)) return value.toExponential(2);
    if (size >= 100) return value.toLocaleString("en", { maximumFractionDigits: 0 });
    return value.toLocaleString("en", { minimumSignificantDigits: 3, maximumSignificantDigits: 3 });
  };
  const percent = (value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(1)}%`;

  const wrapped = (text, width) => {
    const limit = Math.max(16, Math.floor(width / 6.6));
    const lines = [""];
    for (const word of text.split(" ")) {
      const line = lines[lines.length - 1];
      if (line && line.length + 1 + word.length > limit) lines.push(word);
      else lines[lines.length - 1] = line ? `${line} ${word}` : word;
    }
    return { html: lines.map(escape).join("<br>"), count: lines.length };
  };

  const axis = (extra) => Object.assign({
    gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--line"),
    tickfont: { color: colour("--muted"), size: 11 }, title: { font: { color: colour("--muted"), size: 11.5 } },
    automargin: true, exponentformat: "none", separatethousands: true,
  }, extra);
  const titled = (text) => ({ text: escape(text), font: { color: colour("--muted"), size: 11.5 }, standoff: 6 });
  const layout = (width, height, extra) => Object.assign({
    width, height, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--ink") },
    margin: { l: 6, r: 12, t: 8, b: 36 }, showlegend: false, hovermode: "closest", dragmode: "zoom",
    hoverlabel: {
      bgcolor: colour("--paper"), bordercolor: colour("--muted"), align: "left",
      font: { color: colour("--ink"), size: 12, family: getComputedStyle(document.body).fontFamily },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--accent") },
  }, extra);

  /* Lines of a chart, each with its label above it: readable at any width, and never cut. */
  const stack = (labels, width, marks) => {
    const places = [];
    let top = 0;
    for (const label of labels) {
      const text = wrapped(label.text, width - 24);
      const space = text.count * 15 + 4;
      places.push({ label: top, centre: top + space + marks / 2, html: text.html, colour: label.colour });
      top += space + marks + 8;
    }
    return {
      places, height: top,
      axis: axis({ range: [top, 0], showgrid: false, zeroline: false, showticklabels: false, fixedrange: true, automargin: false }),
      annotations: places.map((place) => ({
        xref: "paper", x: 0, xanchor: "left", yref: "y", y: place.label, yanchor: "top", showarrow: false,
        text: place.html, align: "left", bgcolor: colour("--paper"), borderpad: 1, font: { size: 11.5, color: place.colour || colour("--ink") },
      })),
    };
  };
  const segments = (items) => {
    const x = [], y = [];
    for (const [from, to, at] of items) { x.push(from, to, null); y.push(at, at, null); }
    return { x, y };
  };

  const decades = (values, width) => {
    const low = Math.floor(Math.log10(Math.min(...values))), high = Math.ceil(Math.log10(Math.max(...values)));
    const steps = (high - low) * 3 * 40 < width ? [1, 2, 5] : [1];
    const tickvals = [];
    for (let power = low; power <= high; power += 1) for (const step of steps) tickvals.push(step * 10 ** power);
    return { tickvals, ticktext: tickvals.map((value) => value.toLocaleString("en", { maximumSignificantDigits: 1 })) };
  };

  const drawOverview = (element, group) => {
    const width = element.clientWidth, count = data.labels.length, marks = 13 * count;
    const labels = group.rows.map((row) => {
      const failed = row.failed.some((error) => error !== null);
      return { text: row.label + (failed ? "  failed" : ""), colour: failed ? colour("--bad") : "" };
    });
    const lines = stack(labels, width, marks);
    const traces = [];
    data.labels.forEach((label, report) => {
      const shown = group.rows.map((row, index) => ({ row, index, item: row.series[report] })).filter(({ item }) => item);
      const at = ({ index }) => lines.places[index].centre + 13 * (report - (count - 1) / 2);
      const base = { mode: "lines", hoverinfo: "skip" };
      traces.push(Object.assign(segments(shown.map((entry) => [entry.item.quantiles[0], entry.item.quantiles[4], at(entry)])),
        base, { opacity: 0.55, line: { color: series(report), width: 1.25 } }));
      traces.push(Object.assign(segments(shown.map((entry) => [entry.item.quantiles[1], entry.item.quantiles[3], at(entry)])),
        base, { opacity: 0.4, line: { color: series(report), width: 7 } }));
      traces.push({
        mode: "markers", x: shown.map(({ item }) => item.quantiles[2]), y: shown.map(at),
        marker: { color: series(report), size: 8, line: { color: colour("--paper"), width: 1.5 } },
        text: shown.map(({ row, item }) => {
          const q = item.quantiles.map(number);
          return `${several ? `<b>${escape(label)}</b>  ` : ""}${escape(row.label)}<br>p50 <b>${q[2]}</b> ${escape(group.unit)}` +
            `<br>p25 to p75: ${q[1]} to ${q[3]}<br>p5 to p95: ${q[0]} to ${q[4]}` +
            `<br>${item.starts} starts, ${item.samples.toLocaleString("en")} samples`;
        }),
        hovertemplate: "%{text}<extra></extra>",
      });
    });
    const ends = group.rows.flatMap((row) => row.series.flatMap((item) => (item ? [item.quantiles[0], item.quantiles[4]] : [])));
    const scale = group.isLog ? Object.assign({ type: "log" }, decades(ends.filter((end) => end > 0), width)) : {};
    Plotly.react(element, traces, layout(width, lines.height + 48, {
      xaxis: axis(Object.assign({ title: titled([`${group.unit}${group.isLog ? " (logarithmic)" : ""}`.trim(), "dot p50, bar p25 to p75, line p5 to p95"].filter(Boolean).join("  ·  ")), zeroline: false }, scale)),
      yaxis: lines.axis, annotations: lines.annotations,
    }), config);
  };

  const drawSpread = (element, row) => {
    const width = element.clientWidth, spread = row.spread, traces = [], shapes = [], annotations = [];
    const ticks = { values: [], text: [] };
    let offset = 0;
    spread.reports.forEach((item, report) => {
      if (!item) return;
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
        mode: "markers", x, y, customdata: names, marker: { color: series(report), size: 3.5, opacity: 0.4 },
        hovertemplate: `start %{customdata}: %{y:.4~g} ${escape(spread.unit)}<extra></extra>`,
      });
      item.medians.forEach((median, start) => shapes.push({
        type: "line", x0: offset + start + 0.6, x1: offset + start + 1.4, y0: median, y1: median,
        line: { color: series(report), width: 2.5 },
      }));
      shapes.push({
        type: "line", x0: offset + 0.5, x1: offset + total + 0.5, y0: item.median, y1: item.median,
        line: { color: colour("--muted"), width: 1, dash: "dot" },
      });
      if (several) annotations.push({
        xref: "x", x: offset + 0.6, xanchor: "left", yref: "paper", y: 1, yanchor: "bottom", showarrow: false,
        text: `<b>${escape(data.labels[report])}</b>`, font: { color: series(report), size: 12 },
      });
      offset += total + 1;
    });
    const every = Math.max(1, Math.ceil(ticks.values.length * 22 / Math.max(width - 60, 1)));
    const kept = (_, index) => index % every === 0;
    Plotly.react(element, traces, layout(width, 300, {
      margin: { l: 6, r: 12, t: several ? 26 : 10, b: 40 },
      xaxis: axis({
        title: titled("process start; its samples from left to right in time, its median as a line"), range: [0.3, Math.max(offset - 0.3, 1.7)],
        tickvals: ticks.values.filter(kept), ticktext: ticks.text.filter(kept), showgrid: false, zeroline: false,
      }),
      yaxis: axis({ title: titled(spread.unit), zeroline: false }), shapes, annotations,
    }), config);
  };

  const drawForest = (element, rows) => {
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

  const draw = () => {
    const forest = document.getElementById("forest");
    if (forest) drawForest(forest, data.forest);
    data.groups.forEach((group, index) => {
      const overview = document.getElementById(`overview-${index}`), spread = document.getElementById(`spread-${index}`);
      if (overview) drawOverview(overview, group);
      if (spread && spread.clientWidth) drawSpread(spread, group.rows[document.getElementById(`pick-${index}`).value]);
    });
  };

  data.groups.forEach((group, index) => {
    const pick = document.getElementById(`pick-${index}`);
    if (!pick) return;
    const redraw = () => { const spread = document.getElementById(`spread-${index}`); if (spread.clientWidth) drawSpread(spread, group.rows[pick.value]); };
    pick.addEventListener("change", redraw);
    pick.closest("details").addEventListener("toggle", redraw);
  });

  const dark = matchMedia("(prefers-color-scheme: dark)");
  const button = document.getElementById("theme");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const name = () => { button.textContent = isDark() ? "light theme" : "dark theme"; };
  const remember = (theme) => { try { localStorage.setItem("shoal-theme", theme); } catch { /* a page from disk may not store */ } };
  try { const theme = localStorage.getItem("shoal-theme"); if (theme) root.dataset.theme = theme; } catch { /* as above */ }
  button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remember(root.dataset.theme); name(); draw(); });
  dark.addEventListener("change", () => { name(); draw(); });
  let timer = 0, last = root.clientWidth;
  addEventListener("resize", () => {
    if (root.clientWidth === last) return;
    last = root.clientWidth;
    clearTimeout(timer);
    timer = setTimeout(draw, 120);
  });
  name();
  draw();
})();
