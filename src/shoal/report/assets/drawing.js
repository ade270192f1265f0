/* Draws the figures of the page's data: in the colours of the theme, and fitted to the width of their place. */
const data = JSON.parse(document.getElementById("shoal-data").textContent);
const root = document.documentElement;
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const config = {
  displaylogo: false, responsive: false,
  displayModeBar: "hover", modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
};

/* Figures have the colours of the light theme; here they get those of the theme that is shown. */
const faded = (hex, opacity) => {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},${opacity})`;
};
const ofTheme = (text) => {
  if (data.palette[text]) return colour(data.palette[text]);
  const parts = /^rgba\((\d+),(\d+),(\d+),([\d.]+)\)$/.exec(text);
  if (!parts) return text;
  const hex = `#${parts.slice(1, 4).map((part) => Number(part).toString(16).padStart(2, "0")).join("")}`;
  return data.palette[hex] ? faded(colour(data.palette[hex]), parts[4]) : text;
};
const VALUES = new Set(["x", "y", "text", "ticktext", "tickvals", "customdata", "meta", "categoryarray"]);
const themed = (part) => {
  if (typeof part === "string") return ofTheme(part);
  if (Array.isArray(part)) return typeof part[0] === "number" && typeof part[1] !== "string" ? part : part.map(themed);
  if (part === null || typeof part !== "object") return part;
  if (part.list !== undefined) return data.lists[part.list];
  return Object.fromEntries(Object.entries(part).map(([name, value]) => [name, name === "color" && value?.list !== undefined
    ? data.lists[value.list].map((each) => (typeof each === "string" ? ofTheme(each) : each)) : VALUES.has(name) && !(value && value.list !== undefined) ? value : themed(value)]));
};

const axis = (own) => Object.assign({
  gridcolor: colour("--line"), linecolor: colour("--line"), zerolinecolor: colour("--muted"),
  tickfont: { color: colour("--muted"), size: 11 }, automargin: true, exponentformat: "none", separatethousands: true,
}, own, own.title ? { title: Object.assign({ font: { color: colour("--muted"), size: 11.5 } }, own.title) } : {});

/* As many ticks as there is room for, each of `space` pixels; the last is kept, or the first. */
const thinned = (own, length, space, isFirstKept = false) => {
  if (!own.tickvals) return own;
  const every = Math.max(1, Math.ceil(own.tickvals.length * space / length));
  const kept = (_, index) => (isFirstKept ? index : own.tickvals.length - 1 - index) % every === 0;
  return Object.assign({}, own, { tickvals: own.tickvals.filter(kept), ticktext: own.ticktext?.filter(kept) });
};

const wrapped = (text, width) => {
  const limit = Math.max(16, Math.floor(width / 6.6)), lines = [""];
  for (const word of text.split(" ")) {
    const line = lines[lines.length - 1];
    if (line && line.length + 1 + word.length > limit) lines.push(word);
    else lines[lines.length - 1] = line ? `${line} ${word}` : word;
  }
  return lines;
};

/* Rows below each other: labels in as many lines as they need at this width, each above its marks. */
const stack = (layout, width) => {
  const { labels, marks } = layout.meta, lines = labels.map((label) => wrapped(label, width - 24).map(escape));
  const most = Math.max(1, ...lines.map((each) => each.length)), row = 16 * (most + marks) + 10;
  layout.annotations = layout.annotations.map((each, index) => Object.assign({}, each, {
    text: lines[index].join("<br>"), yshift: (0.3 * (marks - 1) / 2 / Math.max(marks, 2)) * row + 7,
  }));
  layout.height = row * labels.length + 60;
  layout.margin = Object.assign({}, layout.margin, { t: 8 * most + 8 });
};

const drawPlot = (element, plot) => {
  const width = element.clientWidth, set = data.sets[plot.set];
  const { data: found, layout: own } = themed(plot.figures[choiceOf(plot)] || plot.figures[0]);
  const traces = found.filter((trace) => !(set && trace.meta && set.series[trace.meta.series]?.isHidden));
  const family = getComputedStyle(document.body).fontFamily;
  const layout = Object.assign({
    width, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: "zoom",
    font: { family, size: 12, color: colour("--ink") },
    hoverlabel: {
      bgcolor: colour("--paper"), bordercolor: colour("--muted"), align: "left",
      font: { color: colour("--ink"), size: 12, family },
    },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--muted"), activecolor: colour("--accent") },
  }, own);
  if (layout.meta.labels) stack(layout, width);
  if (layout.meta.cells) {
    const cell = Math.min(44, Math.max(14, (width - 70) / layout.meta.cells));
    Object.assign(layout, { width: Math.min(width, cell * layout.meta.cells + 90), height: cell * layout.meta.cells + 62 });
    for (const trace of traces) {
      trace.marker.size = cell - 3;
      if (cell < 30) trace.mode = "markers";
    }
  }
  layout.yaxis.title = Object.assign({}, layout.yaxis.title, { text: wrapped(layout.yaxis.title?.text ?? "", layout.height - 70).join("<br>") });
  layout.xaxis = axis(thinned(layout.xaxis, width - 70, 42, layout.meta.kind === "histogram"));
  layout.yaxis = axis(thinned(layout.yaxis, layout.height - 60, 22));
  Plotly.react(element, traces, layout, config);
};
