"""A get is short enough to be read: the files that it passes, at both sides together, are counted."""

import asyncio
import sys
from pathlib import Path

import shoal
from shoal.dht import DHT

ROOT = Path(shoal.__file__).parent
MAX_FILES = 15


async def files_of_a_get():
    files = {}

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and path.parent != ROOT / "core":
            files[str(path.relative_to(ROOT))] = None

    async with DHT() as holder, DHT(join=[holder.peer.address], listen=None) as reader:
        assert await holder.store("name", 1, holder.in_s(60))
        assert await reader.get("nothing") is None  # meanwhile upkeep takes its first look
        sys.setprofile(note)
        try:
            value = await reader.get("name")
        finally:
            sys.setprofile(None)
    assert value.value == 1
    return list(files)


def test_a_get_passes_few_files():
    files = asyncio.run(files_of_a_get())
    assert "dht/search.py" in files
    assert "transport/datagrams/callee.py" in files
    assert len(files) <= MAX_FILES, files
