"""A peer as a program, for hosts of `nat_over_tun`: a relay, or a peer that is told whom to call.

`nat_peer.py SECRET_FILE relay HOST:PORT` says `HOST:PORT` once it listens, and runs until its input ends.
`nat_peer.py SECRET_FILE peer RELAY...` says its relayed address, and answers each line of its input, which is
an address and for how many seconds at most to wait until it is reached directly, with a line of JSON.
"""

import asyncio
import json
import sys
from pathlib import Path

import shoal
from shoal.core import Address, Deadline, LoopThread, Peer, PeerId
from shoal.transport import Endpoint, Reply
from shoal.transport.introductions import ask_about


async def relay(endpoint, address):
    await endpoint.listen(Address.parse(address))
    print(address, flush=True)


async def register(endpoint, relays):
    found = []
    for text in relays:
        peer = Peer.at(text)
        about = await ask_about(endpoint.streams, peer, "tcp", Deadline.after(10))
        found.append(Peer(peer.address, PeerId.parse(about.peer_id)))
    changed = asyncio.Event()
    endpoint.relays.on_change.append(changed.set)
    endpoint.relays.keep(lambda: found)
    async with asyncio.timeout(20):
        while len(endpoint.relays.addresses) < len(found):
            changed.clear()
            await changed.wait()
    print(endpoint.relays.addresses[0], flush=True)


async def reach(endpoint, address, for_s):
    """Call a peer until it is reached directly both ways, or time is over; then say how it is reached."""
    peer = Peer(address, address.relayed_id)
    deadline = Deadline.after(for_s)
    num_calls, longest_s, loop = 0, 0.0, asyncio.get_running_loop()
    while True:
        began_s = loop.time()
        name, _ = (await endpoint.streams.call(peer, "who", deadline=Deadline.after(10))).payload
        longest_s, num_calls = max(longest_s, loop.time() - began_s), num_calls + 1
        _, origin = (await endpoint.datagrams.call(peer, "who", deadline=Deadline.after(10))).payload
        kind, is_relayed = endpoint.streams.connection_kinds()[peer.id], Address.parse(origin).is_relayed
        if (kind != "relayed" and not is_relayed) or deadline.is_past:
            return {"name": name, "tcp": kind, "udp": "relayed" if is_relayed else "punched"} | {
                "num_calls": num_calls,
                "longest_s": longest_s,
                "num_tried": endpoint.punching.num_tried,
            }
        await asyncio.sleep(0.1)


def main(secret_file, role, *addresses):
    membership = shoal.Membership(shoal.Identity.generate(), shoal.SwarmSecret.load(Path(secret_file)))
    endpoint = Endpoint(membership=membership)
    name = str(membership.peer_id)
    endpoint.handle("who", lambda head, buffers: Reply([name, str(head.peer.address)]))
    with LoopThread() as loop:
        loop.run(endpoint.__aenter__())
        try:
            if role == "relay":
                loop.run(relay(endpoint, *addresses))
                sys.stdin.read()
                return
            loop.run(register(endpoint, addresses))
            for line in sys.stdin:
                address, for_s = line.split()
                print(json.dumps(loop.run(reach(endpoint, Address.parse(address), float(for_s)))), flush=True)
        finally:
            loop.run(endpoint.__aexit__(None, None, None))


if __name__ == "__main__":
    main(*sys.argv[1:])
