"""The virtual-time world: workers, what their steps cost, the network between them, and what goes wrong."""
