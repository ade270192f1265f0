"""The registry: one row for each strategy, and how a strategy is found and made by its name.

A row says where a class is without importing it, so that `shoal run` and `--help` start without torch. A
strategy of another package needs no row here: it is named as `module:Class` or `file.py:Class`, or by an
entry point of the group `shoal.strategies` in that package's metadata. Its class then says what a row says:
`name`, `Options`, and any of `needs_servers`, `needs_machines`, `is_asynchronous` and `has_own_channel` that
are True.
"""

from __future__ import annotations

import functools
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakSet

from shoal.core.errors import UsageError, did_you_mean
from shoal.core.run_options import RunOptions, load_named
from shoal.strategies import options as of

if TYPE_CHECKING:
    from shoal.dht import Swarm
    from shoal.group import Group
    from shoal.strategies.strategy import Strategy

log = logging.getLogger(__name__)

DEFAULT = "all-reduce"
ENTRY_POINTS = "shoal.strategies"
"""The group of entry points by which an installed package adds strategies."""
_TRAITS = ("needs_servers", "needs_machines", "is_asynchronous", "has_own_channel")
"""Facts of a row that the class of a strategy from outside may state."""
_OUTSIDE = re.compile(r"([^\W\d]\w*(\.[^\W\d]\w*)*|[^:,\s]+\.py):[^\W\d]\w*")
"""A class of a module, or of a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyInfo:
    """A row of the registry: what is known of a strategy without importing its class."""

    name: str
    """It is found again by this name in any process: for a class given as `module:Class`, by that."""
    location: str  # as `module:Class`
    options: type[of.StrategyOptions] = of.StrategyOptions
    summary: str = ""  # one sentence about a round
    paper: str = ""
    aliases: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Other systems call it so; with each name come the options that it implies."""
    needs_servers: bool = False
    """Whether there are parameter servers beside the workers."""
    needs_machines: bool = False
    """Whether its topology is one of machines, which must have equally many workers each."""
    needs_package: str = ""
    is_asynchronous: bool = False
    """Whether no worker waits for another, so that each has its own pace."""
    has_own_channel: bool = False
    """Whether what it sends passes the group by, which so can neither count nor slow it."""
    is_swarm: bool = False
    """Whether workers find each other as peers of a swarm, and have no group."""

    @property
    def survives_loss(self) -> bool:
        """Whether the other workers train on when one is lost; imports the class, which says so."""
        return load_class(self).survives_loss


def _row(name: str, place: str, options: type[of.StrategyOptions], summary: str, **rest: Any) -> StrategyInfo:
    return StrategyInfo(
        name=name, location=f"shoal.strategies.{place}", options=options, summary=summary, **rest
    )


