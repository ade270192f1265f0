"""What runs in the processes that benchmarks start, beside scenarios: it may import torch at once."""
