"""Members behind routers, in virtual time: one that can be dialed carries the run, relays call the others."""

import asyncio
import contextlib

import torch

from shoal.cli.swarm import sum_links
from shoal.core import Address, Deadline
from shoal.core.identity import Identity
from shoal.dht import DHT
from shoal.dht.settings import DHTSettings
from shoal.swarm import BlockingSwarmRun, CommittedSGD, SwarmSettings
from shoal.swarm.facts import ways_in_words
from shoal.transport import Endpoint, MemoryNetwork
from shoal.transport.relay import RelayLimits
from swarm.swarms import gradient, virtual

NUM_ELEMENTS = 13_000  # enough for three reducers
SETTINGS = SwarmSettings(target_samples=10, minority_after_s=20.0)


class OnLoop:
    """What a run needs of a swarm, on the loop of the test: there is no thread to cross from."""

    def __init__(self, dht):
        self.dht = dht
        self.peer_id = dht.peer_id


class Neighbourhood:
    """Members of a run on one network, some of them behind routers of their own."""

    def __init__(self):
        self.network = MemoryNetwork(seed=1)
        self.runs = {}
        self._closing = {}

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        for name in list(self._closing):
            await self._closing.pop(name).aclose()

    async def start(self, name, router="", join="hub", wait=True, **options):
        """A member; with a `router` of that kind before it."""
        behind = ""
        if router:
            behind = f"home-of-{name}"
            self.network.router(behind, router)
        host = self.network.host(name, behind=behind)
        identity = Identity.from_seed(name.encode().ljust(32))
        closing = self._closing[name] = contextlib.AsyncExitStack()
        endpoint = Endpoint(network=host, peer_id=identity.peer_id, **options)
        await closing.enter_async_context(endpoint)
        if not router:
            await endpoint.listen(Address(name, 1024))
        join = [] if name == join else [Address(join, 1024)]
        settings = DHTSettings(is_client=bool(router), is_strict=False)
        dht = DHT(endpoint=endpoint, identity=identity, join=join, settings=settings)
        await closing.enter_async_context(dht)
        run = BlockingSwarmRun(
            OnLoop(dht), "test", torch.zeros(NUM_ELEMENTS), CommittedSGD(0.5, 0.9), settings=SETTINGS
        )
        await run.open()
        closing.push_async_callback(run.close, is_in_order=False)
        self.runs[name] = run
        if wait:
            await self.wait(lambda: run.run.is_member)
        return run

    async def kill(self, name):
        """Ends a member without a word; its machine may start another one."""
        self.network.hosts.pop(name).kill()
        self.network.host(name).random.seed(2)  # else it would make the same ids as before
        self.runs.pop(name)
        with contextlib.suppress(Exception):
            await self._closing.pop(name).aclose()

    async def wait(self, condition, timeout_s=60):
        deadline = Deadline.after(timeout_s)
        while not condition():
            deadline.check("a condition of the test")
            await asyncio.sleep(0.05)

    async def contribute(self, key, samples=5):
        """Has every member add a gradient, and waits until all have made a step."""
        runs = [run.run for run in self.runs.values()]
        steps = [run.state.num_steps for run in runs]
        for number, run in enumerate(runs):
            run.add(gradient(100 * key + number, NUM_ELEMENTS), samples)
        await self.wait(lambda: all(run.state.num_steps > num for run, num in zip(runs, steps, strict=True)))

    def check_equal(self):
        assert len({run.run.state.fingerprint() for run in self.runs.values()}) == 1


FIVE = {
    "anna": "endpoint-independent",
    "ben": "port-restricted",
    "cleo": "address-dependent",
    "dora": "symmetric",
    "emil": "symmetric",
}


def test_one_that_can_be_dialed_and_five_behind_routers_train_in_one_run():
    """No port is opened. The one has relays for four; the fifth is a client alone."""

    async def main():
        async with Neighbourhood() as home:
            hub = await home.start("hub", relaying=RelayLimits(max_registered=4))
            for name, kind in FIVE.items():
                await home.start(name, kind)
            await home.wait(lambda: all(len(run.run.members) == 6 for run in home.runs.values()))
            for key in range(10):
                await home.contribute(key)
                await asyncio.sleep(1)  # the time to look for ways through the routers
            home.check_equal()
            for run in home.runs.values():
                assert run.run.ledger.num_committed == 50
                assert run.run.num_failed == 0
            told = [run.facts() for run in home.runs.values()]
            links = sum_links(told)
            print(f"members: {ways_in_words(told[0].ways)}; connections: {links}")
            assert ways_in_words(told[0].ways) == "1 of 6 dialed, 4 relayed, 1 client"
            assert {name: run.facts().way for name, run in home.runs.items()} == {
                "hub": "dialed",
                "emil": "client",
            } | dict.fromkeys(["anna", "ben", "cleo", "dora"], "relayed")
            assert hub.facts().links == {"direct": 5}
            # whose router lets anybody in is reached by all, the others' only through the relay
            assert home.runs["anna"].facts().links == {"direct": 1, "punched": 4}
            assert links["punched"] >= 8
            assert links["relayed"] > 0

    virtual(main())


def test_the_only_one_that_can_be_dialed_is_lost_and_a_new_one_takes_its_place():
    """Whose state is that of those behind routers: it takes it through its own relay."""

    async def main():
        async with Neighbourhood() as home:
            await home.start("hub")
            for name in ("cleo", "ben", "dora"):
                await home.start(name, FIVE[name])
            await home.wait(lambda: all(len(run.run.members) == 4 for run in home.runs.values()))
            for key in range(5):
                await home.contribute(key)
            samples = home.runs["ben"].run.state.num_samples
            await home.kill("hub")
            await asyncio.sleep(30)
            await home.start("hub", wait=False)  # which has lost all that it knew
            await home.wait(lambda: all(len(run.run.members) == 4 for run in home.runs.values()), 600)
            for key in range(5, 10):
                await home.contribute(key)
            home.check_equal()
            assert home.runs["hub"].run.state.num_samples > samples

    virtual(main())


def test_one_behind_a_router_begins_a_run_that_others_join():
    async def main():
        async with Neighbourhood() as home:
            async with contextlib.AsyncExitStack() as stack:
                seed = Identity.from_seed(bytes(32))
                endpoint = Endpoint(network=home.network.host("hub"), peer_id=seed.peer_id)
                await stack.enter_async_context(endpoint)
                await endpoint.listen(Address("hub", 1024))
                # of the DHT, and no member of the run
                await stack.enter_async_context(DHT(endpoint=endpoint, identity=seed))
                await home.start("anna", "symmetric")
                await home.contribute(1, samples=10)
                await home.start("ben", "symmetric")
                await home.contribute(2)
                await home.start("open")
                for key in range(3, 6):
                    await home.contribute(key)
                home.check_equal()
                assert home.runs["anna"].run.ledger.num_committed == 30
                assert home.runs["open"].run.members[0].way == "dialed"

    virtual(main())
