"""What all tests share: a loop to run coroutines on, and a home of their own for files that Shoal keeps."""

import asyncio
import gc

import pytest

from shoal.core.loop import new_event_loop
from shoal.core.processes import obey_interrupts

# Started in the background, the programs that tests start and interrupt would inherit that SIGINT is ignored.
obey_interrupts()

LOOPS = {"uvloop": new_event_loop, "asyncio": asyncio.new_event_loop}


def pytest_runtest_setup(item):
    """Tests that are marked `gpu` are skipped where there is none."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(scope="module", autouse=True)
def _collector_skips_what_stays():
    # Tests collect garbage to see that nothing is left unclosed. Without this each of them would search the
    # millions of objects of torch and of the collected tests: 0.3 s a time near the end of a whole run.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "SHOAL_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


class Runner:
    """Runs coroutines on one loop; whatever asyncio reports as unhandled fails the test."""

    def __init__(self, loop):
        self.loop = loop
        self.unhandled = []
        loop.set_exception_handler(lambda _, context: self.unhandled.append(context))

    def __call__(self, work):
        async def limited():
            async with asyncio.timeout(50):
                return await work

        result = self.loop.run_until_complete(limited())
        gc.collect()
        assert not self.unhandled, self.unhandled
        return result


@pytest.fixture(params=["uvloop"])
def run(request):
    """Runs a coroutine to its end, on uvloop; parametrize indirectly for another loop."""
    loop = LOOPS[request.param]()
    try:
        yield Runner(loop)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


@pytest.fixture(scope="session")
def workers():
    """Worker processes that tests of groups and strategies share: `workers.run(function, size=3)`."""
    from workers import Workers

    with Workers() as pool:
        yield pool
