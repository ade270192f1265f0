"""The group of workers on several machines: shared memory inside each, streams between them."""

from shoal.group.cluster.group import ClusterGroup, open_cluster_group

__all__ = ["ClusterGroup", "open_cluster_group"]
