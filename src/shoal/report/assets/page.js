/* The page itself: draws every plot that can be seen, and again when the theme, a choice or the width changes. */
const choices = data.sets.map(() => 0);
function choiceOf(plot) { return choices[plot.set]; }

const places = [...document.querySelectorAll("[data-plot]")];
const waiting = new Set();
let turn = 0;
/* One plot a turn: a long page can be read while it is drawn. */
const next = () => {
  const [element] = waiting;
  if (!element) { turn = 0; root.dataset.drawn = "all"; return; }
  waiting.delete(element);
  turn = setTimeout(next, 0);
  const plot = data.plots[element.dataset.plot];
  if (element.clientWidth) drawPlot(element, plot);
};
const draw = (isWanted = () => true) => {
  for (const element of places) if (isWanted(element)) waiting.add(element);
  delete root.dataset.drawn;
  if (!turn && window.Plotly) turn = setTimeout(next, 0);
};
const drawSet = (number) => draw((element) => data.plots[element.dataset.plot].set === number);

const press = (button, isPressed) => button.setAttribute("aria-pressed", String(isPressed));
for (const button of document.querySelectorAll("button[data-set]")) {
  const number = Number(button.dataset.set);
  button.addEventListener("click", () => {
    if (button.dataset.series !== undefined) {
      const entry = data.sets[number].series[button.dataset.series];
      entry.isHidden = !entry.isHidden;
      press(button, !entry.isHidden);
    } else {
      choices[number] = Number(button.dataset.choice);
      for (const other of button.parentElement.querySelectorAll("button")) press(other, other === button);
    }
    drawSet(number);
  });
}
for (const select of document.querySelectorAll("select[data-set]")) {
  const number = Number(select.dataset.set);
  const choose = () => { choices[number] = Number(select.value); };
  choose();
  select.addEventListener("change", () => { choose(); drawSet(number); });
}
/* A table that is wider than its place says so. */
const measure = () => {
  for (const table of document.querySelectorAll(".scroll")) table.classList.toggle("wide", table.scrollWidth > table.clientWidth + 1);
};
addEventListener("toggle", (event) => { measure(); draw((element) => event.target.contains(element)); }, true);

const dark = matchMedia("(prefers-color-scheme: dark)");
const button = document.getElementById("theme");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
const nameTheme = () => { button.textContent = isDark() ? "light theme" : "dark theme"; };
const remember = (theme) => { try { localStorage.setItem("shoal-theme", theme); } catch { /* a page from disk may not store */ } };
try { const theme = localStorage.getItem("shoal-theme"); if (theme) root.dataset.theme = theme; } catch { /* as above */ }
button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; remember(root.dataset.theme); nameTheme(); draw(); });
dark.addEventListener("change", () => { nameTheme(); draw(); });
let timer = 0, last = root.clientWidth;
addEventListener("resize", () => {
  if (root.clientWidth === last) return;
  last = root.clientWidth;
  clearTimeout(timer);
  timer = setTimeout(() => { measure(); draw(); }, 120);
});
nameTheme();
measure();
/* Plotly stands in the page as gzip in base64. */
const unpacked = async () => {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
};
unpacked().then(() => draw(), (error) => {
  for (const element of places) element.textContent = `This plot needs a browser of 2023 or later (${error}).`;
  root.dataset.drawn = "all";
});
