"""`shoal serve`: experts that others compute with and train, until Ctrl-C.

0 ended when it was told to, 1 it could not serve. The first signal lets it leave in order, a second ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer

from shoal.cli.flags import parameter_of, with_parameters
from shoal.cli.members import check_ways, claimed_identity, member_of, where_to_listen
from shoal.cli.output import ends_by_signal, live_line, say, say_listening
from shoal.core.clock import SYSTEM_CLOCK
from shoal.core.errors import UsageError
from shoal.core.ids import Address
from shoal.core.run_options import Flag, OptionInfo
from shoal.experts.config import options
from shoal.report.tables import tell_result
from shoal.report.units import counted, scale_for

if TYPE_CHECKING:
    from shoal.core.loop import LoopThread
    from shoal.experts.config import HostingConfig
    from shoal.experts.server.hosting import Hosting
    from shoal.experts.status import HostStatus

_NUM_FILES = 8192
_MAX_NAMED = 6
_ALIASES = {
    "num_loops": ("--num-handlers", "-a", "--handler-processes"),
    "hidden_dim": ("--hid-dim",),
    "num_experts": ("--layers-per-gpu",),
}
_NUM_LAYERS = 56  # that Learning@home's server has where it is not told
_METAVARS = {"listen": "HOST:PORT", "join": "HOST:PORT", "checkpoint_dir": "DIR", "uid": "UID"}


def _flag(option: OptionInfo) -> inspect.Parameter:
    """Make a flag that is None where it is not given: a file may say it then."""
    name = f"--{option.name.replace('_', '-')}"
    names: tuple[str, ...] = (name, *_ALIASES.get(option.name, ()))
    kind: Any = option.type
    if option.value_type is bool:
        names = (f"{name}/--no-{name.removeprefix('--')}",)
    elif option.value_type is tuple:
        kind = list[str]
    metavar = _METAVARS.get(option.name, "FILE" if option.name.endswith("_file") else None)
    shown = str(option.default) if option.default not in (None, (), False) else False
    text = f"{option.description[:1].upper()}{option.description[1:]}."
    said = OptionInfo(option.name, kind, None, text)
    return parameter_of(said, Flag(names, metavar=metavar, shown=shown))


def _with_flags(verb: Callable[..., None]) -> Callable[..., None]:
    """Give a verb a flag for each field of the configuration."""
    named = inspect.signature(verb, eval_str=True).parameters.values()
    config, *of_documents = [one for one in named if one.name != "flags"]
    return with_parameters(verb, [config, *map(_flag, options()), *of_documents])


@_with_flags
def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="TOML with the names of these flags; flags win.", show_default=False
        ),
    ] = None,
    block_type: Annotated[
        Literal["ffn", "transformer"] | None,
        typer.Option(
            help="Blocks of Learning@home, as --expert-class lah-ffn; 56 without --layers-per-gpu.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Compute on this GPU, as --device cuda:N.", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "-p", "--port", min=0, max=65535, help="Listen at this port, as --listen.", show_default=False
        ),
    ] = None,
    **flags: Any,
) -> None:
    """Serve experts, pieces of a model, to other peers, until Ctrl-C.

    Others compute with them and train them. With --join they are declared in the swarm's DHT, where mixtures
    of experts find them; without it there is no DHT, they are called expert0, expert1, … and clients are
    given the address. Ctrl-C or SIGTERM: what was accepted is finished, experts are saved and withdrawn; a
    second signal ends it at once.
    """
    from shoal.core.loop import own_the_process
    from shoal.experts.config import load_config

    began_s = SYSTEM_CLOCK.now_s()
    own_the_process()
    given = {name: value for name, value in flags.items() if value is not None}
    told = load_config(config, {**given, **_as_written(given, block_type, gpu)})
    if port is not None and told.listen is not None:
        raise UsageError("--port and --listen say where to listen.", next_step="give one of them.")
    _allow_open_files()
    with claimed_identity(_path(told.identity_file)) as identity, ends_by_signal():
        lists = (_path(told.allow_file), _path(told.deny_file))
        member = member_of(identity, _path(told.secret_file), lists, is_insecure=told.insecure)
        told = _with_address(told, port or 0, is_open=told.insecure or member.membership is not None)
        from shoal.experts.server.hosting import hosted

        with hosted(told, identity, member.membership) as (hosting, loop):
            startup_s = SYSTEM_CLOCK.now_s() - began_s
            result: dict[str, object] = {
                "peer_id": str(hosting.peer_id),
                "address": str(hosting.address),
                "startup_s": round(startup_s, 3),
            }
            with contextlib.suppress(KeyboardInterrupt):
                _introduce(hosting, startup_s)
                _watch(hosting, loop)
            _end_at_the_second_signal()
            with contextlib.suppress(
                OSError
            ):  # a terminal that is gone must not keep experts from being saved
                say("Leaving: finishing what was accepted. A second signal ends it at once.")
        last = hosting.moment()
    tell_result({**result, **_summary(last)}, sys.stdout)


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _as_written(given: dict[str, Any], block_type: str | None, gpu: int | None) -> dict[str, Any]:
    """What the flags of Learning@home's server mean; UsageError beside our own for the same."""
    told: dict[str, Any] = {}
    if block_type is not None:
        told = {"expert_class": f"lah-{block_type}", "num_experts": given.get("num_experts", _NUM_LAYERS)}
    if gpu is not None:
        told["device"] = f"cuda:{gpu}"
    for name, flag in (("expert_class", "--block-type"), ("device", "--gpu")):
        if name in told and name in given:
            own = f"--{name.replace('_', '-')}"
            raise UsageError(f"{flag} and {own} say the same thing.", next_step="give one of them.")
    return told


