import json
import urllib.request

import pytest

from cli.test_top_jobs import shot, sighting
from core.boards import NOW_S
from shoal.cli.top_view import LivePages, Shot, View, serve, watch
from shoal.core import Address, ManualClock, PeerUnreachable


def view_of(stage):
    return json.loads(stage.site().pages["/view.json"].make())


def test_the_page_gets_the_newest_and_the_course_of_its_numbers():
    clock = ManualClock(wall_s=NOW_S)
    stage = LivePages(clock)
    assert view_of(stage) == {"age_s": 0.0, "is_ready": False, "error": "", "views": []}
    stage.put(shot(sighting(examples_per_s=10.0)))
    clock.advance(1)
    stage.put(shot(sighting(examples_per_s=20.0, values={"loss": 0.5})))
    clock.advance(2)
    told = view_of(stage)
    assert told["age_s"] == 2.0
    (view,) = told["views"]
    assert view["series"] == {"examples/s": [[3.0, 10.0], [2.0, 20.0]], "loss": [[2.0, 0.5]]}
    assert [name for name, _ in view["columns"]][:3] == ["worker", "does", "step"]
    assert len(view["rows"]) == len(view["states"]) == len(view["shares"]) == 1
    stage.fail("Nobody answers.")
    assert view_of(stage)["error"] == "Nobody answers."
    assert len(view_of(stage)["views"]) == 1
    stage.put(shot())
    assert view_of(stage) == {"age_s": 0.0, "is_ready": True, "error": "", "views": []}


class Looks:
    """What is seen, one look after the other; then it is interrupted."""

    def __init__(self, *shots):
        self._shots = list(shots)
        self.read = {}
        self.address = None

    def look(self):
        if not self._shots:
            for path in ("/", "/status.json", "/metrics", "/view.json"):
                with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
                    self.read[path] = answer.headers, answer.read().decode()
            raise KeyboardInterrupt
        found = self._shots.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def tell(self, address):
        self.address = address


def empty_shot():
    return Shot([], View("", ""), {}, "", {})


@pytest.mark.parametrize(("ends_when_empty", "seen"), [(True, 7), (False, 8)])
def test_a_terminal_shows_it_until_it_is_ended(ends_when_empty, seen):
    found = [PeerUnreachable("Nobody answers."), shot(sighting(step=7)), empty_shot(), shot(sighting(step=8))]

    class Source:
        def look(self):
            if not found:
                raise KeyboardInterrupt
            now = found.pop(0)
            if isinstance(now, Exception):
                raise now
            return now

    last = watch(Source(), shot(sighting(step=1)), 0.0, ends_when_empty=ends_when_empty)
    assert last.document["jobs"][0]["workers"][0]["step"] == seen


def test_it_is_served_until_it_is_ended():
    looks = Looks(PeerUnreachable("Nobody answers."), shot(sighting(step=7)))
    with pytest.raises(KeyboardInterrupt):
        serve(looks, Address("127.0.0.1", 0), 0.0, ManualClock(), looks.tell)
    headers, page = looks.read["/"]
    assert "connect-src 'self'" in headers["Content-Security-Policy"]
    assert page.startswith("<!doctype html>")
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert json.loads(looks.read["/status.json"][1])["jobs"][0]["workers"][0]["step"] == 7
    assert "shoal_worker_steps_total{" in looks.read["/metrics"][1]
    assert json.loads(looks.read["/view.json"][1])["error"] == ""


def test_while_looks_fail_programs_are_told():
    clock = ManualClock(wall_s=NOW_S)
    stage = LivePages(clock)
    pages = stage.site().pages
    stage.put(shot(sighting(step=7)))
    assert "shoal_top_up 1\n" in pages["/metrics"].make()
    assert "shoal_worker_steps_total{" in pages["/metrics"].make()
    clock.advance(2.5)
    stage.fail("Nobody answers.")
    told, status = pages["/metrics"].make(), json.loads(pages["/status.json"].make())
    assert "shoal_top_up 0\n" in told
    assert "shoal_top_last_look_seconds 2.5\n" in told
    assert "shoal_worker" not in told
    assert (status["error"], status["looked_s_ago"], len(status["jobs"])) == ("Nobody answers.", 2.5, 1)
