import asyncio

import pytest

from shoal.core import Address
from shoal.transport.pages import Page, PageServer, Site

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