def _with_address(config: HostingConfig, port: int, *, is_open: bool) -> HostingConfig:
    """Where to listen, if that was not said; UsageError when those who are joined could not call it there."""
    starts = [Address.parse(text) for text in config.join]
    if config.listen:
        listens = Address.parse(config.listen)
    else:
        listens = Address(where_to_listen(starts, is_open=is_open).host, port)
    check_ways(listens, starts)
    return msgspec.structs.replace(config, listen=str(listens))


def _introduce(hosting: Hosting, startup_s: float) -> None:
    config, uids = hosting.config, hosting.uids
    say_listening(hosting.address, hosting.peer_id, has_secret=hosting.endpoint.membership is not None)
    if hosting.dht is not None:
        say(f"Joined a swarm: {counted(len(hosting.dht.table), 'peer')} known.")
    sizes = [sum(one.numel() for one in each.module.parameters()) for each in hosting.server.experts.values()]
    scale = scale_for("1", max(sizes, default=0))
    size = f", {scale.format(max(sizes))} parameters each" if sizes else ""
    named = ", ".join(uids[:_MAX_NAMED]) + (", …" if len(uids) > _MAX_NAMED else "")
    say(
        f"Serving {counted(len(uids), 'expert')} of class {config.expert_class} (hidden {config.hidden_dim}"
        f"{size}) on {hosting.device}, {config.precision}{': ' if uids else ''}{named}"
    )
    if hosting.dht is None and hosting.endpoint.membership is None and uids:
        say(f'From Python: shoal.ExpertClient().open().expert("{uids[0]}", "{hosting.address}")')
    if hosting.metrics is not None:
        say(f"Metrics: {hosting.metrics.url}")
    say(f"Ready after {scale_for('s', startup_s).format(startup_s)}. Ctrl-C ends it.")


def _watch(hosting: Hosting, loop: LoopThread) -> None:
    """Show how it is, until told to end."""
    now = hosting.moment()
    with live_line() as (show_line, usual_s):
        while True:
            loop.run(asyncio.sleep(hosting.config.stats_s or usual_s))
            before, now = now, hosting.moment()
            with contextlib.suppress(OSError):  # whoever read it has gone; it serves on
                show_line(now.line(before))


def _summary(last: HostStatus) -> dict[str, object]:
    return {
        "up_s": round(last.up_s, 3),
        "num_experts": len(last.experts),
        "num_samples": last.num_samples,
        "num_batches": last.num_batches,
        "num_updates": sum(expert.num_updates for expert in last.experts),
        "num_failed": last.num_failed,
    }


def _end_at_the_second_signal() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def _allow_open_files() -> None:
    """As many connections as the limits of the transport allow, where the system does."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
