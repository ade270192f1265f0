"""Connections that carry tensors between machines: who may connect, plain or encrypted, and all-reduces."""

import contextlib
import socket
import struct
import threading
import time

import pytest
import torch

from group.clusters import open_cluster
from group.hosts import together
from group.meshes import connect, open_meshes
from shoal.core import Address, Deadline, PeerLost, UsageError
from shoal.core.identity import new_secret
from shoal.group.cluster.mesh import Mesh

BOTH = pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])


def soon():
    return Deadline.after(20.0)


def port_for_tensors(mesh):
    return mesh._port  # strangers would find it by looking at all ports


@BOTH
def test_tensors_of_all_sizes_come_as_they_were_sent(is_encrypted):
    sizes = [0, 1, 4000, 70_000, 600_000, 3_000_000]
    with open_meshes(2, is_encrypted=is_encrypted) as (one, other):
        sent = [torch.randn(size) for size in sizes]
        wanted = [other.receive(0, (size,), torch.empty(size)) for size in sizes]
        for tensor in sent:
            one.send(1, (tensor.numel(),), tensor)
        for tensor, handle in zip(sent, wanted, strict=True):
            assert torch.equal(handle.wait(soon()), tensor)


@BOTH
def test_a_stranger_is_refused_and_nobody_is_lost_for_it(is_encrypted, caplog):
    with open_meshes(2, is_encrypted=is_encrypted) as (one, other):
        stranger = socket.create_connection(("127.0.0.1", port_for_tensors(other)), 20)
        stranger.sendall(struct.pack("<5sI16s", b"SHLK\x01", 0, b"\0" * 16) + b"\0" * 64)
        stranger.settimeout(20)
        with contextlib.suppress(ConnectionError):  # or it is closed in order
            while stranger.recv(1 << 16):
                pass
        stranger.close()
        give_up_s = time.monotonic() + 20
        while "refused" not in caplog.text:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        one.send(1, ("x",), torch.ones(3)).wait(soon())
        assert torch.equal(other.receive(0, ("x",), torch.empty(3)).wait(soon()), torch.ones(3))
        assert not other.monitor.lost


@BOTH
def test_a_worker_of_another_run_is_refused(is_encrypted):
    how = {"is_encrypted": is_encrypted}
    with open_meshes(2, **how) as (_, other), open_meshes(2, **how) as (third, _):
        address = Address("127.0.0.1", port_for_tensors(other))
        third._links.set_address(1, address, 1)  # as if two runs had mixed up their ports
        handle = third.send(1, ("x",), torch.ones(3))
        with pytest.raises(PeerLost):
            handle.wait(soon())
        assert not other.monitor.lost


@BOTH
def test_a_worker_cannot_send_as_another_one(is_encrypted, caplog):
    with open_meshes(3, is_encrypted=is_encrypted) as (one, other, third):
        third._links._handshake.rank = 0  # no program of ours does that
        third.send(1, ("x",), torch.zeros(3))
        give_up_s = time.monotonic() + 20
        while "it is not rank 0" not in caplog.text:
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        one.send(1, ("x",), torch.ones(3)).wait(soon())
        assert torch.equal(other.receive(0, ("x",), torch.empty(3)).wait(soon()), torch.ones(3))


def test_closing_does_not_wait_for_one_that_never_greets():
    """As a worker behind a cut does, which may take a minute to be given up."""
    with socket.create_server(("127.0.0.1", 0)) as silent, open_meshes(2) as (one, _):
        one._links.set_address(1, Address("127.0.0.1", silent.getsockname()[1]), 1)
        handle = one.send(1, ("x",), torch.ones(3))
        connected, _ = silent.accept()
        with connected:
            assert connected.recv(1)  # it is in the middle of greeting
            began_s = time.monotonic()
            one._links.close(Deadline.after(30))
            assert time.monotonic() - began_s < 15
        with pytest.raises(PeerLost):
            handle.wait(soon())


