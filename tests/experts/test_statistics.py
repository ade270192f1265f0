"""Counts add up, and nothing is divided by zero."""

from shoal.experts.expert import ExpertStatistics


def test_nothing_done_yet():
    statistics = ExpertStatistics()
    assert statistics.mean_batch_size == statistics.samples_per_busy_s == 0


def test_the_rate_divides_by_busy_time():
    statistics = ExpertStatistics(
        num_forward_batches=1,
        num_forward_samples=6,
        num_backward_batches=2,
        num_backward_samples=4,
        busy_s=0.5,
    )
    assert statistics.num_batches == 3
    assert statistics.samples_per_busy_s == 20
