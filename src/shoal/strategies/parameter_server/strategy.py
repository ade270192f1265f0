"""The strategies `parameter-server` and `staleness-aware`, as workers' and servers' programs see them.

The first ranks of `Group.everybody` are the servers; each holds a part of the parameters and runs the user's
own optimizer on it, on the device of the model that its program attaches. A worker's optimizer steps only
where it does not pull: its step is hidden from it by gradients of None.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.core import Deadline
from shoal.core.elastic import LeavingRun
from shoal.core.errors import PeerLost, UsageError
from shoal.core.status import tell_launcher
from shoal.group import Group, share
from shoal.group.elastic import ElasticGroup, elastic_of
from shoal.group.functions import take_state, take_values
from shoal.strategies.options import ParameterServerOptions, StalenessAwareOptions
from shoal.strategies.parameter_server.channel import RequestKind, ServerChannel, divide
from shoal.strategies.parameter_server.client import ServerClient
from shoal.strategies.parameter_server.server import AsyncServer, SyncServer
from shoal.strategies.session import TrainingSession
from shoal.strategies.staleness import Staleness
from shoal.strategies.start import require_equal
from shoal.strategies.strategy import Strategy
from shoal.tensors.checkpoint import flatten

log = logging.getLogger(__name__)


class ParameterServer(Strategy):
    """Gradients go to servers, parameters come from them, and workers never wait for each other in `async`.

    Learning rates and other numbers of the optimizer go with each push, so that a scheduler on the worker
    counts. With `local_steps` J, or between pulls, the worker's own optimizer steps on its own copy, and the
    sum of J gradients is pushed. One model can be attached at a time. A lost worker ends nothing; a lost
    server ends the step with PeerLost.
    """

    name = "parameter-server"
    survives_loss = True
    is_lockstep = False
    has_own_replica = False  # the servers' parameters are everybody's
    checks_finite = False  # servers refuse gradients that are not finite, and they go nowhere else
    Options = ParameterServerOptions
    options: ParameterServerOptions
    _client: ServerClient | None = None
    _sums: list[torch.Tensor | None]
    """The gradients since the last push, where there are several steps to a push."""

    def __init__(self, group: Group | None = None, **options: Any) -> None:
        super().__init__(group, **options)
        _check(self.options)
        self._is_void = False
        self._num_refused = 0
        self._stats: dict[str, Any] = {}
        self._has_served = False
        """Whether this server holds what was learned; a run whose workers come and go attaches it again."""
        self.staleness: Staleness | None = None
        """How far behind the pushes were that a server has taken; None on a worker."""

    @property
    def is_alone(self) -> bool:
        """Whether there is nothing to share; where there are servers, also one worker shares."""
        return self.group.everybody is None and self.group.size == 1

    @property
    def stats(self) -> dict[str, Any]:
        """Pushes, pulls and bytes by server; after the end also what the servers have counted.

        Of each server: pushes, how many were applied or dropped, and a histogram of how many updates they
        were behind (`staleness`) and, in `bounded`, how many rounds their workers led by (`leads`).
        """
        client = self._client
        if client is None:
            return dict(self._stats)
        return {
            "num_pushes": client.num_pushes,
            "num_pulls": client.num_pulls,
            "pushed_bytes": list(client.pushed_bytes),
            "pulled_bytes": list(client.pulled_bytes),
            "servers": client.summaries,
        }

    def attach(
        self, model: nn.Module, optimizer: Optimizer, *, stays: bool = False, should_start_equal: bool = True
    ) -> TrainingSession:
        """As all strategies on a worker. On a server: serve until all workers are gone, then end the program.

        The first worker's values are taken whatever `should_start_equal` says: there is one model only.
        """
        elastic = elastic_of(self.group)
        if self.group.role == "server":
            while self.serve(model, optimizer):
                pass
            if elastic is None:
                self.group.leave()
            raise SystemExit(0)
        is_pending = elastic is not None and elastic.is_pending
        if self.group.everybody is None and self.group.size > 1 and not is_pending:
            raise UsageError(
                f"{self.name} has no server among its workers.",
                next_step="shoal run --num-servers 1, or shoal.init(num_servers=1).",
            )
        return super().attach(model, optimizer, stays=stays, should_start_equal=should_start_equal)

    def serve(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Takes part as a server until the workers detach; tells whether they stay, and may attach again.

        Where workers come and go it serves those of every generation, until the run is over.
        """
        if self.group.everybody is None or self.group.role != "server":
            raise UsageError(
                "serve() is for a parameter server.", next_step="call attach(), on workers and servers alike."
            )
        elastic = elastic_of(self.group)
        if elastic is None:
            return self._serve_generation(model, optimizer)
        self._serve_generations(elastic, model, optimizer)
        return False

    def _serve_generation(self, model: nn.Module, optimizer: Optimizer) -> bool:
        everybody = self.group.everybody
        assert everybody is not None
        tell_launcher(survives_loss=self.survives_loss)
        everybody.barrier().wait(Deadline.never())
        if all(rank < self.group.num_servers for rank in everybody.members):
            return False
        everybody.should_survive = False
        session = TrainingSession(self, model, optimizer, stays=True)
        channel = self._open_channel(everybody, session)
        kind = SyncServer if self.options.mode == "sync" else AsyncServer
        server = kind(channel, session)
        try:
            everybody.barrier().wait()
        except PeerLost:
            server.release()
            raise
        everybody.should_survive, self._has_served = True, True
        self.staleness = server.staleness
        self.status_reporter.opened(0)
        try:
            do_all_stay = server.run(lambda: self.status_reporter.stepped(server.counts["num_applied"]))
        finally:
            self.status_reporter.closed()
        if do_all_stay:
            channel.close()
        self._stats = server.summary()
        return do_all_stay

    def _serve_generations(self, elastic: ElasticGroup, model: nn.Module, optimizer: Optimizer) -> None:
        """Serves the workers of each generation, until the run is over."""
        elastic.link.is_lockstep = False
        while True:
            error: PeerLost | None = None
            try:
                self._serve_generation(model, optimizer)
            except PeerLost as lost:
                error = lost
            try:
                elastic.regroup(0, is_fresh=not self._has_served, error=error)
            except LeavingRun:
                tell_launcher(phase="left")
                return
            self.status_reporter = self.status_reporter.moved(self.group)

    def settle_round(self, session: TrainingSession) -> None:
        """With backup workers waits until all have called it, and pulls."""
        if self.options.mode == "sync" and self.options.num_aggregate is not None:
            self._meet()

    # --- a worker's steps ---

    @property
    def _connected(self) -> ServerClient:
        assert self._client is not None, "not attached"
        return self._client

    def begin(self, session: TrainingSession, *, should_start_equal: bool) -> None:
        """Takes up a checkpoint, which the first worker then gives to everybody."""
        everybody = self.group.everybody
        assert everybody is not None
        everybody.barrier().wait()
        everybody.should_survive = False
        session.take_up()

    def start(self, session: TrainingSession) -> None:
        """Gives everybody the first worker's values, and opens the way to the servers."""
        everybody = self.group.everybody
        assert everybody is not None
        channel = self._open_channel(everybody, session)
        self._client = ServerClient(channel, session)
        self._num_refused = 0
        self._sums = [None] * len(session.trainable)
        session.close_later(channel.close)
        everybody.barrier().wait()
        everybody.should_survive = True

    def _open_channel(self, everybody: Group, session: TrainingSession) -> ServerChannel:
        first_worker = next(rank for rank in everybody.members if rank >= self.group.num_servers)
        have_served = elastic_of(self.group) is not None and any(share(everybody, self._has_served))
        num_holding = self.group.num_servers if have_served else 0
        is_on_devices = take_first_worker(everybody, first_worker, session, num_holding)
        return ServerChannel(everybody, session, self.options, is_on_devices=is_on_devices)

    def before_step(self, session: TrainingSession) -> None:
        """Pushes the gradients, and hides them from the worker's own optimizer."""
        if session.has_closure:
            raise UsageError(
                f"{self.name} cannot step with a closure: the servers have gradients, and no data.",
                next_step="use an optimizer that steps by gradients (SGD, Adam), or another strategy.",
            )
        # a GradScaler leaves it to fused optimizers to divide by the scale, and to do nothing with an inf
        self._is_void = session.is_void
        if self._is_void:
            session.finite.hide_gradients()
            return
        gradients = self._summed(session)
        if not session.is_round:
            return
        self._connected.push(gradients, self.options.rate_factor(self.steps))
        if self._is_pulling:
            session.finite.hide_gradients()

    def after_step(self, session: TrainingSession) -> None:
        """Pulls the parameters, once the gradients have been sent."""
        if self._is_void:
            self.skip_step(session)
        elif session.is_round:
            self._connected.finish_push()
            self._sums = [None] * len(self._sums)
            if self._is_pulling:
                self._connected.pull()
            num_refused = self._connected.num_refused
            if num_refused > self._num_refused:
                self._num_refused = num_refused
                session.finite.refused(self.steps, "The servers refused it, and go on without it.")

    def skip_step(self, session: TrainingSession) -> None:
        """Tells servers that wait for all."""
        if session.is_round and self.options.mode != "async":
            self._connected.skip()

    @property
    def _is_pulling(self) -> bool:
        """Whether a pull follows the push that was begun."""
        return self._connected.num_pushes % self.options.pull_every == 0

    def _summed(self, session: TrainingSession) -> Sequence[torch.Tensor | None]:
        """Adds this step's gradients to those since the last push."""
        gradients = [parameter.grad for parameter in session.trainable]
        scale = getattr(session.optimizer, "grad_scale", None)
        if scale is not None:
            factor = 1 / float(scale)
            gradients = [None if gradient is None else gradient * factor for gradient in gradients]
        if self.options.local_steps == 1:
            return gradients
        for index, gradient in enumerate(gradients):
            known = self._sums[index]
            if gradient is not None:
                dense = gradient.to_dense() if gradient.is_sparse else gradient.detach()
                self._sums[index] = dense.clone() if known is None else known.add_(dense)
        return self._sums

    def average_all(self, session: TrainingSession) -> None:
        """Lets everybody take the one model as it is now."""
        self._meet()

    def _meet(self) -> None:
        """Comes before workers wait for each other: no server waits then for one that does."""
        if self._client is not None:
            self._client.meet()

    # --- checkpoints ---

    def before_saving(self, session: TrainingSession) -> None:
        """Waits until all that was pushed is applied, and pulls."""
        self._meet()

    def common_optimizer(self, session: TrainingSession) -> dict[str, Any]:
        """Gives what the servers' optimizers keep, and takes the parameters as the servers have them."""
        return super().common_optimizer(session) if self._client is None else self._client.take_optimizer()

    def state_at_end(self) -> dict[str, Any]:
        """Waits for this worker's pushes, so that the last worker finds all of them on the servers."""
        if self._client is not None:
            self._client.wait_for_all()
        return super().state_at_end()

    # --- the end ---

    def finish(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Takes leave of the servers."""
        if self._client is not None:
            try:
                self._client.ask(RequestKind.LEAVE if should_leave else RequestKind.DETACH)
            except PeerLost as error:
                log.warning("%s", error)

    def stop(self, session: TrainingSession) -> None:
        """Moves the parameters back into private memory."""
        self._stats = self.stats
        if self._client is not None:
            self._client.release()


class StalenessAwareSGD(ParameterServer):
    """`parameter-server` with `staleness_lr` and `delay_compensation` on; all that holds there holds here.

    The learning rate is divided by the number of updates that a gradient is behind (Zhang, Gupta, Lian and
    Liu 2016, "Staleness-aware async-SGD"), and the gradient is corrected for where the parameters have gone
    in the meantime (DC-ASGD, Zheng et al. 2017, algorithm 2, with a constant lambda).
    """

    name = "staleness-aware"
    Options = StalenessAwareOptions
    options: StalenessAwareOptions


def _check(options: ParameterServerOptions) -> None:
    """Raises UsageError for options that make no sense together."""
    if options.mode != "async" and options.pull_every > 1:
        raise UsageError(
            f"pull_every {options.pull_every} is for async: {options.mode} bounds how old gradients are.",
            next_step="leave pull_every at 1; local_steps makes rounds rarer in all modes.",
        )
    if options.delay_compensation and options.pull_every > 1:
        raise UsageError(
            f"pull_every {options.pull_every} does not go with delay_compensation: the servers know what a "
            "worker has pulled, and not where it has gone from there.",
            next_step="leave one of them as it is by default.",
        )
    if options.mode == "sync" and options.delay_compensation:
        raise UsageError(
            "delay_compensation is for modes async and bounded: in sync there are no delays.",
            next_step="leave it at 0.",
        )


def take_first_worker(group: Group, root: int, session: TrainingSession, num_holding: int = 0) -> bool:
    """Makes parameters, buffers, and the optimizer's settings and state of rank `root` everybody's.

    Where its optimizer has no state, others keep theirs. UsageError on all when one is of another kind. Tells
    whether all members have their models on GPUs. Where so many servers hold a model already, each gives its
    parameters, and all keep their optimizers.
    """
    require_equal(group, session.named_tensors)
    held: set[int] = set()
    for server, indices in enumerate(divide(session.trainable, num_holding) if num_holding else ()):
        part = [session.trainable[index] for index in indices]
        held.update(map(id, part))
        take_values(group, part, server)
    take_values(group, [each for each in session.named_tensors.values() if id(each) not in held], root)
    optimizer = session.optimizer
    shape = [sorted(optimizer.defaults), [len(part["params"]) for part in optimizer.param_groups]]
    has_state, is_on_device = any(optimizer.state.values()), session.device.type != "cpu"
    told = dict(zip(group.members, share(group, [has_state + 2 * is_on_device, shape]), strict=True))
    first = next(iter(told))
    for rank, (_, theirs) in told.items():
        if theirs != told[first][1]:
            raise UsageError(
                f"rank {rank} of workers and servers has another optimizer than rank {first}.",
                next_step="build the same one, with the same groups of parameters, on all.",
            )
    is_on_devices = all(flags & 2 for flags, _ in told.values())
    if num_holding:
        return is_on_devices
    if told[root][0] & 1:
        state = take_state(group, optimizer.state_dict, root)
        if group.rank != root:
            optimizer.load_state_dict(state)
    else:
        settings = take_state(group, lambda: [_settings(each) for each in optimizer.param_groups], root)
        if group.rank != root:
            for mine, theirs in zip(optimizer.param_groups, settings, strict=True):
                mine.update(theirs)
    return is_on_devices


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Gives those settings of an optimizer's group that can be sent."""
    settings = {}
    for name, value in group.items():
        try:
            flatten(value)
        except UsageError:
            continue
        if name != "params":
            settings[name] = value
    return settings
