"""Pages in a real browser: every plot is drawn, nothing is asked of the network, no error is logged."""

import json
import re
import shutil
import subprocess

import pytest

from report import samples, test_pictures
from shoal.report import compare
from shoal.report.html import write_diff, write_reports

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--window-size=1100,1600",
    "--virtual-time-budget=20000",
)
WATCH = """<script>
const found = { errors: [] };
addEventListener("error", (event) => found.errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => found.errors.push(event.violatedDirective));
</script>"""
TELL = """<script>
for (const details of document.querySelectorAll("details")) details.open = true;
const finish = () => {
  if (document.documentElement.dataset.drawn !== "all") return setTimeout(finish, 20);
  for (const button of document.querySelectorAll("button[data-set]")) button.click();
  setTimeout(conclude, 20);
};
const conclude = () => {
  if (document.documentElement.dataset.drawn !== "all") return setTimeout(conclude, 20);
  const plots = [...document.querySelectorAll("[data-plot]")];
  found.undrawn = plots.filter((plot) => !plot.querySelector("svg.main-svg")).length;
  found.drawn = plots.length - found.undrawn;
  /* whatever is wider than the page and does not scroll by itself */
  const wide = [...document.querySelectorAll("body *")].filter((part) => !part.closest(".scroll, svg")
    && part.getBoundingClientRect().right > document.documentElement.clientWidth + 1);
  found.tooWide = wide.map((part) => `${part.tagName} ${part.className}`);
  found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.body.dataset.found = JSON.stringify(found);
};
setTimeout(finish, 20);
</script>"""

TIMES = {"all-reduce": [8, 9, 10], "a-strategy-with-a-long-name-that-wraps": [1, 2, 3], "never": []}
LOOKS = {"phone": (390, "dark"), "desk": (1200, "light")}
"""Width in pixels and theme. A window has a least width, so that the page stands in a frame."""
FRAME = """<!doctype html><body style="margin:0">
<iframe style="width:%dpx;height:1600px;border:0"></iframe>
<script>
const frame = document.querySelector("iframe");
const look = () => {
  const found = frame.contentDocument?.body?.dataset.found;
  if (!found) return setTimeout(look, 50);
  document.body.dataset.found = found;
};
frame.srcdoc = %s;
look();
</script></body>"""

PAGES = {
    "accuracy": lambda path: write_reports([samples.accuracy()], path, ["a.json"]),
    "scaling": lambda path: write_reports([samples.scaling()], path, ["a.json"]),
    "training": lambda path: write_reports([samples.training()], path, ["a.json"]),
    "convergence": lambda path: write_reports(
        [samples.convergence(), samples.convergence(1, 100)], path, ["a", "b"]
    ),
    "several": lambda path: write_reports(
        [samples.accuracy(), samples.latencies(), samples.latencies(1)], path, ["a", "b", "c"]
    ),
    "compare": lambda path: write_reports([test_pictures.compared(TIMES)], path, ["a.json"]),
    "dht": lambda path: write_reports([test_pictures.dht()], path, ["a.json"]),
    "experts": lambda path: write_reports(
        [test_pictures.experts(1), test_pictures.experts(4)], path, ["a", "b"]
    ),
    "diff": lambda path: write_diff(
        compare(samples.latencies(), samples.latencies(1, 1.1)), path, ["a", "b"]
    ),
    "diff of curves": lambda path: write_diff(
        compare(samples.accuracy(), samples.accuracy(1, 1.3)), path, ["a", "b"]
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")
@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", PAGES)
def test_a_page_draws_all_its_plots_without_errors_or_requests(kind, look, tmp_path):
    path, (width, theme) = PAGES[kind](tmp_path / "page.html"), LOOKS[look]
    page = path.read_text(encoding="utf-8")
    shown = page.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{TELL}</body>")
    shown = shown.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
    path.write_text(FRAME % (width, json.dumps(shown).replace("</", "<\\/")), encoding="utf-8")
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(
        [*command[:-1], "--enable-logging=stderr", command[-1]],
        capture_output=True, text=True, timeout=50, check=True,
    )  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    assert found, done.stderr[-2000:]
    told = json.loads(found[1].replace("&quot;", '"'))
    assert told == {"errors": [], "undrawn": 0, "drawn": told["drawn"], "tooWide": [], "requests": []}
    assert told["drawn"] == len(re.findall("data-plot=", page.partition("<script>")[0])) > 0
    assert "CONSOLE" not in done.stderr