# A row: name, class, options and what a round does; then what only some have.
# fmt: off
_ROWS = (
    _row("all-reduce", "all_reduce:GradientAllReduce", of.AllReduceOptions,
         "Averages gradients in buckets while backward runs, so that all workers stay equal.",
         aliases={"gradient-allreduce": {}, "sync-sgd": {}}),
    _row("ddp", "ddp:TorchDDP", of.DDPOptions,
         "Runs torch's own DistributedDataParallel, to compare with.",
         paper="Li et al. 2020", aliases={"distributed-data-parallel": {}}, has_own_channel=True),
    _row("neighbor", "neighbor:NeighborAverage", of.NeighborOptions,
         "Averages parameters with those of neighbours, after the step or during backward.",
         paper="Lian et al. 2017; Ying et al. 2021",
         # `allreduce` is BlueFog's, of parameters
         aliases={"allreduce": {"topology": "full"}, "neighbor-allreduce": {}}),
    _row("hierarchical", "neighbor:HierarchicalAverage", of.HierarchicalOptions,
         "Averages the mean of each machine with the means of neighbour machines.",
         aliases={"hierarchical-neighbor-allreduce": {}}, needs_machines=True),
    _row("pair", "pair:PairAverage", of.PairOptions,
         "Averages with the newest model of a random worker, then steps; nobody waits.",
         paper="Lian et al. 2018 (AD-PSGD)", aliases={"async-sgd": {}, "pair-averaging": {}},
         is_asynchronous=True),
    _row("sma", "sma:SynchronousModelAverage", of.SmaOptions,
         "Moves parameters toward the mean of all by `alpha`, then steps.",
         paper="Zhang et al. 2015", aliases={"synchronous-averaging": {}}),
    _row("local-sgd", "local_sgd:LocalSGD", of.LocalSGDOptions,
         "Steps alone, and every few steps takes the mean of all parameters.",
         paper="Stich 2019; Lin et al. 2020", aliases={"localsgd": {}, "post-local-sgd": {}}),
    _row("diloco", "diloco:DiLoCo", of.DiLoCoOptions,
         "Steps alone for long, then does an outer step with the mean of all changes.",
         paper="Douillard et al. 2023; Douillard et al. 2025",
         aliases={"streaming-diloco": {"fragments": 4, "overlap_steps": 5, "mixing": 0.5}}),
    _row("noloco", "noloco:NoLoCo", of.NoLoCoOptions,
         "Steps alone for long, then does an outer step with one random worker, never with all.",
         paper="Kolehmainen et al. 2025"),
    _row("sparse-loco", "sparse_loco:SparseLoCo", of.SparseLoCoOptions,
         "Steps alone for long, then does an outer step with the largest changes, in two bits each.",
         paper="Sarfi et al. 2025", aliases={"sparseloco": {}}),
    _row("push-sum", "window:PushSum", of.PushSumOptions,
         "Pushes shares of parameters and weight to a neighbour, adds what came; nobody waits.",
         paper="Assran et al. 2019", aliases={"pushsum": {}}, is_asynchronous=True),
    _row("window", "window:WindowAverage", of.WindowOptions,
         "Puts parameters into neighbours' windows, and averages with its own; nobody waits.",
         aliases={"win-put": {}}, is_asynchronous=True),
    _row("parameter-server", "parameter_server:ParameterServer", of.ParameterServerOptions,
         "Sends gradients to servers, which hold the model and step, and pulls parameters.",
         aliases={"ps": {}}, needs_servers=True, is_asynchronous=True),
    _row("horovod", "horovod:HorovodAllReduce", of.HorovodOptions,
         "Averages gradients by Horovod itself, to compare with.",
         aliases={"hvd": {}}, has_own_channel=True, needs_package="horovod"),
    _row("gradient-tracking", "gradient_tracking:GradientTracking", of.MixOptions,
         "Steps along an estimate of the mean gradient, which neighbours average too.",
         paper="Xu et al. 2015; Nedić et al. 2017", aliases={"dsgt": {}}),
    _row("exact-diffusion", "exact_diffusion:ExactDiffusion", of.SymmetricOptions,
         "Averages with neighbours, with a correction that removes the bias of unequal data.",
         paper="Yuan et al. 2019; Li, Shi, Yan 2019", aliases={"nids": {}}),
    _row("extra", "extra:Extra", of.SymmetricOptions,
         "Corrects as exact diffusion does, and exchanges during backward.",
         paper="Shi et al. 2015"),
    _row("d2", "exact_diffusion:D2", of.D2Options,
         "Corrects as exact diffusion does, and mixes faster.",
         paper="Tang et al. 2018"),
    _row("momentum", "neighbor_momentum:NeighborMomentum", of.MomentumOptions,
         "Averages parameters and the optimizer's momentum with neighbours.",
         paper="Ying et al. 2021; Yu, Jin, Yang 2019", aliases={"dmsgd": {}, "dsgd-momentum": {}}),
    _row("choco", "choco:ChocoSGD", of.ChocoOptions,
         "Sends compressed differences, and moves toward the public copies of its neighbours.",
         paper="Koloskova, Stich, Jaggi 2019", aliases={"choco-sgd": {}}),
    _row("sgp", "sgp:StochasticGradientPush", of.SgpOptions,
         "Sends shares of parameters and weight over directed graphs, and waits for them.",
         paper="Assran et al. 2019", aliases={"gradient-push": {}, "stochastic-gradient-push": {}}),
    _row("relay", "relay:RelaySGD", of.RelayOptions,
         "Passes sums of models along a tree, so that each worker gets the mean of all, late.",
         paper="Vogels et al. 2021", aliases={"relaysgd": {}, "relay-sum": {}}),
    _row("staleness-aware", "parameter_server:StalenessAwareSGD", of.StalenessAwareOptions,
         "Corrects late gradients on parameter servers.",
         paper="Zhang et al. 2016; Zheng et al. 2017", aliases={"dc-asgd": {}}, needs_servers=True,
         is_asynchronous=True),
    _row("swarm", "swarm:SwarmTraining", of.SwarmOptions,
         "Trains one model with whoever is there: peers join a run, leave it and fail at any moment.",
         paper="Ryabinin et al. 2021; Douillard et al. 2023", aliases={"hivemind": {}},
         has_own_channel=True, is_swarm=True),
)
# fmt: on

