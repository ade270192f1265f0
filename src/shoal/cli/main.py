"""The program `shoal`: its verbs, how errors are shown, and what exit codes mean.

Exit codes: 0 done; 1 the work failed, or was slower than allowed; 2 bad usage; 3 reports that cannot be read,
compared or judged; 130 interrupted. Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import click
import typer

from shoal import __version__
from shoal.cli.bench import app as bench_app
from shoal.cli.diff import diff
from shoal.cli.doctor import doctor
from shoal.cli.keys import app as keys_app
from shoal.cli.report import report
from shoal.core.errors import ReportError, ShoalError, UsageError

FAILED, BAD_USAGE, NOT_COMPARABLE, INTERRUPTED = 1, 2, 3, 130


def kebab(token: str) -> str:
    """Underscores are accepted wherever a hyphen stands."""
    return token.replace("_", "-")


CONTEXT = {"help_option_names": ["-h", "--help"], "token_normalize_func": kebab, "max_content_width": 100}

app = typer.Typer(
    name="shoal",
    help="Train one PyTorch model on many machines, and measure every way of doing so in the same terms.",
    epilog="Exit codes: 0 done, 1 failed or too slow, 2 bad usage, 3 not comparable, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    context_settings=CONTEXT,
    rich_markup_mode=None,
)
app.command(context_settings=CONTEXT)(diff)
app.command(context_settings=CONTEXT)(report)
app.command(context_settings=CONTEXT)(doctor)
app.add_typer(bench_app, name="bench", context_settings=CONTEXT)
app.add_typer(keys_app, name="keys", context_settings=CONTEXT)


@app.callback(invoke_without_command=False)
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more, to stderr.")] = False,
) -> None:
    """Options of every verb."""
    if version:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the program; its exit code."""
    try:
        code = app(args=arguments, standalone_mode=False, prog_name="shoal")
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        if isinstance(error, UsageError):
            return BAD_USAGE
        return NOT_COMPARABLE if isinstance(error, ReportError) else FAILED
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        error.show()
        return BAD_USAGE
    except (KeyboardInterrupt, click.Abort):
        print("shoal: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # whoever read the output has gone; keep Python from complaining when it flushes the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else 0
