"""Streams between machines, each of which is a mesh of its own in this process."""

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings

import pytest
import torch

from group.meshes import open_meshes
from shoal.core import Address, Deadline, Peer, PeerId, PeerLost, ShoalError, TensorError, UsageError
from shoal.core.identity import new_secret
from shoal.group.cluster.mesh import Mesh
from shoal.transport import Reply

SOON = 20.0


def soon():
    return Deadline.after(SOON)


def until(is_so):
    give_up_s = time.monotonic() + SOON
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


def some(num_elements=300_000, dtype=torch.float32):
    return torch.arange(num_elements).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("num_elements", [0, 3, 300_000])
def test_a_tensor_comes_into_the_memory_that_waits_for_it(dtype, num_elements):
    with open_meshes(2) as (one, other):
        sent, into = some(num_elements, dtype), torch.zeros(num_elements, dtype=dtype)
        received = other.receive(0, (1, "x"), into)
        one.send(1, (1, "x"), sent).wait(soon())
        assert received.wait(soon()) is into
        assert torch.equal(into, sent)


def test_a_tensor_that_comes_early_waits_for_whoever_asks():
    with open_meshes(3) as meshes:
        sent = some()
        for source in (1, 2):
            meshes[source].send(0, (7, "early"), sent + source).wait(soon())
            until(lambda source=source: meshes[0].received_bytes.get(source, 0) >= sent.nbytes)
        until(lambda: len(meshes[0]._mailbox._lines[7, "early"]) == 2)  # no handle tells of it
        anybody = meshes[0].receive(None, (7, "early"))
        rest = meshes[0].receive(None, (7, "early"), torch.empty_like(sent))
        assert anybody.is_done()
        assert rest.is_done()
        assert torch.equal(anybody.wait().view(torch.float32), sent + 1)
        assert torch.equal(rest.wait(), sent + 2)


def test_keys_and_sources_are_told_apart():
    with open_meshes(3) as meshes:
        wanted = {(source, key): meshes[0].receive(source, (key,)) for source in (1, 2) for key in ("a", "b")}
        for source in (2, 1):
            for key in ("b", "a"):
                text = torch.frombuffer(bytearray(f"{source}{key}".encode()), dtype=torch.uint8)
                meshes[source].send(0, (key,), text)
        for (source, key), handle in wanted.items():
            assert bytes(handle.wait(soon()).tolist()) == f"{source}{key}".encode()


def test_what_nobody_asks_for_is_bounded_and_waits_at_its_sender():
    size_bytes = some().nbytes
    with open_meshes(2, max_unclaimed_bytes=2 * size_bytes + 100) as (one, other):
        handles = [one.send(1, (index,), some() + index, is_bounded=True) for index in range(5)]
        expected = torch.zeros(300_000)
        wanted = other.receive(0, ("later",), expected)
        until(lambda: sum(handle.is_done() for handle in handles) == 2)
        one.send(1, ("later",), some()).wait(soon())
        assert torch.equal(wanted.wait(soon()), some()), "what is asked for always finds its place"
        assert sum(handle.is_done() for handle in handles) == 2
        for index in range(5):
            got = other.receive(0, (index,)).wait(soon())
            assert torch.equal(got.view(torch.float32), some() + index)
        for handle in handles:
            handle.wait(soon())
        assert other._mailbox.is_empty


@pytest.mark.parametrize("is_in_order", [True, False])
def test_a_tensor_that_waits_for_room_is_not_kept_for_one_who_goes(is_in_order):
    with open_meshes(2, max_unclaimed_bytes=100) as (one, other):
        one.send(1, ("first",), some(), is_bounded=True).wait(soon())
        sending = one.send(1, ("x",), some(), is_bounded=True)
        if is_in_order:
            other.leave(after=1)
        else:
            other.close(ConnectionAbortedError())
        with pytest.raises(PeerLost, match="rank 1 has left" if is_in_order else "rank 1 is lost"):
            sending.wait(soon())
        until(lambda: list(one.monitor.left if is_in_order else one.monitor.lost) == [1])


def test_one_that_is_lost_while_it_sends_leaves_the_place_to_another():
    with open_meshes(3) as (one, two, three):
        mailbox, into = one._mailbox, torch.zeros(3)  # so that a tensor comes only in part
        received = one.receive(None, ("x",), into)
        mailbox.expect(1, ("x",), 12)
        three.send(0, ("x",), torch.ones(3)).wait(soon())
        assert not received.is_done()
        two.close(ConnectionAbortedError())
        assert torch.equal(received.wait(soon()), torch.ones(3))
        assert mailbox.is_empty


