"""A client whose experts are modules of this process, and a DHT that is a table: both fail on demand."""

import asyncio
import copy

import torch
from torch import nn

from shoal.core import Address, Peer, PeerId, PeerLost, PeerRefused, PeerUnreachable, TensorError
from shoal.dht.records import Value
from shoal.experts.client.client import Forwarded
from shoal.experts.names import ExpertUid
from shoal.experts.schema import ExpertSchema, TensorSchema
from shoal.experts.settings import ClientSettings

LATER_S = 4e9


def peer_at(number):
    return Peer(Address("10.0.0.1", number), PeerId(number.to_bytes(20, "big")))


class FakeDHT:
    """Experts and who serves them; counts what it is asked."""

    def __init__(self):
        self.served = {}
        self.num_asked = 0
        self.tasks = []

    def declare(self, uid, *peers):
        self.served[uid] = peers or (peer_at(1),)

    async def get_coordinates(self, names, *, deadline=None, must_end=False):
        self.num_asked += len(names)
        return [self._below(name) for name in names]

    def _below(self, name):
        found = set()
        for uid in self.served:
            place = ExpertUid.of(uid).coordinates
            if len(place) == 1 and f"{uid}." == name:
                found.add(-1)
            elif uid.startswith(name):
                found.add(int(uid[len(name) :].split(".")[0]))
        return tuple(sorted(found)) or None

    async def get_many(self, names, *, latest=False, deadline=None, must_end=False):
        self.num_asked += len(names)
        return [self._record(name) for name in names]

    def _record(self, name):
        peers = self.served.get(name)
        if not peers:
            return None
        slots = {peer.id.digest: Value([str(peer.address)], LATER_S) for peer in peers}
        return Value(slots, LATER_S)

    def start_soon(self, work, name):
        self.tasks.append(asyncio.get_running_loop().create_task(work))
        return True

    async def settle(self):
        while self.tasks:
            await self.tasks.pop()


class FakeClient:
    """Has the methods of ExpertClient that mixtures use."""

    def __init__(self, loop):
        self.settings = ClientSettings()
        self.dht = FakeDHT()
        self.modules = {}
        self.schemas = {}
        self.faults = {}
        """What goes wrong, by uid, or by uid and peer: nan, shape, lost, hang; in backward with `backward-`
        before it."""
        self.calls = []
        self.num_kept = 0
        self._loop = loop

    def run(self, work, deadline=None):
        return self._loop.run(work, deadline)

    def add(self, uid, module, schema, *peers):
        self.modules[uid] = module
        self.schemas[uid] = schema
        self.dht.declare(uid, *peers)

    async def schema_of(self, uid, peers, deadline=None):
        if self.faults.get(uid) == "lost":
            raise PeerUnreachable("nobody is there", peer=peers[0])
        return self.schemas[uid]

    async def forward(self, uid, peers, inputs, *, deadline=None, is_kept, accept=None):
        self.calls.append(("forward", uid, len(inputs[0])))
        self.num_kept += is_kept
        self.schemas[uid].check_inputs(inputs)
        for peer in peers:
            try:
                outputs = await self._outputs(uid, peer, inputs)
                if accept is not None:
                    accept(outputs)
            except TensorError as error:
                refusal = PeerRefused(f"{peer} answered for {uid}: {error.what}", peer=peer)
            else:
                return Forwarded(uid, peer, outputs, 0.001, b"kept" if is_kept else b"")
        raise refusal

    async def _outputs(self, uid, peer, inputs):
        await self._fault(uid, "", peer)
        schema = self.schemas[uid]
        with torch.no_grad():
            outputs = _run(self.modules[uid], schema, inputs)
        fault = self.faults.get(uid) or self.faults.get((uid, peer))
        if fault == "nan":
            outputs[0][-1, -1] = torch.nan
        if fault == "shape":
            outputs[0] = outputs[0][:, :-1]
        return outputs

    async def backward(self, forwarded, inputs, grad_outputs, *, deadline=None):
        uid = forwarded.uid
        self.calls.append(("backward", uid, len(inputs[0])))
        await self._fault(uid, "backward-", forwarded.peer)
        schema = self.schemas[uid]
        with torch.enable_grad():
            # on the CPU from the start: torch's thread for the GPU is the one that waits for this answer
            given = [tensor.detach().cpu().clone() for tensor in inputs]
            given = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in given]
            outputs = _run(self.modules[uid], schema, given)
            torch.autograd.backward(outputs, [gradient.cpu() for gradient in grad_outputs])
        if self.faults.get(uid) == "backward-nan":
            given[0].grad[0, 0] = torch.nan
        return [tensor.grad for tensor in given]

    async def _fault(self, uid, when, peer):
        fault = self.faults.get(uid)
        if fault == f"{when}lost":
            raise PeerLost("the connection ended", peer=peer)
        if fault == f"{when}refuse":
            raise PeerRefused("no", peer=peer)
        if fault == f"{when}hang":
            await asyncio.sleep(3600)
        await asyncio.sleep(0)


def _run(module, schema, inputs):
    args, kwargs = schema.unflatten([tensor.cpu() for tensor in inputs])
    outputs = module(*args, **kwargs)
    return [outputs] if schema.is_single else list(outputs)


def plain_schema(num_features, dtype="float32"):
    shape = TensorSchema(dtype, (num_features,))
    return ExpertSchema((shape,), (), (shape,), is_single=True)


def add_linear_experts(
    client, uids, num_features=6, *, peer_of=lambda index: peer_at(1 + index % 3), **options
):
    """So many different linear modules; copies of them, to compare with."""
    for index, uid in enumerate(uids):
        torch.manual_seed(index)
        module = nn.Linear(num_features, num_features, **options)
        schema = plain_schema(num_features, str(module.weight.dtype).removeprefix("torch."))
        client.add(uid, module, schema, peer_of(index))
    return {uid: copy.deepcopy(client.modules[uid]) for uid in uids}
