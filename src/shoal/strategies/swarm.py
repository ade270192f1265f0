"""`swarm`: one model, trained by whoever is there now; peers join, leave and fail at any moment.

    swarm = shoal.connect("HOST:31337", secret_file="run.secret")
    strategy = shoal.SwarmTraining(swarm, run="digits", target_samples=4096)
    with strategy.attach(model, optimizer):
        for x, y in loader: ...

The strategy has no group: its peers are the members of a run (`shoal.swarm`), which goes on in a thread of
its own. All that touches the model happens here, in the user's thread, inside `optimizer.step()`.

Gradients rounds (`target_samples`; Ryabinin et al. 2021): each step's gradient is added to what this member
brings to the next round, and the optimizer itself finds none. Once all members together have the target, the
mean over samples is committed, and all make the same step of the same optimizer.

Local steps (`local_steps`; DiLoCo, Douillard et al. 2023): members train on their own. What they have learned
since the committed parameters is averaged by samples, and an outer step commits it. Who is in the middle of
its steps when a round begins brings what it has; who misses a round keeps its progress:
θ ← θ_new + (θ − θ_old). With `overlap="streaming"` (Douillard et al. 2025) each round averages one fragment
of the parameters in turn, beside the training: a model is then what is committed, and what this member has
learned that no commit has.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from shoal.core.clock import running_clock
from shoal.core.errors import CheckpointError, ShoalError, UsageError
from shoal.core.run_options import RunOptions
from shoal.dht import Swarm, connect
from shoal.group import Group, share
from shoal.strategies.hooks import Hook
from shoal.strategies.options import SwarmOptions, signature_of
from shoal.strategies.session import TrainingSession
from shoal.strategies.status import StatusReporter
from shoal.strategies.strategy import Strategy
from shoal.swarm import (
    BlockingSwarmRun,
    CommittedSGD,
    OptimizerPart,
    PartitionedOptimizer,
    SampleLedger,
    SwarmRun,
    SwarmSettings,
)
from shoal.swarm.facts import ModelFacts, ways_in_words
from shoal.swarm.optimizers import committed_like
from shoal.tensors.checkpoint import NUM_KEPT, CheckpointWriter
from shoal.tensors.codecs import codec_from_name

log = logging.getLogger(__name__)

MakeScheduler = Callable[[Optimizer], LRScheduler]

GATHER = "gather"
_JOIN_S = 600.0
_LAST_ROUND_S = 10.0
_RATE_SHARE = 0.2
"""Of the latest step in the average of samples per second."""


class SwarmTraining(Strategy):
    """Trains one model with all who have joined its run through the DHT.

    `swarm` is what `shoal.connect` gives; it is opened at attach unless it is open, and then closed at the
    end. A group in its place is that of `shoal run`, whose workers become members each on its own: they join
    where the option `join` says, or the first of them. `scheduler` makes a scheduler of torch for an
    optimizer; it is stepped once for each step of the run, so that all members have one learning rate, also
    those that join later.
    """

    name = "swarm"
    survives_loss = True
    is_lockstep = False
    works_alone = True
    checks_finite = False  # what is not finite is left out before it is sent
    common_state = ("outer",)
    Options = SwarmOptions
    options: SwarmOptions
    _reference: torch.Tensor
    """The committed parameters, or those of this member when it last brought something to a round."""

    def __init__(
        self,
        swarm: Swarm | Group | None = None,
        *,
        scheduler: MakeScheduler | None = None,
        options: SwarmOptions | None = None,
        **named: Any,
    ) -> None:
        super().__init__(None, options=options, **named)
        if self._robust and self.options.codec.strip().startswith(("top-k", "sparse")):
            raise UsageError(
                f"robust={self._robust!r} does not go with the codec {self.options.codec!r}.",
                cause="most of the values that a sparse codec sends are zero: so is their median.",
                next_step="take another codec, such as int8.",
            )
        if self.options.target_samples and self.options.local_steps > 1:
            raise UsageError(
                "target_samples and local_steps are both given.",
                cause="they are two kinds of rounds: averaged gradients, or local steps as in DiLoCo.",
                next_step="give one of them.",
            )
        self._swarm = swarm if isinstance(swarm, Swarm) else None
        self._workers = swarm if isinstance(swarm, Group) else None
        if self._workers is not None:
            self.status_reporter = StatusReporter(self._workers, self.name)
        self._make_scheduler = scheduler
        self.outer = KeptState()
        """What the run's optimizer keeps, for checkpoints."""
        self._closing = contextlib.ExitStack()
        self._run: BlockingSwarmRun | None = None
        self._ledger: SampleLedger | None = None
        self._num_seen = 0
        """Samples of the forward passes since the last step."""
        self._num_samples = self._num_local = 0
        """Samples and steps since this member brought something to a round."""
        self._has_offered = False
        """Whether the next commit has what was learned until the reference."""
        self._version = b"", 0
        """Which committed parameters the model has: the fork, and the steps of the run."""
        self._loss: Any = None
        self._clock = running_clock()
        self._stepped_s = self._clock.now_s()
        self._adopted_s = self._resumed_s = self._stepped_s
        """When the latest commit was taken up, and when the user's loop went on after a step."""
        self._interval_s = self._batch_s = 0.0
        """From the commit before to the latest one, and what the latest batch took to compute."""

    # --- from attach to the end ---

    def start(self, session: TrainingSession) -> None:
        """Joins the run, and takes its state; begins the run where nobody is there."""
        options = self.options
        if not options.target_samples and options.local_steps == 1:
            raise UsageError(
                "Nothing says what a round of the swarm is.",
                next_step="give target_samples=4096 (averaged gradients) or local_steps=100 (as DiLoCo).",
            )
        if session.is_sharded:
            raise UsageError(
                "Parameters that FSDP2 has divided cannot join a swarm.",
                next_step="train the whole model in each process.",
            )
        self._vector = SharedVector(session.named_parameters, session.named_tensors, session.device)
        self._rates = RoundRates(session.optimizer, self._make_scheduler, options.rate_factor)
        self._read = self._vector.empty()
        own = self._vector.read(self._vector.empty())
        optimizer, words = self._committed_optimizer(session)
        swarm = self._open_swarm()
        codec = None if options.codec.strip().lower() == "none" else codec_from_name(options.codec)
        if codec is not None:  # so that errors of stochastic rounding cancel in a mean
            codec.reseed(int.from_bytes(swarm.peer_id.digest[:4], "big"))
        settings = SwarmSettings(
            target_samples=options.target_samples,
            robust=self._robust,
            min_peers=options.min_peers,
            patience=options.patience,
            minority_after_s=options.minority_after,
            bandwidth=options.bandwidth,
            upload_limit=options.upload_limit or math.inf,
            download_limit=options.download_limit or math.inf,
            bytes_per_element=_bytes_per_element(options.codec),
            num_fragments=self._num_fragments,
        )
        run = BlockingSwarmRun(
            swarm,
            options.run,
            own,
            optimizer,
            settings=settings,
            codec=codec,
            model=ModelFacts(self._vector.described, words, self._robust),
            offers_when_asked=self._is_local,
        )
        self._closing.push(run)
        self._run = run.__enter__()
        self._ledger = run.run.ledger
        if not run.wait_until(lambda member: member.is_member, _JOIN_S * options.patience):
            raise ShoalError(
                f"The run {options.run!r} has not taken this peer in for {_JOIN_S * options.patience:.0f} s.",
                cause="no member can be reached, or more than half of them are gone.",
                next_step="look at it with `shoal swarm --join HOST:PORT --run NAME`.",
            )
        if self._workers is not None and self._workers.size > 1 and not self.options.join:
            share(self._workers, True)  # the first to come does not train all on its own
        self._adopt(is_exact=True)
        self._interval_s = 0.0
        self._stepped_s = self._resumed_s = self._clock.now_s()
        # after the forward: at its beginning a step that was skipped may still have to be noticed
        hook = session.model.register_forward_hook(Hook(self._forward_ends), with_kwargs=True)
        self._closing.callback(hook.remove)
        log.info("joined the run %s with %d members", options.run, len(run.run.members))

    def finish(self, session: TrainingSession, *, should_leave: bool) -> None:
        """Brings what is left to a last round if one comes soon, leaves, and takes the last state."""
        run = self._opened
        if self._is_local and self._num_samples:
            self._offer()
            self._wait(min(_LAST_ROUND_S, self.options.max_wait))
        facts = run.current_facts()
        run.leave()
        links = ", ".join(f"{num} {way}" for way, num in facts.links.items())
        told = ways_in_words(facts.ways), f"; connected with {links}" if links else ""
        log.info("left the run %s; its members: %s%s", self.options.run, *told)
        self._adopt(is_exact=True)
        self._keep_state()

    def stop(self, session: TrainingSession) -> None:
        """Ends this member; one that has not left in order is missed by the others after a while."""
        self._run = None
        failed = ShoalError("The strategy ends.")
        with contextlib.suppress(ShoalError):
            self._closing.__exit__(ShoalError, failed, None)

    @property
    def _opened(self) -> BlockingSwarmRun:
        if self._run is None:
            raise UsageError(
                "This strategy is in no run.", next_step="call it inside `with strategy.attach(...)`."
            )
        return self._run

    @property
    def _robust(self) -> str:
        return "" if self.options.robust == "none" else self.options.robust

    @property
    def _is_local(self) -> bool:
        return not self.options.target_samples

    @property
    def _num_fragments(self) -> int:
        return self.options.fragments if self._is_local and self.options.overlap == "streaming" else 1

    def _open_swarm(self) -> Swarm:
        """Gives the swarm, open; what is opened here listens, and ends with the strategy."""
        swarm = self._swarm or self._swarm_of_options()
        swarm.listen_too()
        if not swarm.is_open:
            self._closing.enter_context(swarm)
        if self._swarm is None and self._is_first_of_several and self._workers is not None:
            share(self._workers, str(swarm.address))
        return swarm

    @property
    def _is_first_of_several(self) -> bool:
        """Whether the other workers of `shoal run` join this one."""
        workers = self._workers
        return workers is not None and workers.size > 1 and not workers.rank and not self.options.join

    def _swarm_of_options(self) -> Swarm:
        options, workers = self.options, self._workers
        if workers is not None and workers.size > 1 and RunOptions.from_environment().checkpoint is not None:
            raise UsageError(
                "Several workers of a swarm do not keep checkpoints together.",
                next_step="leave --checkpoint out, and let `shoal swarm --checkpoint FOLDER` save the run.",
            )
        join = [address.strip() for address in options.join.split(",") if address.strip()]
        if not join and workers is not None and workers.size > 1 and workers.rank:
            join = [share(workers, "")[0]]
        secret = Path(options.secret_file) if options.secret_file else None
        listen = options.listen or (None if join else "127.0.0.1:0")
        return connect(*join, listen=listen, secret=secret)

    # --- what all members step by ---

    def _committed_optimizer(self, session: TrainingSession) -> tuple[PartitionedOptimizer, str]:
        """Makes the optimizer of the committed parameters, and says in words what a round is."""
        options, vector = self.options, self._vector
        parts: list[OptimizerPart] = []
        if self._is_local:
            rule = CommittedSGD(options.outer_lr, options.outer_momentum)
            parts.append(OptimizerPart(vector.num_parameters, rule, has_rate=False))
            words = (
                f"outer steps after local steps, lr {options.outer_lr:g}, momentum {options.outer_momentum:g}"
            )
            if self._num_fragments > 1:
                words += f", of one of {self._num_fragments} fragments in turn"
        else:
            groups: list[int] = []
            for number, end in vector.group_ends(session.optimizer):
                parts.append(OptimizerPart(end, committed_like(session.optimizer, number)))
                groups.append(number)
            self._rates.groups = groups
            told = "; ".join(dict.fromkeys(str(part.optimizer) for part in parts))
            words = f"gradients rounds of {options.target_samples} samples, {told}"
            rates = [
                f"{name} {value:g}"
                for name, value in (
                    ("warmup_steps", options.warmup_steps),
                    ("warmup_factor", options.warmup_factor if options.warmup_steps else 0),
                    ("decay_every", options.decay_every),
                    ("decay_factor", options.decay_factor if options.decay_every else 0),
                )
                if value
            ]
            words = ", ".join([words, *rates])
        if self._robust:
            words = f"{words}, averaged by {self._robust}"
        if vector.num_elements > vector.num_parameters:
            # θ ← θ − mean(θ − buffer): the committed buffers are the mean of the members'
            parts.append(OptimizerPart(vector.num_elements, CommittedSGD(1.0), has_rate=False))
        return PartitionedOptimizer(parts, self._rates, self.outer.kept), words

    # --- the user's loop ---

    def _forward_ends(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Counts the samples of a forward pass, in training with gradients."""
        if not (model.training and torch.is_grad_enabled()):
            return
        size = self.options.batch_size
        if size is None:
            tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            size = next((tensor.shape[0] for tensor in tensors if tensor.ndim), 0)
        self._num_seen += size

    def _samples_of_step(self) -> int:
        """Gives how many samples the forward passes since the last step had."""
        samples, self._num_seen = self._num_seen, 0
        if not samples:
            raise UsageError(
                "It is not known how many samples this step has.",
                cause="no forward pass of the attached model in training got a tensor since the last step.",
                next_step="give batch_size=…, the samples of one forward pass, and call the model itself.",
            )
        now_s = self._clock.now_s()
        rate = samples / max(now_s - self._stepped_s, 1e-6)
        self._stepped_s = now_s
        run = self._opened
        run.samples_per_s += (rate - run.samples_per_s) * (_RATE_SHARE if run.samples_per_s else 1.0)
        return samples

    def before_step(self, session: TrainingSession) -> None:
        """Gradients rounds: takes the gradients for the next round, and leaves the optimizer none."""
        if self._is_local:
            return
        self._batch_s = self._clock.now_s() - self._resumed_s
        samples = self._samples_of_step()
        if not session.is_void:
            self._rates.warn_of_other(session.optimizer)
            scale = getattr(session.optimizer, "grad_scale", None)
            gradient = self._vector.read_gradients(self._read, scale, self._reference)
            if self._is_finite(gradient, "its gradients"):
                self._opened.add(gradient, samples)
        session.finite.hide_gradients()

    def after_step(self, session: TrainingSession) -> None:
        """Takes up what the run has committed; waits where a round is under way."""
        if self._is_local:
            self._end_local_step(session)
        else:
            self._wait_for_the_next()
            self._wait(self.options.max_wait)
            if self._opened.version != self._version:
                self._adopt(is_exact=True)
            self._resumed_s = self._clock.now_s()

    def skip_step(self, session: TrainingSession) -> None:
        """Leaves out the gradients of a step that the optimizer did not make."""
        self._num_seen = 0

    def log(self, **values: Any) -> None:
        """Notes numbers for `shoal top`, and of these `loss` for `shoal swarm`."""
        super().log(**values)
        if "loss" in values:
            loss = values["loss"]
            self._loss = loss.detach().clone() if isinstance(loss, torch.Tensor) else loss

    def _end_local_step(self, session: TrainingSession) -> None:
        samples = self._samples_of_step()
        if not session.is_void:
            self._num_samples += samples
            self._num_local += 1
        run, options = self._opened, self.options
        if run.version != self._version:
            self._adopt(is_exact=False)  # a round has come that this member did not wait for
        is_due = self._num_local * self._num_fragments >= options.local_steps
        if is_due or (run.run.context.is_asked and self._num_local):
            must_wait = options.overlap == "none" or self._has_offered
            if not self._has_offered:
                self._offer()
            if must_wait:
                self._wait(options.max_wait)
            if run.version != self._version:
                self._adopt(is_exact=not self._num_local)

    # --- rounds ---

    def _offer(self) -> None:
        """Brings what was learned since the reference to the next round."""
        current = self._vector.read(self._vector.empty())
        torch.sub(self._reference, current, out=self._read)
        if not self._is_finite(self._read, "its parameters"):
            self._adopt(is_exact=True)
            return
        self._opened.add(self._read, self._num_samples, is_ready=True)
        self._reference = current
        self._num_samples = self._num_local = 0
        self._has_offered = True

    def _wait(self, timeout_s: float) -> None:
        """Waits for the commit of the round that is under way or due, but not for ever."""
        run, version, target = self._opened, self._version, self.options.target_samples
        is_local = self._is_local

        def is_over(member: SwarmRun) -> bool:
            if run.version != version:
                return True
            if is_local:
                if member.is_member and not member.context.is_ready:
                    member.set_ready()  # the round came to nothing, or was one of membership alone
                return False
            return not (_is_under_way(member) or member.ledger.num_ready >= target)

        if not run.wait_until(is_over, timeout_s * self.options.patience):
            member = run.run
            run.note(
                f"no round in {timeout_s * self.options.patience:.0f} s, training goes on alone "
                f"({len(member.members)} members, {self.options.min_peers} needed; "
                f"{'listed' if member.is_member else 'not listed'})"
            )

    def _wait_for_the_next(self) -> None:
        """Waits a little for a round that is about to begin: a batch would come too late for it, and its
        gradient be one step old in the round after.
        """
        run, version = self._opened, self._version
        since_s = self._clock.now_s() - self._adopted_s
        wait_s = seconds_to_the_round(self._interval_s, since_s, self._batch_s)
        if wait_s > 0 and len(run.run.members) > 1:
            run.wait_until(
                lambda member: run.version != version or _is_under_way(member),
                min(wait_s, self.options.max_wait),
            )

    def _adopt(self, *, is_exact: bool) -> None:
        """Puts the committed parameters into the model; if not exact, with the progress since then."""
        run = self._opened
        before = self._version
        self._version, new = run.committed()
        if self._version != before:
            now_s = self._clock.now_s()
            self._interval_s, self._adopted_s = now_s - self._adopted_s, now_s
        if is_exact:
            self._vector.write(new)
            self._num_samples = 0
        else:
            self._vector.shift(self._reference, new)
        self._reference = self._vector.as_written(new)
        if is_exact:
            self._num_local = 0
        self._has_offered = False
        self._rates.apply(run.version[1])
        if self._loss is not None:
            run.loss, self._loss = float(self._loss), None

    def _is_finite(self, values: torch.Tensor, what: str) -> bool:
        """Tells whether values may be sent; what is not finite is left out, or ends training."""
        if bool(torch.isfinite(values).all()):
            return True
        text = f"{what} have values that are not finite in step {self.steps}"
        if self.options.on_nonfinite == "stop":
            raise ShoalError(
                f"{self.name}: {text}.", next_step="lower the learning rate, or look at the data."
            )
        self._opened.note(f"{text}: they are left out")
        return False

    # --- what users and checkpoints read ---

    @property
    def ledger(self) -> SampleLedger:
        """What became of this member's samples: counted, pending, lost. Also after the end."""
        if self._ledger is None:
            raise UsageError("This strategy was in no run yet.", next_step="attach it first.")
        return self._ledger

    @property
    def num_peers(self) -> int:
        """How many members the run has now."""
        return len(self._opened.run.members)

    @property
    def run_steps(self) -> int:
        """The steps that the run has made, as this member has them in its model."""
        return self._version[1]

    def before_saving(self, session: TrainingSession) -> None:
        """Takes what the run's optimizer keeps, to be saved with the model."""
        self._keep_state()

    def _keep_state(self) -> None:
        self.outer.kept = self._opened.kept()


SwarmTraining.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    [
        inspect.Parameter(
            "swarm", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation="Swarm | Group | None"
        ),
        inspect.Parameter(
            "scheduler", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="MakeScheduler | None"
        ),
        *list(signature_of(SwarmOptions).parameters.values())[1:],
    ]
)


