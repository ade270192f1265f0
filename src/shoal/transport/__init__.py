"""How bytes move between peers: frames, streams, limits and the memory that they arrive in."""

from shoal.transport.limits import Limits
from shoal.transport.memory import ALIGNMENT_BYTES, BufferPool, aligned_memory, byte_view
from shoal.transport.messages import Allocate, Channel, Head, Reply, Serve, ServeChannel, Transport
from shoal.transport.stream import StreamTransport

__all__ = [
    "ALIGNMENT_BYTES",
    "Allocate",
    "BufferPool",
    "Channel",
    "Head",
    "Limits",
    "Reply",
    "Serve",
    "ServeChannel",
    "StreamTransport",
    "Transport",
    "aligned_memory",
    "byte_view",
]