BUILT_IN: Mapping[str, StrategyInfo] = {row.name: row for row in _ROWS}
"""The strategies that come with Shoal, by name, in the order in which the documentation lists them."""
_ALIASES = {alias: row.name for row in _ROWS for alias in row.aliases}
_LOCATIONS = {row.location: row.name for row in _ROWS}


def canonical(name: str) -> str:
    """Give the name that stands for a strategy everywhere, without importing its class.

    An alias becomes the strategy's own name, hyphens and underscores are alike; `module:Class` and
    `file.py:Class` stay as they are. UsageError with suggestions for a name that is none.
    """
    text = name.strip()
    if ":" in text:
        if not _OUTSIDE.fullmatch(text):
            raise UsageError(
                f"{name!r} does not name a class.",
                next_step="write it as package.module:Class or file.py:Class.",
            )
        return _LOCATIONS.get(text, text)
    plain = _plain(text)
    if plain in BUILT_IN:
        return plain
    if plain in _ALIASES:
        return _ALIASES[plain]
    installed = _installed()
    if plain in installed:
        return plain
    known = [*BUILT_IN, *installed]
    raise UsageError(
        f"There is no strategy {name!r}.{did_you_mean(name, [*known, *_ALIASES], n=3)}",
        next_step=f"one of {', '.join(known)}, or a class of your own as package.module:Class or "
        "file.py:Class.",
    )


def find(name: str) -> tuple[StrategyInfo, dict[str, Any]]:
    """Find a strategy by any of its names: its row, and the options that this name implies.

    One from outside is imported. UsageError for a name that is none, and for a class that is no strategy.
    """
    own = canonical(name)
    if own in BUILT_IN:
        row = BUILT_IN[own]
        return row, dict(row.aliases.get(_plain(name.strip()), {}))
    return _outside_row(own, own if ":" in own else _installed()[own]), {}


def all_strategies() -> list[StrategyInfo]:
    """List the strategies that come with Shoal, then those of installed packages, which are imported."""
    return [*BUILT_IN.values(), *(_outside_row(name, place) for name, place in _installed().items())]


def load_class(info: StrategyInfo) -> type[Strategy]:
    """Import the class of a strategy, which imports torch."""
    return _load(info.location)


def make_strategy(group: Group | Swarm, name: str, **options: Any) -> Strategy:
    """Make a strategy by its name; options given here win over those that an alias implies.

    `group` may be a peer of a swarm for a strategy that trains in one.
    """
    info, implied = find(name)
    return load_class(info)(cast("Group", group), **{**implied, **options})


def has_own_channel(strategy: Strategy) -> bool:
    """Tell whether something else than its group carries what a strategy shares."""
    row = BUILT_IN.get(strategy.name)
    return getattr(strategy, "has_own_channel", False) if row is None else row.has_own_channel