def save_committed(
    folder: Path, model: ModelFacts, state: Mapping[str, Any], *, num_kept: int = NUM_KEPT
) -> Path:
    """Writes a run's committed state, as `shoal.swarm` takes it, as a checkpoint of this strategy.

    A program goes on from it by `strategy.load(folder)`. It has what the run shares: trained parameters and
    floating-point buffers. CheckpointError when it cannot be written.
    """
    step = state["num_steps"]
    sizes = [math.prod(shape) for _, shape in model.tensors]
    parts = torch.split(state["parameters"], sizes)
    tensors = {name: part.view(shape) for (name, shape), part in zip(model.tensors, parts, strict=True)}
    told = {"strategy": SwarmTraining.name, "steps": step, "rounds": step, "outer": state["kept"]}
    common = {"strategy": told, "tensors": {}, "model": {}, "loaders": [], "is_whole": False}
    try:
        with CheckpointWriter.begin(folder, step) as writer:
            writer.write_tensors("model", tensors)
            writer.write_state("optimizer", {})
            writer.write_state("strategy", common)
            return writer.seal(SwarmTraining.name, step, num_kept=num_kept)
    except OSError as error:
        raise CheckpointError(
            f"The state of the run cannot be saved in {folder}: {error.strerror or error}.",
            next_step="make room, or give another folder.",
        ) from error