def test_several_that_are_lost_while_they_send_leave_the_place_to_another():
    with open_meshes(4) as (one, two, three, four):
        mailbox, into = one._mailbox, torch.zeros(3)  # so that tensors come only in part
        received = one.receive(None, ("x",), into)
        mailbox.expect(1, ("x",), 12)
        mailbox.expect(2, ("x",), 12)
        two.close(ConnectionAbortedError())
        three.close(ConnectionAbortedError())
        until(lambda: sorted(one.monitor.lost) == [1, 2])
        assert not received.is_done()
        four.send(0, ("x",), torch.ones(3)).wait(soon())
        assert torch.equal(received.wait(soon()), torch.ones(3))
        assert torch.equal(into, torch.ones(3))
        assert mailbox.is_empty


def test_a_tensor_of_another_size_is_an_error_where_it_comes():
    with open_meshes(2) as (one, other):
        received = other.receive(0, ("x",), torch.zeros(4))
        one.send(1, ("x",), torch.zeros(5)).wait(soon())
        with pytest.raises(TensorError, match="rank 0 sent 20 bytes"):
            received.wait(soon())
        assert not one.monitor.lost
        assert not other.monitor.lost


def test_calls_carry_payloads_and_buffers_and_may_come_before_their_handler():
    with open_meshes(2) as (one, other):
        early = one.call(1, "double", {"by": 2}, [b"ab"])
        who = other.monitor.rank_of
        other.handle("double", lambda head, buffers: Reply([who(head), head.payload], [b"abab"]))
        into = bytearray(4)
        assert early.wait(soon()).payload == [0, {"by": 2}]
        one.call(1, "double", {"by": 2}, [b"ab"], into=[into]).wait(soon())
        assert into == b"abab"


def test_a_failing_handler_is_no_loss():
    def fail(head, buffers):
        raise UsageError("not like this.")

    with open_meshes(2) as (one, other):
        other.handle("fail", fail)
        with pytest.raises(ShoalError, match="not like this"):
            one.call(1, "fail").wait(soon())
        assert not one.monitor.lost


def test_one_that_leaves_in_order_is_not_lost_and_what_it_sent_has_come():
    with open_meshes(3) as (one, two, three):
        never, sent = one.receive(1, ("never",)), some()
        two.send(0, ("last",), sent)
        two.leave(after=41)
        assert never.wait(soon()) is None
        assert one.monitor.left == {1: 41}
        assert torch.equal(one.receive(1, ("last",)).wait(soon()).view(torch.float32), sent)
        assert one.receive(1, ("later",)).wait(soon()) is None
        with pytest.raises(PeerLost, match="rank 1 has left"):
            one.send(1, ("x",), sent).wait(soon())
        two.close()
        until(lambda: three.monitor.left == {1: 41})
        one.send(2, ("x",), sent).wait(soon())
        assert not one.monitor.lost
        assert not three.monitor.lost


def test_one_that_leaves_and_closes_while_it_sends_has_left():
    with open_meshes(2, max_unclaimed_bytes=100) as (one, two):
        two.send(0, ("last",), some())
        two.leave(after=7)
        closing = threading.Thread(target=two.close)
        closing.start()
        received = one.receive(1, ("last",))
        assert torch.equal(received.wait(soon()).view(torch.float32), some())
        closing.join(SOON)
        until(lambda: one.monitor.left == {1: 7})
        assert not one.monitor.lost


def test_all_close_at_once():
    with open_meshes(3) as meshes:
        for mesh in meshes:
            mesh.leave(1)
        for mesh in meshes:
            mesh.close()
            mesh.close()
        assert not any(mesh.monitor.lost for mesh in meshes)
        with pytest.raises(PeerLost, match="closed"):
            meshes[0].send(1, ("x",), some()).wait(soon())


def test_whatever_depends_on_one_that_fails_says_so():
    with open_meshes(3) as (one, two, three):
        woken = threading.Event()
        one.on_change = woken.set
        two.handle("wait", hang)
        waiting = [one.receive(1, ("never",)), one.call(1, "wait"), one.receive(None, ("never",))]
        two.close(ConnectionAbortedError())
        for handle in waiting[:2]:
            with pytest.raises(PeerLost, match="rank 1 is lost") as raised:
                handle.wait(soon())
            assert raised.value.peer == 1
        assert woken.is_set()
        assert list(one.monitor.lost) == [1]
        with pytest.raises(PeerLost, match="rank 1"):
            one.send(1, ("x",), some()).wait(soon())
        three.send(0, ("never",), some()).wait(soon())
        assert waiting[2].wait(soon()) is not None


