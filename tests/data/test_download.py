import socket
import threading

import pytest

from shoal.core import Deadline
from shoal.data import DataError
from shoal.data.download import download


@pytest.fixture
def serve(monkeypatch):
    """Answers one connection with these bytes after its request; gives the address."""
    monkeypatch.setenv("no_proxy", "*")
    listeners, threads = [], []

    def start(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer_one():
            with listener.accept()[0] as connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=answer_one)
        thread.start()
        threads.append(thread)
        return f"http://127.0.0.1:{listener.getsockname()[1]}/file"

    yield start
    for thread in threads:
        thread.join()
    for listener in listeners:
        listener.close()


def reply(body):
    return b"HTTP/1.0 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def fetch(*urls, deadline_s=10.0, max_bytes=100):
    return download(urls, lambda contents, url: len(contents), Deadline.after(deadline_s), max_bytes)


def test_gives_the_bytes_and_what_the_check_said(serve):
    assert fetch(serve(reply(b"whole"))) == (b"whole", 5)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "without response"),
        (b"nonsense\r\n\r\n", "nonsense"),
        (b"HTTP/1.0 404 Gone Away\r\n\r\n", "Gone Away"),
        (reply(bytes(101)), "more than 100 bytes"),
    ],
)
def test_every_mirrors_failure_is_told(serve, answer, reason):
    url = serve(answer)
    with pytest.raises(DataError, match=reason) as caught:
        fetch(url)
    assert url in caught.value.what


def test_a_slow_mirror_is_given_up(serve):
    with pytest.raises(DataError, match="too slow"):
        fetch(serve(reply(b"whole")), deadline_s=0.0)


def test_the_next_mirror_is_asked(serve):
    assert fetch(serve(b""), serve(reply(b"second")))[0] == b"second"
