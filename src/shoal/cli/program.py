"""The program `shoal`: its verbs, how errors are shown, and what exit codes mean.

Exit codes: 0 done; 1 the work failed, or was slower than allowed; 2 bad usage; 3 reports that cannot be read,
compared or judged; 130 interrupted; `run` has more. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from importlib import import_module
from typing import Annotated, Any, ClassVar, NamedTuple

import typer
from typer.core import TyperGroup

from shoal._version import __version__
from shoal.core.errors import ReportError, ShoalError, UsageError
from shoal.core.untrusted import visible
from shoal.report.tables import emit

# Typer brings its own click in some versions and uses the installed one in others: take the one in use
ClickException: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")

_WHOLE = 1000  # letters: no first sentence is as long
FAILED, BAD_USAGE, NOT_COMPARABLE, INTERRUPTED = 1, 2, 3, 130


def kebab(token: str) -> str:
    """Underscores are accepted wherever a hyphen stands."""
    return token.replace("_", "-")


CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": kebab, "max_content_width": 100}


class Verbs(TyperGroup):
    """Commands whose help has them in groups, each with its first sentence, which is never cut."""

    groups: ClassVar[dict[str, tuple[str, ...]]] = {}
    """Names by heading; what stands in none is listed as Commands."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        grouped = [name for names in self.groups.values() for name in names]
        others = tuple(name for name in self.list_commands(ctx) if name not in grouped)
        width = max(map(len, (*grouped, *others)), default=0)
        for heading, names in {**self.groups, "Commands": others}.items():
            rows = [(f"{name:{width}}", self.short_help_of(ctx, name)) for name in names]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def short_help_of(self, ctx: Any, name: str) -> str:
        """Return the line that help has of a command."""
        command: Any = self.get_command(ctx, name)
        return str(command.get_short_help_str(_WHOLE))


class LazyVerbs(Verbs):
    """Commands that are imported when they are asked for; `make` gives one by its name."""

    names: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def make(name: str) -> Any:
        """Import a command, and make what typer runs; that takes longer than many of them do."""
        raise NotImplementedError

    @property
    def commands(self) -> Any:
        """All of them, by name, which imports them."""
        return {name: self.make(name) for name in self.names}

    @commands.setter
    def commands(self, _: Any) -> None:
        """Ignore those that typer knows of, which are none."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return list(self.names)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Make the command of that name; None where there is none."""
        return self.make(cmd_name) if cmd_name in self.names else None


