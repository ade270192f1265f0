"""Who may talk: the swarm's secret, certificates made from it, lists of peers, and TLS."""
