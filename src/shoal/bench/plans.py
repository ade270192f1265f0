"""What `shoal bench swarm` is asked for."""

from __future__ import annotations

from shoal.bench.frame import BenchmarkPlan, RunFlags
from shoal.bench.swarm import SwarmFlags, summarize_swarm, swarm_config


def swarm_command(flags: SwarmFlags, run: RunFlags) -> BenchmarkPlan:
    """Rounds of a swarm of processes, clean and with a peer killed or stopped, beside the transport alone."""
    return BenchmarkPlan(swarm_config(flags, run), run=run, summarize=summarize_swarm)
