"""Small calls over UDP: sealed sessions between two peers, and the two sides of a call.

`transport` is the door; `handshake` begins a session and lets in who has proven its address; `sessions`
seals its packets and refuses replayed ones; `caller` and `callee` are its two ends; `wire` is the format,
and where a new frame begins.
"""
