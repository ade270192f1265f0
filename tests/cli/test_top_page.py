"""The page of `shoal top --web` in a real browser, light and dark: no error, nothing asked of others."""

import html
import json
import re
import shutil
import subprocess

import pytest

from cli.test_top_jobs import shot, sighting
from shoal.cli import top_view
from shoal.core import SYSTEM_CLOCK, Address

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--virtual-time-budget=5000",
    "--enable-logging=stderr",
)
SCHEMES = {"dark": 0, "light": 1}
WATCH = """<script>
const found = { errors: [] };
addEventListener("error", (event) => found.errors.push(event.message));
addEventListener("securitypolicyviolation", (event) => found.errors.push(event.violatedDirective));
</script>"""
TELL = """<script>
const texts = (query) => [...document.querySelectorAll(query)].map((one) => one.textContent);
const tell = () => {
  if (!at("pulse").textContent) return setTimeout(tell, 50);
  found.title = document.title;
  found.figures = [...document.querySelectorAll(".figures dd")].map((one) => one.firstChild.textContent);
  found.columns = texts("#table thead th");
  found.rows = [...document.querySelectorAll("#table tbody tr")].map((row) => row.className);
  found.headings = texts("section:not([hidden]) h2");
  found.cells = texts("#matrices td.cell").length;
  found.hints = texts(".hint");
  found.isLooking = !at("looking").hidden;
  const bars = [...document.querySelectorAll("td.share")].map((cell) => getComputedStyle(cell));
  found.bars = bars.map((style) => style.backgroundImage);
  found.plots = document.querySelectorAll("figure svg path.course").length;
  found.notes = texts("#notes li");
  found.isEmpty = !at("empty").hidden;
  found.tooWide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  found.clipped = [...document.querySelectorAll("figure")].some((figure) => {
    const inside = figure.getBoundingClientRect();
    return [...figure.querySelectorAll("text")].some((text) => {
      const box = text.getBoundingClientRect();
      return box.left < inside.left || box.right > inside.right || box.bottom > inside.bottom;
    });
  });
  found.paper = getComputedStyle(document.body).backgroundColor;
  found.requests = performance.getEntriesByType("resource").map((entry) => new URL(entry.name).pathname);
  document.body.dataset.found = JSON.stringify(found);
};
setTimeout(tell, 50);
</script>"""


class Looks:
    """Shows what there is, then lets a browser read the page, and ends."""

    def __init__(self, shots, read):
        self._shots = list(shots)
        self._read = read
        self._address = None
        self.found = None

    def tell(self, address):
        self._address = address

    def look(self):
        if self._shots:
            return self._shots.pop(0)
        self.found = self._read(f"http://{self._address}/")
        raise KeyboardInterrupt


def read_with(folder, scheme, width):
    def read(url):
        command = [BROWSER, *FLAGS, f"--window-size={width},900", f"--user-data-dir={folder / 'profile'}"]
        scheme_flag = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
        done = subprocess.run(
            [*command, scheme_flag, "--dump-dom", url],
            capture_output=True, text=True, timeout=50, check=True,
        )  # fmt: skip
        found = re.search(r'data-found="([^"]*)"', done.stdout)
        assert found, done.stderr[-2000:]
        assert "CONSOLE" not in done.stderr
        return json.loads(html.unescape(found[1]))

    return read


def page_of(monkeypatch, looks):
    page = top_view._page()
    changed = page.replace("<head>", f"<head>{WATCH}").replace("</body>", f"{TELL}</body>")
    monkeypatch.setattr(top_view, "_page", lambda: changed)
    with pytest.raises(KeyboardInterrupt):
        top_view.serve(looks, Address("127.0.0.1", 0), 0.01, SYSTEM_CLOCK, looks.tell)
    return looks.found


def worker(rank, *, turn=1, **fields):
    known = {
        "size": 4,
        "step": 100 * turn + rank,
        "steps_per_s": 58.7,
        "examples_per_s": 1754.0 * turn,
        "values": {"loss": 0.01178 / turn},
        "sent_bytes": 14_100_000,
        "received_bytes": 14_100_000,
        "wait_share": 0.5,
        "waits_for": 2,
        "waited_s": {2: 3.5},
        "sent_to": {(rank + 1) % 3: 14_100_000},
        "received_from": {(rank - 1) % 3: 14_100_000},
        "program": "<b>train.py</b>",
    }
    return sighting(rank, **{**known, **fields})


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")
@pytest.mark.parametrize(
    ("scheme", "width", "paper"), [("light", 1200, "255, 255, 255"), ("dark", 500, "20, 23, 27")]
)
def test_a_job_is_drawn_without_errors_or_requests_to_others(scheme, width, paper, tmp_path, monkeypatch):
    shots = [
        shot(
            *(worker(rank, turn=turn) for rank in (0, 1)),
            worker(2, turn=turn, state="stopped", age_s=5.2),
            worker(3, turn=turn, state="gone"),
        )
        for turn in range(1, 6)
    ]
    found = page_of(monkeypatch, Looks(shots, read_with(tmp_path, scheme, width)))
    assert found["errors"] == []
    assert found["title"] == "<b>train.py</b> · all-reduce · Shoal"
    assert found["figures"][0] == "3 of 4"
    assert found["columns"][:5] == ["worker", "does", "step", "steps/s", "examples/s"]
    assert [name in found["columns"] for name in ("loss", "sent", "received", "waits", "last beat")] == [
        True
    ] * 5
    assert found["rows"] == ["running", "running", "stopped", "gone"]
    assert len(found["bars"]) == 2
    assert all("gradient" in bar for bar in found["bars"])
    assert found["plots"] == 2
    assert any("SIGSTOP" in note for note in found["notes"])
    # the one that is gone has none
    assert found["headings"] == ["Workers", "Who waits for whom", "Who sends to whom"]
    assert (found["cells"], found["hints"], found["isLooking"]) == (2 * 3 * 3, [], False)
    assert (found["isEmpty"], found["tooWide"], found["clipped"]) == (False, False, False)
    assert found["paper"] == f"rgb({paper})"
    assert set(found["requests"]) == {"/view.json"}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")
def test_where_there_is_no_job_it_says_how_to_start_one(tmp_path, monkeypatch):
    found = page_of(monkeypatch, Looks([shot()], read_with(tmp_path, "light", 800)))
    assert (found["errors"], found["isEmpty"], found["rows"], found["title"]) == ([], True, [], "Shoal top")
    assert (found["isLooking"], found["headings"]) == (False, [])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")
def test_before_the_first_look_it_says_that_it_looks_and_shows_nothing_empty(tmp_path, monkeypatch):
    found = page_of(monkeypatch, Looks([], read_with(tmp_path, "light", 800)))
    assert (found["errors"], found["isLooking"], found["isEmpty"]) == ([], True, False)
    assert (found["headings"], found["figures"], found["columns"]) == ([], [], [])


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt install chromium")
def test_where_no_loss_is_logged_there_is_a_word_on_how_to_log_it(tmp_path, monkeypatch):
    found = page_of(monkeypatch, Looks([shot(worker(0, values={}))], read_with(tmp_path, "light", 800)))
    assert (found["errors"], found["plots"], len(found["hints"])) == ([], 1, 1)
    assert "strategy.log(loss=loss)" in found["hints"][0]