def test_what_is_encrypted_cannot_be_read_or_changed_on_its_way():
    content = torch.full((40_000,), 42, dtype=torch.uint8)
    passed, should_change = [], threading.Event()
    relay = socket.create_server(("127.0.0.1", 0))

    def pass_on(target):
        here, _ = relay.accept()
        with here, socket.create_connection(("127.0.0.1", target)) as there:

            def back():
                with contextlib.suppress(OSError):
                    while data := there.recv(1 << 16):
                        here.sendall(data)

            answering = threading.Thread(target=back)
            answering.start()
            with contextlib.suppress(OSError):
                while data := here.recv(1 << 16):
                    passed.append(data)
                    if should_change.is_set():
                        data = data[:-1] + bytes([data[-1] ^ 1])
                    there.sendall(data)
            with contextlib.suppress(OSError):
                there.shutdown(socket.SHUT_RDWR)
            answering.join(20)

    secret = new_secret()
    one, other = Mesh(0, secret), Mesh(1, secret)
    peers = {0: one.listen(), 1: other.listen()}
    try:
        connecting = threading.Thread(target=connect, args=(other, peers))
        connecting.start()
        port = port_for_tensors(other)
        relaying = threading.Thread(target=pass_on, args=(port,))
        relaying.start()
        own = relay.getsockname()[1]
        one.connect({1: peers[1]}, route=lambda rank, address: type(address)(address.host, own))
        connecting.join(20)
        one.send(1, ("first",), content)
        assert torch.equal(other.receive(0, ("first",)).wait(soon()), content)
        assert not any(b"\x2a" * 100 in data for data in passed)
        should_change.set()
        one.send(1, ("second",), content)
        with pytest.raises(PeerLost, match="changed on its way"):
            other.receive(0, ("second",)).wait(soon())
    finally:
        one.close(ConnectionAbortedError())
        other.close(ConnectionAbortedError())
        relaying.join(20)
        relay.close()


def test_workers_that_disagree_on_encryption_are_told():
    secret = new_secret()
    one, other = Mesh(0, secret, is_encrypted=True), Mesh(1, secret, is_encrypted=False)
    peers = {0: one.listen(), 1: other.listen()}
    errors = []

    def join(mesh):
        try:
            connect(mesh, peers)
        except UsageError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=join, args=(mesh,)) for mesh in (one, other)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for mesh in (one, other):
        mesh.close(ConnectionAbortedError())
    assert len(errors) == 2
    assert all("rank 1 sends tensors without encryption, and rank 0 encrypts them" in text for text in errors)


def drawn(rank, num_elements, dtype):
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(group, num_elements, op, dtype):
    tensor = drawn(group.rank, num_elements, dtype)
    return [group.all_reduce(tensor.clone(), op).wait(soon()) for _ in range(3)]


@pytest.mark.parametrize("all_reduce", ["ring", "direct", "auto"])
@pytest.mark.parametrize("machines", [[[0], [1]], [[0], [1], [2], [3]], [[0, 1], [2], [3]]], ids=str)
def test_all_ways_of_reducing_give_equal_bits_and_the_right_values(machines, all_reduce):
    size = sum(map(len, machines))
    with open_cluster(machines, all_reduce=all_reduce) as groups:
        for num_elements, dtype in [
            (5, torch.float32),
            (100_001, torch.float32),
            (2_000_003, torch.float32),
            (2_000_003, torch.bfloat16),
        ]:
            for op in ("mean", "sum", "max"):
                results = together(groups, lambda g, n=num_elements, o=op, d=dtype: reduced(g, n, o, d))
                expected = torch.stack([drawn(rank, num_elements, dtype).double() for rank in range(size)])
                expected = getattr(expected, op)(0) if op != "max" else expected.amax(0)
                tolerance = 1e-5 if dtype is torch.float32 else 0.05
                for each in results:
                    for result in each:
                        assert torch.equal(result, results[0][0])
                        torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_slow_machine_is_waited_for_and_its_memory_does_not_overflow():
    """One that is ahead sends at most what it may before the other has begun."""

    def work(group):
        if group.rank == 1:
            time.sleep(0.3)
        handles = [group.all_reduce(torch.full((300_000,), 1.0 + index), "sum") for index in range(8)]
        return [float(handle.wait(soon())[0]) for handle in handles]

    with open_cluster([[0], [1]]) as groups:
        assert together(groups, work) == [[2.0 * (1 + index) for index in range(8)]] * 2