async def hang(head, buffers):
    await asyncio.get_running_loop().create_future()


def test_the_silent_are_lost_and_find_out_when_they_wake():
    with open_meshes(3, silence_s=0.6) as (one, two, three):
        release = threading.Event()
        two.loop.loop.call_soon_threadsafe(release.wait)
        received = one.receive(1, ("x",))
        with pytest.raises(PeerLost, match=r"silent for \d\.\d s"):
            received.wait(soon())
        until(lambda: 1 in three.monitor.lost)
        assert list(one.monitor.lost) == [1]
        assert not two.monitor.lost
        release.set()
        until(lambda: sorted(two.monitor.lost) == [0, 2])
        assert "it has gone on without this worker (silent" in two.monitor.lost[0].reason
        one.send(2, ("x",), some()).wait(soon())


def test_a_stranger_cannot_come_in():
    one, stranger = Mesh(0, new_secret()), Mesh(1, new_secret())
    with contextlib.closing(one), contextlib.closing(stranger):
        where = one.listen()
        stranger.listen()
        with pytest.raises(PeerLost, match="rank 0 cannot be reached"):
            stranger.connect({0: where}, deadline=soon())


def test_traffic_is_counted_by_rank_without_beats():
    with open_meshes(3) as (one, two, three):
        sent = some()
        one.send(1, ("x",), sent).wait(soon())
        two.receive(0, ("x",)).wait(soon())
        assert sent.nbytes <= one.sent_bytes[1] < sent.nbytes + 100
        assert two.received_bytes == {0: one.sent_bytes[1]}
        assert not three.received_bytes


def test_one_may_forget_what_it_has_asked_for():
    with open_meshes(2) as (one, other):
        into = torch.zeros(3)
        forgotten = other.receive(0, ("x",), into)
        other.forget("x")
        one.send(1, ("x",), torch.ones(3)).wait(soon())
        assert torch.equal(into, torch.zeros(3))
        assert not forgotten.is_done()


def test_only_workers_of_other_machines_are_spoken_to():
    with open_meshes(2) as (one, _):
        with pytest.raises(UsageError, match="rank 0"):
            one.send(0, ("x",), some())
        with pytest.raises(TensorError, match="contiguous"):
            one.send(1, ("x",), torch.zeros(4, 4).t()[1:])


PEER = """
import sys
from shoal.core import Peer, Address, PeerId
from shoal.group.cluster.mesh import Mesh
mesh = Mesh(1, sys.argv[1])
own = mesh.listen()
print(own.address, own.id, flush=True)
mesh.connect({0: Peer(Address.parse(sys.argv[2]), PeerId.parse(sys.argv[3]))})
sys.stdin.read()
"""


def test_a_killed_process_is_known_at_once():
    secret = new_secret()
    with contextlib.closing(Mesh(0, secret)) as mesh:
        own = mesh.listen()
        arguments = [sys.executable, "-c", PEER, secret, str(own.address), str(own.id)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(arguments, **pipes) as process:
            try:
                address, peer_id = process.stdout.readline().split()
                peer = Peer(Address.parse(address), PeerId.parse(peer_id))
                mesh.connect({1: peer}, {1: f"process {process.pid} on here"})
                received = mesh.receive(1, ("x",))
                os.kill(process.pid, signal.SIGKILL)
                killed_s = time.monotonic()
                with pytest.raises(PeerLost, match=f"process {process.pid} on here ended"):
                    received.wait(soon())
                assert time.monotonic() - killed_s < 2.0
            finally:
                process.kill()


def test_a_mesh_that_is_abandoned_while_others_connect_leaves_no_socket_open():
    """A connection that is accepted just when the mesh is closed used to be nobody's to close."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", ResourceWarning)
        for _ in range(3):
            mesh = Mesh(0, new_secret())
            mesh.listen()
            for _ in range(4):  # their ends are closed, so that nothing is waited for; more than one waits
                socket.create_connection(("127.0.0.1", mesh._port)).close()
            mesh.close(ConnectionAbortedError())
            del mesh
            gc.collect()
    assert [str(one.message) for one in warned if one.category is ResourceWarning] == []
