"""Calls of any size and channels over TCP or TLS, many at once on each connection.

`transport` is the door; `connection` passes each frame to whom it concerns: `calls` (both sides of a call)
or `channel`; `outbox` sends and `decoder` receives; `blocking` is for threads that wait. The format is
`..frames`. Apart from all these, `one_way` moves large buffers between threads of a group.
"""
