"""What a host of experts is told: by flags, by a TOML file with the same names, or by both, where flags win.

Nothing here imports torch, nor other rooms before they are needed: every command line reads this file, to
offer the options. What they do is `hosting`'s.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from shoal.core.errors import UsageError
from shoal.core.run_options import OptionInfo, describe_struct
from shoal.experts.clipping import DEFAULT_FACTOR, GradientClip

T = TypeVar("T")
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Factor = Annotated[float, Meta(ge=0)]
Port = Annotated[int, Meta(ge=0, le=65535)]
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class HostingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The experts of one process, how they learn, and where they are found."""

    expert_class: Annotated[
        str,
        Meta(description="what is served: ffn, transformer, nop, …, package.module:factory, file.py:factory"),
    ] = "ffn"
    hidden_dim: Annotated[Count, Meta(description="width of the experts")] = 1024
    num_experts: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="how many to serve; by default as many as are named or saved, else 1"),
    ] = None
    uid: Annotated[
        tuple[str, ...],
        Meta(description="serve this one, also when others do, as a replica; may be given often"),
    ] = ()
    uid_pattern: Annotated[
        str | None, Meta(description="draw uids that nobody serves from it, as ffn.[0:32].[0:32]")
    ] = None
    seed: Annotated[int, Meta(description="of first weights; each expert's also depends on its uid")] = 0

    optimizer: Annotated[
        str, Meta(description="of each expert: adam, adamw, sgd, or none, which learns nothing")
    ] = "adam"
    lr: Annotated[Factor, Meta(description="learning rate")] = 1e-3
    weight_decay: Annotated[Factor, Meta(description="of the optimizer")] = 0.0
    scheduler: Annotated[
        Literal["none", "linear"], Meta(description="of the learning rate: up in warm-up, then down to 0")
    ] = "none"
    num_warmup_steps: Annotated[int, Meta(ge=0, description="updates of linear warm-up")] = 0
    num_training_steps: Annotated[
        Count | None, Meta(description="updates after which the linear scheduler has come to 0")
    ] = None
    max_grad_norm: Annotated[Seconds | None, Meta(description="clip gradients to this norm")] = None
    clip_gradients: Annotated[
        Factor,
        Meta(description="clip gradients to so many times the expert's usual norm; 0 is off"),
    ] = DEFAULT_FACTOR

    device: Annotated[
        str | None,
        Meta(description="where they compute: cpu, cuda, cuda:1; by default cuda where there is one"),
    ] = None
    precision: Annotated[
        Literal["fp32", "tf32", "bf16"],
        Meta(description="of matrix products; tf32 on CUDA, bf16 by autocast"),
    ] = "fp32"
    num_threads: Annotated[
        Count | None, Meta(description="threads of torch on the CPU; by default its choice")
    ] = None
    num_loops: Annotated[
        Count | None, Meta(description="network loop threads; by default half of the cores, 8 at most")
    ] = None
    max_batch_size: Annotated[Count, Meta(description="samples that are computed at once")] = 4096
    min_batch_size: Annotated[Count, Meta(description="samples to wait for, up to --max-wait-s")] = 1
    max_wait_s: Annotated[Seconds, Meta(description="how long a request waits for others")] = 0.005
    max_waiting: Annotated[Count, Meta(description="requests in line; beyond it clients are told 'busy'")] = (
        4096
    )
    max_message_mib: Annotated[Count, Meta(description="size of the largest request that is taken")] = 256

    listen: Annotated[
        str | None,
        Meta(description="where clients call; by default a free port, on this machine only without a secret"),
    ] = None
    join: Annotated[
        tuple[str, ...],
        Meta(description="a peer of the swarm, may be given often; without it there is no DHT"),
    ] = ()
    wait: Annotated[bool, Meta(description="when nobody answers, stay and try again, instead of failing")] = (
        False
    )
    secret_file: Annotated[
        str | None, Meta(description="the swarm's secret; SHOAL_SECRET where it is not given")
    ] = None
    identity_file: Annotated[str | None, Meta(description="be this peer, a file of `shoal keys new`")] = None
    allow_file: Annotated[str | None, Meta(description="ids of the only peers that may talk, one a line")] = (
        None
    )
    deny_file: Annotated[str | None, Meta(description="ids of peers that may not talk, one a line")] = None
    insecure: Annotated[bool, Meta(description="listen beyond this machine without a secret")] = False
    declare_s: Annotated[
        float, Meta(ge=3, description="how long the swarm finds experts after their server was lost")
    ] = 60.0
    replica_sync_s: Annotated[
        Seconds, Meta(description="seconds between two averages with another server of the same expert")
    ] = 30.0

    checkpoint_dir: Annotated[
        str | None, Meta(description="save experts there, and restore at start those that are there")
    ] = None
    checkpoint_every_s: Annotated[Seconds, Meta(description="seconds between two saves")] = 30.0
    num_checkpoints: Annotated[Count, Meta(description="saves of each expert that are kept")] = 3
    adopt: Annotated[
        bool, Meta(description="also serve experts of --checkpoint-dir that nobody serves any more")
    ] = False
    adopt_s: Annotated[Seconds, Meta(description="seconds between two looks for such experts")] = 10.0
    max_experts: Annotated[
        Count | None, Meta(description="at most so many, with those adopted; by default no limit")
    ] = None
    leave_s: Annotated[Factor, Meta(description="at the end, seconds to finish what was accepted")] = 30.0

    stats_s: Annotated[
        Seconds | None, Meta(description="seconds between two status lines; by default 60, 1 on a terminal")
    ] = None
    metrics_port: Annotated[
        Port | None, Meta(description="serve Prometheus metrics there over HTTP; 0 takes a free port")
    ] = None
    metrics_host: Annotated[str, Meta(description="where --metrics-port listens")] = "127.0.0.1"

    def part(self, kind: type[T], **others: Any) -> T:
        """Settings of a kind (a dataclass), from the fields of the same names here, and from `others`."""
        names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
        return kind(**{name: getattr(self, name) for name in names if hasattr(self, name)} | others)

    def check(self) -> None:
        """UsageError for options that do not go together, or name what cannot be."""
        from shoal.experts.names import ExpertUid, UidPattern

        if self.uid_pattern is not None:
            UidPattern.of(self.uid_pattern)
        if self.join:
            for uid in self.uid:
                ExpertUid.of(uid)
        else:
            self._check_alone()
        if len(set(self.uid)) < len(self.uid):
            raise UsageError("An expert is named twice.", next_step="give each --uid once.")
        if self.num_experts is not None and self.num_experts < len(self.uid):
            raise UsageError(
                f"{len(self.uid)} experts are named, and --num-experts is {self.num_experts}.",
                next_step="leave --num-experts out.",
            )
        least = max(self.num_experts or 0, len(self.uid))
        if self.max_experts is not None and least > self.max_experts:
            raise UsageError(
                f"{least} experts are wanted, and --max-experts is {self.max_experts}.",
                next_step="raise it, or leave it out.",
            )
        if self.num_experts == 0 and not self.adopt:
            raise UsageError(
                "There would be no experts to serve.", next_step="raise --num-experts, or add --adopt."
            )
        if self.adopt and self.checkpoint_dir is None:
            raise UsageError(
                "--adopt needs a folder of saved experts.",
                next_step="add --checkpoint-dir DIR, the folder that the other servers save to.",
            )
        GradientClip(self.clip_gradients)  # refuses what is no factor
        if self.device is not None and _DEVICE.fullmatch(self.device) is None:
            raise UsageError(
                f"Experts cannot be served on {self.device!r}.", next_step="use cpu, cuda, or cuda:1."
            )
        if self.scheduler == "linear" and self.num_training_steps is None:
            raise UsageError(
                "The linear scheduler needs to know when it ends.", next_step="add --num-training-steps."
            )

    def _check_alone(self) -> None:
        """What only a swarm can do."""
        if self.uid_pattern is not None:
            raise UsageError(
                "--uid-pattern draws uids that nobody serves yet, and without --join nobody can tell.",
                next_step="give --join HOST:PORT of a peer (`shoal dht` starts one), or name experts, --uid.",
            )
        if self.adopt:
            raise UsageError(
                "--adopt takes over experts that nobody in a swarm serves, and there is no swarm.",
                next_step="give --join HOST:PORT of a peer.",
            )


def load_config(path: Path | None, given: Mapping[str, Any]) -> HostingConfig:
    """What a file says, if there is one, and what was `given` beside it, which wins; checked as a whole."""
    from shoal.transport.network.documents import read_file

    known = (
        {} if path is None else msgspec.structs.asdict(read_file(path, HostingConfig, "the configuration"))
    )
    try:
        config = msgspec.convert({**known, **given}, HostingConfig)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`").partition("[")[0]
        said = f"--{name.replace('_', '-')} {given[name]}: " if name in given else ""
        raise UsageError(f"{said}{reason[:1].lower()}{reason[1:]}.") from None
    config.check()
    return config


def options() -> list[OptionInfo]:
    """List the fields of the configuration, in order."""
    return describe_struct(HostingConfig)
