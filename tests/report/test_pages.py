import asyncio
import contextlib

import pytest

from shoal.core import Address
from shoal.report import pages
from shoal.report.pages import Page, PageServer, Site

LOCAL = Address("127.0.0.1", 0)


def site(**more):
    pages = {"/": Page(lambda: "<p>home</p>", "text/html; charset=utf-8"), "/data": Page(lambda: "secret")}
    return Site(pages, "The site", **more)


async def get(server, path="/", host="localhost"):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        return head, body
    finally:
        writer.close()


def test_each_path_has_its_page_and_all_have_the_headers(run):
    async def check():
        async with PageServer(LOCAL, site(headers={"X-Of-All": "yes"})) as server:
            head, body = await get(server, "/?query")
            assert head.startswith("HTTP/1.0 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n")
            assert "X-Of-All: yes" in head
            assert body == "<p>home</p>"
            assert (await get(server, "/data"))[1] == "secret"
            head, body = await get(server, "/other")
            assert head.split()[1] == "404"
            assert body == "The site: /, /data.\n"

    run(check())


@pytest.mark.parametrize(
    ("host", "is_answered"),
    [
        ("localhost:80", True),
        ("127.0.0.1:80", True),
        ("[::1]:80", True),
        ("LOCALHOST", True),
        ("evil.example", False),
        ("localhost.evil.example:80", False),
    ],
)
def test_what_is_for_browsers_answers_to_no_name_that_a_web_site_could_have(run, host, is_answered):
    async def check():
        async with PageServer(LOCAL, site(is_for_browsers=True)) as server:
            head, body = await get(server, "/data", host)
            assert (head.split()[1], "secret" in body) == (("200", True) if is_answered else ("403", False))

    run(check())


async def open_large(server):
    """A reader that has asked for more than fits on the way, and has not read yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.address.port, limit=1 << 10)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    await reader.readline()
    return reader, writer


@pytest.mark.parametrize(("answer_s", "is_whole"), [(50.0, True), (0.01, False)])
def test_who_reads_slowly_has_a_longer_limit_than_who_asks_nothing(run, monkeypatch, answer_s, is_whole):
    monkeypatch.setattr(pages, "_REQUEST_S", 0.01)
    monkeypatch.setattr(pages, "_ANSWER_S", answer_s)
    size = 20_000_000

    async def check():
        async with PageServer(LOCAL, Site({"/": Page(lambda: "x" * size)}, "The site")) as server:
            reader, writer = await open_large(server)
            await asyncio.sleep(0.05)
            got = 0
            with contextlib.suppress(ConnectionResetError):
                while data := await reader.read(1 << 20):
                    got += len(data)
            assert (got >= size) is is_whole
            writer.close()

    run(check())


def test_of_too_many_the_first_who_has_not_asked_goes_and_nobody_who_is_answered(run, monkeypatch):
    monkeypatch.setattr(pages, "_MAX_CONNECTIONS", 3)
    large = {"/": Page(lambda: "x" * 20_000_000), "/data": Page(lambda: "secret")}

    async def check():
        async with PageServer(LOCAL, Site(large, "The site")) as server:
            answered, *_ = opened = [await open_large(server)]
            opened += [await asyncio.open_connection("127.0.0.1", server.address.port) for _ in range(2)]
            assert (await get(server, "/data"))[1] == "secret"
            assert await opened[1][0].read() == b""
            assert len(server._connections) <= 3
            opened[2][1].write(b"GET /data HTTP/1.0\r\n\r\n")
            assert (await opened[2][0].read()).endswith(b"secret")
            assert not answered[0].at_eof()
            for _, writer in opened:
                writer.close()

    run(check())