def command_of(name: str, found: Any, **settings: Any) -> Any:
    """Make what typer runs of a function, or of a group of commands."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"context_settings": CONTEXT, **settings}
    if isinstance(found, typer.Typer):
        alone.add_typer(found, name=name, **settings)
        group: Any = typer.main.get_command(alone)
        return group.commands[name]
    alone.command(name, **settings)(found)
    return typer.main.get_command(alone)


class Verb(NamedTuple):
    """Where a verb stands, and the line that `shoal --help` has of it."""

    place: str
    """As `module:name` in this room."""
    short_help: str
    settings: dict[str, Any] | None = None
    is_made: bool = False
    """Whether what stands there makes the verb of a name."""


_RUN = {
    # what follows PROGRAM is the program's own, options and all
    "context_settings": {**CONTEXT, "allow_interspersed_args": False},
    "epilog": "Exit codes: 0 done, 2 wrong usage, 124 after --timeout, 128 + N after signal N, otherwise the "
    "code of the worker that failed.",
}
VERBS = {
    "compare": Verb(
        "bench:function_of", "Compare strategies at one task in one simulated world.", is_made=True
    ),
    "diff": Verb("diff:diff", "Compare two reports row by row; negative is worse."),
    "report": Verb("report:report", "Write reports as one HTML page."),
    "doctor": Verb("doctor:doctor", "Check this machine, its network, and the way to a swarm."),
    "dht": Verb("dht:dht", "Be a peer of a swarm's DHT, until Ctrl-C."),
    "serve": Verb("serve:serve", "Serve experts to other peers, until Ctrl-C."),
    "swarm": Verb("swarm:swarm", "Show a training run of a swarm: its members, and how far each is."),
    "status": Verb("status:status", "Show who is in a swarm, and what each peer holds."),
    "scale": Verb("run:scale", "Change the number of workers of a run under way."),
    "top": Verb("top:top", "Watch a run: its workers' steps, speeds and waits."),
    "run": Verb("run:run", "Run a program in several workers, here or on other machines.", _RUN),
    "bench": Verb("bench:app", "Run a benchmark and save its report."),
    "keys": Verb("keys:app", "Show or make identities and secrets."),
}


class ShoalVerbs(LazyVerbs):
    """The verbs of `shoal`, by what they are for."""

    names = tuple(VERBS)
    groups: ClassVar[dict[str, tuple[str, ...]]] = {
        "Train": ("run", "scale"),
        "Swarm": ("swarm", "dht", "serve", "status", "keys"),
        "Measure": ("bench", "compare", "doctor"),
        "Look": ("top", "diff", "report"),
    }

    def short_help_of(self, ctx: Any, name: str) -> str:
        """Return the line that help has of a verb, without importing it."""
        return VERBS[name].short_help

    @staticmethod
    @functools.cache
    def make(name: str) -> Any:
        """Import a verb, and make its command."""
        verb = VERBS[name]
        module, _, attribute = verb.place.partition(":")
        found = getattr(import_module(f"shoal.cli.{module}"), attribute)
        if verb.is_made:
            found = found(name)
        return command_of(name, found, short_help=verb.short_help, **(verb.settings or {}))


app = typer.Typer(
    name="shoal",
    cls=ShoalVerbs,
    help="Train one PyTorch model on many machines, and measure every way of doing so in the same terms.",
    epilog="Exit codes: 0 done, 1 failed or too slow, 2 bad usage, 3 not comparable, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    context_settings=CONTEXT,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


class _Visible(logging.Formatter):
    """What is logged may quote other machines, which must not steer the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def print_version(is_wanted: bool) -> None:
    """Prints the version and ends, as `--version` asks."""
    if is_wanted:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=print_version),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
) -> None:
    """Options of every verb."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Visible("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler])


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the program; its exit code. Only errors that nobody foresaw are raised."""
    if sys.stdout is None or sys.stderr is None:
        from shoal.launch import settle_own_streams

        settle_own_streams()
    try:
        code = _run(arguments)
        sys.stdout.flush()  # here, because the interpreter's end would complain of a reader that has gone
    except BrokenPipeError:
        _let_go_of_closed_pipes()
        return FAILED
    return code


@functools.cache
def _command() -> Any:
    """The whole tree of verbs; making it takes longer than many of them do."""
    return typer.main.get_command(app)


def _run(arguments: list[str]) -> int:
    try:
        # not `app()`: it turns interrupts, exits and closed pipes into something else on the way
        command = _command()
        with command.make_context("shoal", list(arguments), obj=tuple(arguments)) as context:
            command.invoke(context)
    except ShoalError as error:
        emit(f"shoal: {error}", sys.stderr)
        if isinstance(error, UsageError):
            return BAD_USAGE
        return NOT_COMPARABLE if isinstance(error, ReportError) else FAILED
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        next_step = (
            "pip install torch, as https://pytorch.org says for this machine; `shoal doctor` looks at it."
        )
        emit(f"shoal: {ShoalError('torch is not installed.', next_step=next_step)}", sys.stderr)
        return FAILED
    except typer.Exit as leave:
        return leave.exit_code
    except ClickException as error:
        error.show()
        return BAD_USAGE
    except (KeyboardInterrupt, typer.Abort):
        emit("shoal: interrupted", sys.stderr)
        return INTERRUPTED
    return 0


def _let_go_of_closed_pipes() -> None:
    """What is left for a reader that has gone goes nowhere, without a complaint; other output stays."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
