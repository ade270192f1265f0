"""A mixture of experts that many trainers share, with stale gradients."""
