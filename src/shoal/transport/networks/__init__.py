"""What carries bytes between addresses: real sockets, links in memory, and sockets made worse."""
