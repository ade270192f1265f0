/* What all plots share: colours of the theme, numbers, axes and labels. */
const data = JSON.parse(document.getElementById("shoal-data").textContent);
const root = document.documentElement;
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const series = (number) => colour(`--s${number % 12}`);
const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
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

/* Ticks of a logarithmic axis of `length` pixels, of which a label takes `space`. */
const decades = (values, length, space = 40) => {
  const least = Math.log10(Math.min(...values)), most = Math.log10(Math.max(...values));
  const low = Math.floor(least), high = Math.ceil(most);
  const room = length / space, span = Math.max(most - least, 0.1);
  const steps = span * 3 < room ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((span + 1) / room));
  const tickvals = [];
  for (let power = low; power <= high; power += every) for (const step of steps) tickvals.push(step * 10 ** power);
  return { type: "log", tickvals, ticktext: tickvals.map(round) };
};
const round = (value) => (value !== 0 && (value >= 1e6 || value < 1e-3)
  ? value.toExponential(0).replace("e+", "e").replace("e-", "e−")
  : value.toLocaleString("en", { maximumSignificantDigits: 3 }));
const faded = (hex, opacity) => {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${red},${green},${blue},${opacity})`;
};
