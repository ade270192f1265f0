"""What `shoal bench experts` and `shoal bench swarm` are asked for."""

from __future__ import annotations

import msgspec

from shoal.bench.experts import (
    ExpertsFlags,
    config_of,
    ensure_files,
    experts_items,
    preset_named,
    summarize_experts,
)
from shoal.bench.frame import BenchmarkPlan, RunFlags, WholeRunFlags, announce
from shoal.bench.swarm import SwarmFlags, summarize_swarm, swarm_config


def experts_command(flags: ExpertsFlags, run: WholeRunFlags) -> BenchmarkPlan:
    """Clients that send batches to the experts of one server, beside a bare echo and the module alone."""
    should_raise = flags.increase_file_limit or preset_named(flags.preset).should_raise_file_limit
    config = config_of(flags.preset, msgspec.structs.asdict(flags))
    announce(ensure_files(config.num_files, should_raise=should_raise))
    return BenchmarkPlan(config, run, summarize_experts, experts_items)


def swarm_command(flags: SwarmFlags, run: RunFlags) -> BenchmarkPlan:
    """Rounds of a swarm of processes, clean and with a peer killed or stopped, beside the transport alone."""
    return BenchmarkPlan(swarm_config(flags, run), run=run, summarize=summarize_swarm)
