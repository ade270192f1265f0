"""Who may talk: `secret` of the swarm, `membership` and lists of peers, `tls` with the certificates."""
