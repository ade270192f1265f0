"""Flags are made from the fields of structs, and structs from what was typed."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.flags import listed, typed_flags, with_flags
from shoal.core import UsageError
from shoal.core.run_options import flag


class SampleFlags(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[str, flag("What is trained.", metavar="NAME")] = "mlp"
    num_workers: Annotated[int | None, flag("Workers.", "--np", "-np", ge=1, shown="the cores")] = None
    sizes: Annotated[tuple[int, ...], flag("Of a tensor.", "--sizes", "--bytes")] = (1, 2)
    strategies: Annotated[tuple[str, ...] | None, flag("All by default.", shown="all")] = None
    option: Annotated[dict[str, str], flag("Of a strategy.")] = {}
    host: Annotated[list[str], flag("May be given often.")] = []
    device: Annotated[Literal["cpu", "cuda"], flag("Where.")] = "cpu"
    no_ddp: Annotated[bool, flag("Leave it out.")] = False
    latest: Annotated[bool | None, flag("Ask all.", "--latest/--no-latest")] = None
    folder: Annotated[Path | None, flag("Of data.")] = None
    seed: int = 7
    """Has no flag."""


class OtherFlags(msgspec.Struct, frozen=True, kw_only=True):
    short: Annotated[bool, flag("Quickly.")] = False
    left_out: int = 3
    """Has no flag either."""


@pytest.fixture
def call():
    """Run a command with these arguments: what it was given, and the flags that were typed."""
    app, seen = typer.Typer(rich_markup_mode=None), []

    @app.command()
    @with_flags
    def command(context: typer.Context, flags: SampleFlags, port: Port = 1, other: OtherFlags = None) -> None:
        """Do it."""
        seen.append((flags, port, other, typed_flags(context)))

    def called(*arguments):
        done = CliRunner().invoke(app, arguments)
        if isinstance(done.exception, UsageError):
            raise done.exception
        return seen[-1] if done.exit_code == 0 and seen else done.output

    return called


Port = Annotated[int, flag("Where it listens.", ge=1, le=9)]


def test_what_is_not_given_has_the_default_of_the_field(call):
    assert call() == (SampleFlags(), 1, OtherFlags(), {})


def test_values_come_in_the_types_of_the_fields(call):
    flags, port, other, typed = call(
        *("--np", "3", "--sizes", "4, 5", "--strategies", "a,b", "--option", "x-y=1", "--option", "z=2"),
        *("--host", "h", "--host", "i", "--device", "cuda", "--no-ddp", "--no-latest", "--folder", "d"),
        *("--port", "2", "--short"),
    )
    assert flags == SampleFlags(
        num_workers=3,
        sizes=(4, 5),
        strategies=("a", "b"),
        option={"x_y": "1", "z": "2"},
        host=["h", "i"],
        device="cuda",
        no_ddp=True,
        latest=False,
        folder=Path("d"),
    )
    assert (port, other) == (2, OtherFlags(short=True))
    assert typed["num_workers"] == "--np"
    assert "model" not in typed


def test_aliases_name_the_same_field(call):
    assert call("-np", "2", "--bytes", "8")[0] == SampleFlags(num_workers=2, sizes=(8,))


@pytest.mark.parametrize(
    "wrong", [("--np", "0"), ("--port", "10"), ("--device", "tpu"), ("--seed", "1"), ("--left-out", "1")]
)
def test_what_does_not_fit_is_refused(call, wrong):
    assert wrong[0] in call(*wrong)


def test_a_list_that_is_none_names_its_flag(call):
    with pytest.raises(UsageError, match="--sizes 1,x is no list of numbers"):
        call("--sizes", "1,x")


def test_an_option_without_a_value_sets_nothing(call):
    with pytest.raises(UsageError, match="--option x sets nothing"):
        call("--option", "x")


def test_the_help_shows_texts_defaults_and_limits(call):
    shown = " ".join(call("--help").split())
    for text in ("Workers.", "(the cores)", "default: 1,2", "default: cpu", "x>=1", "--no-latest"):
        assert text in shown, text
    assert "--no-no-ddp" not in shown


def test_parts_between_commas_may_have_spaces():
    assert listed("a, b,,c ") == ["a", "b", "c"]
