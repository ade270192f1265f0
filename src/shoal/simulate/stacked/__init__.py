"""The stacked executor: all workers' parameters are rows of one matrix, and times are computed afterwards."""
