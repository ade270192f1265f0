"""Parameter servers and workers that are started by hand, one command each, as with TensorFlow's of old.

Who is who follows from the lists of hosts, which all of them are given alike: servers first, then workers.
They meet at the first server's address; the other ports are not used. What a role does is
`training_by_hand`'s.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import msgspec

from shoal.bench.contenders import Spread
from shoal.bench.training import TrainingConfig
from shoal.bench.training_rows import OWN_SPEED
from shoal.core import Address, UsageError
from shoal.core.run_options import RUN_ID_VARIABLE, RunOptions
from shoal.report import Report, Row
from shoal.report.views import Items

JobName = Literal["ps", "worker"]
STRATEGY = "parameter-server"
DEFAULT_ITERATIONS, DEFAULT_BATCH_SIZE, DEFAULT_WARMUP = 3000, 64, 10


class Role(msgspec.Struct, frozen=True):
    """One process of those that were started by hand."""

    job: JobName
    index: int
    """Among those of the same job."""
    num_servers: int
    num_workers: int
    meeting: Address
    """The first server's."""
    network_interface: str | None = None
    """Through which this process talks to other machines."""

    @property
    def is_server(self) -> bool:
        """Whether it holds parameters, and trains nothing."""
        return self.job == "ps"

    @property
    def variables(self) -> dict[str, str]:
        """How a launcher would have placed this process."""
        rank = self.index if self.is_server else self.num_servers + self.index
        run_id = os.environ.get(RUN_ID_VARIABLE, "")
        options = RunOptions(run_id=run_id, network_interface=self.network_interface)
        return {
            **options.to_environment(),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_servers + self.num_workers),
            "MASTER_ADDR": self.meeting.host,
            "MASTER_PORT": str(self.meeting.port),
        }


def role_of(ps_hosts: str | None, worker_hosts: str | None, job: JobName | None, index: int) -> Role | None:
    """The role that the flags give this process; None without any. UsageError where they do not suffice."""
    if ps_hosts is None and worker_hosts is None and job is None:
        return None
    if ps_hosts is None or worker_hosts is None or job is None:
        raise UsageError(
            "A process that is started by hand has to know the others, and what it is itself.",
            next_step="give --ps-hosts HOST:PORT,… --worker-hosts HOST:PORT,… --job-name ps|worker "
            "--task-index N.",
        )
    servers = _addresses("--ps-hosts", ps_hosts)
    workers = _addresses("--worker-hosts", worker_hosts)
    peers = servers if job == "ps" else workers
    if not 0 <= index < len(peers):
        raise UsageError(
            f"There is no {job} {index} among {len(peers)}.",
            next_step=f"give --task-index 0 to {len(peers) - 1}, or name more hosts.",
        )
    return Role(job, index, len(servers), len(workers), servers[0])


def _addresses(flag: str, text: str) -> list[Address]:
    addresses = [Address.parse(part.strip()) for part in text.split(",") if part.strip()]
    if not addresses:
        raise UsageError(f"{flag} names nobody.", next_step=f"say {flag} HOST:PORT,HOST:PORT.")
    return addresses


def summarize_worker(report: Report) -> dict[str, Any]:
    """The RESULT of one worker."""
    config, speed = msgspec.convert(report.config, TrainingConfig), _row(report, OWN_SPEED)
    result: dict[str, Any] = {
        "strategy": STRATEGY,
        "model": config.model,
        "num_workers": config.num_workers,
        "num_servers": config.num_servers,
        "batch_size": config.batch_size,
        "num_iterations": 0,
    }
    if speed is not None:
        spread = Spread.of(speed.samples)
        result |= {
            "rank": speed.key["rank"],
            "num_iterations": len(speed.samples),
            "examples_per_s": round(spread.mean, 1),
            "error": round(spread.error, 1),
        }
    failed = len(report.failed)
    return {**result, "failed": failed} if failed else result


def worker_items(report: Report) -> Items:
    """What is printed of one worker's report, in the document's words."""
    speed = _row(report, OWN_SPEED)
    items: Items = [] if speed is None else [f"Img/sec per worker: {Spread.of(speed.samples)}"]
    return [*items, *((f"failed: {row.error}", "red") for row in report.failed)]


def _row(report: Report, metric: str) -> Row | None:
    return next((row for row in report.rows if row.metric == metric and row.starts), None)


def config_of(
    role: Role, config: TrainingConfig, *, num_iterations: int | None, num_warmup: int | None
) -> TrainingConfig:
    """What a process that is started by hand trains: the same, with plain SGD, iteration by iteration."""
    return msgspec.structs.replace(
        config,
        strategies=(STRATEGY,),
        num_workers=role.num_workers,
        num_servers=role.num_servers,
        num_warmup=num_warmup or DEFAULT_WARMUP,
        iterations=num_iterations or DEFAULT_ITERATIONS,
        momentum=0.0,
    )
