"""How bytes move between peers: streams, datagrams, who may talk, and networks that misbehave on purpose.

`messages` says what a call is to those who make and answer it, `endpoint` puts both kinds at one address.
"""

from shoal.transport.datagrams.transport import DatagramTransport
from shoal.transport.endpoint import Endpoint
from shoal.transport.limits import Limits
from shoal.transport.memory import ALIGNMENT_BYTES, BufferPool, aligned_memory, byte_view
from shoal.transport.messages import Allocate, Channel, Head, Reply, Serve, ServeChannel, Transport
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import FaultScript
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.profiles import Profile
from shoal.transport.network.shaped import ShapedNetwork, shaped
from shoal.transport.network.sockets import Network, SocketNetwork
from shoal.transport.relay import RelayLimits
from shoal.transport.streams.transport import StreamTransport
from shoal.transport.throttle import ThrottledTransport
from shoal.transport.trust.membership import Access, Membership
from shoal.transport.trust.secret import SwarmSecret

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
    "RelayLimits",
    "Reply",
    "Serve",
    "ServeChannel",
    "ShapedNetwork",
    "SocketNetwork",
    "StreamTransport",
    "SwarmSecret",
    "ThrottledTransport",
    "Transport",
    "aligned_memory",
    "byte_view",
    "shaped",
]