class KeptState:
    """What the optimizer of committed parameters keeps between steps, for checkpoints."""

    def __init__(self) -> None:
        self.kept: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Gives tensors and numbers by their names."""
        return dict(self.kept or {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes them up; a run that is begun goes on from them."""
        self.kept = dict(state) or None


def seconds_to_the_round(interval_s: float, since_s: float, batch_s: float) -> float:
    """Says how long to wait for the next round, which comes after the usual interval from the latest commit;
    0.0 where there is the time for half a batch before it.

    Never longer than a batch takes: who waits for one that does not come loses no more than that.
    """
    left_s = interval_s - since_s
    if not interval_s or left_s >= batch_s / 2:
        return 0.0
    return min(max(left_s, 0.0) + batch_s / 2, batch_s)


def _is_under_way(member: SwarmRun) -> bool:
    """Tells whether a round is being made."""
    round_ = member.round
    return member.is_member and round_ is not None and round_.stage != GATHER


def _bytes_per_element(codec: str) -> float:
    """Says about how large a value is under a codec, for the size of parts."""
    name = codec.strip().lower().partition(":")[0].replace("_", "-")
    return {"fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.53}.get(name, 4.0)


# --- a model of torch as members of a run see it ---


class SharedVector:
    """What members share of a model as one vector of float32: trained parameters, then floating buffers."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        tensors: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        """Takes the trained `parameters`, and of all `tensors` of the model the floating-point buffers."""
        self._parameters = parameters
        buffers = {name: each for name, each in tensors.items() if not isinstance(each, nn.Parameter)}
        self._buffers = {name: tensor for name, tensor in buffers.items() if tensor.is_floating_point()}
        for name, tensor in self._parameters.items():
            if not tensor.is_floating_point():
                raise UsageError(
                    f"{name} is {tensor.dtype}, and a swarm shares real numbers.",
                    next_step="train it as two real parameters.",
                )
        self._tensors = [tensor.detach() for tensor in (*self._parameters.values(), *self._buffers.values())]
        self.num_parameters = sum(parameter.numel() for parameter in self._parameters.values())
        self.num_elements = sum(tensor.numel() for tensor in self._tensors)
        self.described = tuple(
            (name, tuple(tensor.shape))
            for name, tensor in (*self._parameters.items(), *self._buffers.items())
        )
        self._is_pinned = device.type == "cuda"
        self._is_plain = all(tensor.dtype == torch.float32 for tensor in self._tensors)

    def empty(self) -> torch.Tensor:
        """Makes memory for such a vector on the CPU, pinned where the model is on a GPU."""
        return torch.empty(self.num_elements, pin_memory=self._is_pinned)

    def group_ends(self, optimizer: Optimizer) -> list[tuple[int, int]]:
        """Lists the ranges of parameters that are in one group of the optimizer: its number, and the end."""
        number_of = {
            id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]
        }
        ends: list[tuple[int, int]] = []
        end = 0
        for parameter in self._parameters.values():
            number, end = number_of[id(parameter)], end + parameter.numel()
            if ends and ends[-1][0] == number:
                ends.pop()
            ends.append((number, end))
        return ends

    @torch.no_grad()
    def read(self, out: torch.Tensor) -> torch.Tensor:
        """Copies the model into a vector."""
        for view, tensor in self._pairs(out):
            view.copy_(tensor, non_blocking=True)
        self._synchronize()
        return out

    @torch.no_grad()
    def read_gradients(
        self, out: torch.Tensor, scale: torch.Tensor | None, reference: torch.Tensor
    ) -> torch.Tensor:
        """Copies the gradients, and of buffers how far they are below the reference; zeros where none are."""
        gradients = [parameter.grad for parameter in self._parameters.values()]
        for (view, _), gradient in zip(self._pairs(out), gradients, strict=False):
            if gradient is None:
                view.zero_()
            else:
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                view.copy_(dense, non_blocking=True)
        for view, tensor in self._pairs(out)[len(gradients) :]:
            view.copy_(tensor, non_blocking=True)
        self._synchronize()
        if scale is not None:  # a GradScaler leaves the division to a fused optimizer
            out[: self.num_parameters] /= float(scale)
        rest = slice(self.num_parameters, None)
        torch.sub(reference[rest], out[rest], out=out[rest])
        return out

    @torch.no_grad()
    def write(self, values: torch.Tensor) -> None:
        """Copies a vector into the model."""
        for view, tensor in self._pairs(values):
            tensor.copy_(view)

    @torch.no_grad()
    def shift(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Moves the model from one vector to another, and keeps what it has learned since the old one."""
        for (before, tensor), (after, _) in zip(self._pairs(old), self._pairs(new), strict=True):
            device = tensor.device
            own = tensor.float() - before.to(device)
            tensor.copy_(own.add_(after.to(device)))

    def as_written(self, values: torch.Tensor) -> torch.Tensor:
        """Gives the values as the model's types hold them: what is learned is measured from there."""
        if self._is_plain:
            return values
        rounded = torch.empty_like(values)
        for (out, tensor), (view, _) in zip(self._pairs(rounded), self._pairs(values), strict=True):
            out.copy_(view.to(tensor.dtype))
        return rounded

    def _pairs(self, vector: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        views = torch.split(vector, [tensor.numel() for tensor in self._tensors])
        return [(view.view(tensor.shape), tensor) for view, tensor in zip(views, self._tensors, strict=True)]

    def _synchronize(self) -> None:
        if self._is_pinned:
            torch.cuda.current_stream(self._tensors[0].device).synchronize()


class RoundRates:
    """The factors on the learning rates after so many steps of the run, the same on all members.

    The factor is `factor(step)`, that of warm-up and decay, times that of the user's scheduler, which is
    stepped once for each step of the run on a stand-in for the optimizer. For any thread.
    """

    def __init__(
        self, optimizer: Optimizer, make: MakeScheduler | None, factor: Callable[[int], float]
    ) -> None:
        self.groups: Sequence[int] = ()
        """The optimizer's group of each part of the committed parameters."""
        self._optimizer = optimizer
        self._make = make
        self._factor = factor
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._shown = list(self._base)
        self._lock = threading.Lock()
        self._step = 0
        self._scheduler: LRScheduler | None = None
        self._has_warned = False

    def __call__(self, step: int) -> list[float]:
        """Gives the factor for each part of the committed parameters, in the step after so many."""
        factor = self._factor(step)
        scheduled = self._scheduled(step)
        return [factor * scheduled[group] for group in self.groups]

    def apply(self, step: int) -> None:
        """Shows the rates of the scheduler in the user's optimizer, which steps by them in DiLoCo rounds."""
        if self._make is None:
            return
        for number, factor in enumerate(self._scheduled(step)):
            self._shown[number] = self._base[number] * factor
            self._optimizer.param_groups[number]["lr"] = self._shown[number]

    def warn_of_other(self, optimizer: Optimizer) -> None:
        """Warns once when the program itself has changed a rate, which the run does not follow."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if rates != self._shown and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the learning rate of the optimizer was changed to %g: all members of the run go on with %g. "
                "Give SwarmTraining(scheduler=lambda optimizer: ...) instead, which counts the run's steps.",
                rates[0], self._shown[0],
            )  # fmt: skip

    def _scheduled(self, step: int) -> list[float]:
        if self._make is None:
            return [1.0] * len(self._base)
        with self._lock:
            if self._scheduler is None or step < self._step:
                groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in self._base]
                self._stand_in = torch.optim.SGD(groups, lr=self._base[0])
                self._scheduler, self._step = self._make(self._stand_in), 0
                self._stand_in.step()  # torch warns of a scheduler that is stepped first
            while self._step < step:
                self._scheduler.step()
                self._step += 1
            rates = [float(group["lr"]) for group in self._stand_in.param_groups]
        return [rate / base if base else 1.0 for rate, base in zip(rates, self._base, strict=True)]
