"""The group of workers on several machines: shared memory inside each, streams between them."""

from shoal.group.cluster.group import TorchGroup, open_torch_group

__all__ = ["TorchGroup", "open_torch_group"]
