"""What carries bytes between addresses: real sockets, links in memory, and either made worse on purpose."""