def from_args(group: Group, *, strategy: str | None = None, **overrides: Any) -> Strategy:
    """Make what `shoal run --strategy …` was asked for, `all-reduce` without; arguments here win.

    When another strategy is named here, options of the command line that it doesn't have are left out.
    """
    run = RunOptions.from_environment()
    asked = run.strategy or DEFAULT
    name = asked if strategy is None else strategy
    options = {option.replace("-", "_"): value for option, value in run.options.items()}
    if canonical(name) != canonical(asked):
        known = find(name)[0].options.__struct_fields__
        options = {option: value for option, value in options.items() if option in known}
    made = make_strategy(group, name, **{**options, **overrides})
    _from_args.add(made)
    return made


_from_args: WeakSet[Strategy] = WeakSet()
"""The strategies that have taken up what `shoal run` was asked for."""


def warn_of_ignored_flags(strategy: Strategy) -> None:
    """Logs a warning on rank 0 when this strategy is not what `shoal run` was asked for.

    A program may make its own strategy, or give its own name to `from_args`. There is no warning where the
    strategy and its options are the same as those that were asked for.
    """
    run = RunOptions.from_environment()
    if strategy.group.rank or (run.strategy is None and not run.options):
        return
    if _is_as_asked(strategy, run):
        return
    flags = [f"--strategy {run.strategy}"] if run.strategy is not None else []
    flags += [f"--option {option.replace('-', '_')}={value}" for option, value in run.options.items()]
    log.warning(
        "`shoal run` was asked for %s, and the program uses %s, which it has made itself: what was asked for "
        "is ignored. `strategy = shoal.from_args(group)` in the program takes it up.",
        " ".join(flags), strategy.name,
    )  # fmt: skip


def _is_as_asked(strategy: Strategy, run: RunOptions) -> bool:
    try:
        info, implied = (None, {}) if run.strategy is None else find(run.strategy)
        if info is not None and type(strategy) is not load_class(info):
            return False
        wanted = {**implied, **{name.replace("-", "_"): value for name, value in run.options.items()}}
        asked = of.read_options(strategy.Options, wanted, strategy.name)
    except UsageError:  # nobody has what was asked for
        return strategy in _from_args
    is_equal = all(getattr(strategy.options, name) == getattr(asked, name) for name in wanted)
    return is_equal or strategy in _from_args


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _installed() -> Mapping[str, str]:
    """Give the location of each strategy that an installed package adds; names of ours stay ours."""
    return _installed_on(tuple(sys.path))


@functools.lru_cache(maxsize=1)
def _installed_on(_path: tuple[str, ...]) -> Mapping[str, str]:
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    points = entry_points(group=ENTRY_POINTS)
    found = {_plain(point.name): point.value for point in sorted(points, key=lambda point: point.name)}
    return {name: place for name, place in found.items() if name not in BUILT_IN and name not in _ALIASES}


def _outside_row(name: str, location: str) -> StrategyInfo:
    kind = _load(location)
    traits: dict[str, Any] = {trait: getattr(kind, trait, False) for trait in _TRAITS}
    return StrategyInfo(
        name=name,
        location=location,
        options=kind.Options,
        summary=(kind.__doc__ or "").strip().partition("\n")[0],
        **traits,
    )


def _load(location: str) -> type[Strategy]:
    """Import a class, and see that it is a strategy; what the module itself raises passes through."""
    from shoal.strategies.strategy import Strategy

    kind = load_named(location, "strategy")
    if not isinstance(kind, type) or not issubclass(kind, Strategy):
        raise UsageError(
            f"{location} is no strategy.", next_step="let the class inherit from shoal.Strategy."
        )
    if not isinstance(getattr(kind, "name", None), str):
        raise UsageError(
            f"{location} has no name.", next_step='give the class one: name = "mine"; checkpoints hold it.'
        )
    if not issubclass(kind.Options, of.StrategyOptions):
        raise UsageError(
            f"The Options of {location} are none.",
            next_step="let them inherit from shoal.strategies.StrategyOptions.",
        )
    return kind
