"""Shoal trains one PyTorch model on many machines, and measures every way of doing so in the same terms."""

__version__ = "0.1.0"
