"""What carries the bytes: real sockets, links in memory, and real sockets that are made worse.

`sockets`, `memory` and `shaped` are the three networks. A `profiles` file says what links are like
(`distributions`: how long a packet takes), a `faults` script what befalls them; `conditions` makes `links` of
both, and `pipes` keep what crosses them. `documents` reads and writes the TOML.
"""
