"""How bytes move between peers: streams, datagrams, who may talk, and networks that misbehave on purpose."""

from shoal.transport.access import Access
from shoal.transport.conditions import Conditions
from shoal.transport.datagrams import DatagramTransport
from shoal.transport.endpoint import Endpoint
from shoal.transport.faults import FaultScript
from shoal.transport.limits import Limits
from shoal.transport.membership import Membership
from shoal.transport.memory import ALIGNMENT_BYTES, BufferPool, aligned_memory, byte_view
from shoal.transport.memory_network import MemoryNetwork
from shoal.transport.messages import Allocate, Channel, Head, Reply, Serve, ServeChannel, Transport
from shoal.transport.network import Network, SocketNetwork
from shoal.transport.profiles import Profile
from shoal.transport.secret import SwarmSecret
from shoal.transport.shaping import ShapedNetwork, shaped
from shoal.transport.stream import StreamTransport

__all__ = [
    "ALIGNMENT_BYTES",
    "Access",
    "Allocate",
    "BufferPool",
    "Channel",
    "Conditions",
    "DatagramTransport",
    "Endpoint",
    "FaultScript",
    "Head",
    "Limits",
    "Membership",
    "MemoryNetwork",
    "Network",
    "Profile",
    "Reply",
    "Serve",
    "ServeChannel",
    "ShapedNetwork",
    "SocketNetwork",
    "StreamTransport",
    "SwarmSecret",
    "Transport",
    "aligned_memory",
    "byte_view",
    "shaped",
]
