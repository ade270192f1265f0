"""Flags that are made from structs: a flag's name, type, default, help, limits and aliases stand in a field.

    class ServerFlags(msgspec.Struct, frozen=True, kw_only=True):
        num_workers: Annotated[int | None, flag("Workers.", "--np", "-np", ge=1, shown="the cores")] = None
        sizes: Annotated[tuple[int, ...], flag("Of a tensor.", metavar="N,...")] = (1, 2)

    @app.command()
    @with_flags
    def serve(context: typer.Context, flags: ServerFlags) -> None: ...

A field without a description has no flag, and keeps its default. A tuple is typed as text with commas, a list
by giving the flag again, a dict as `NAME=VALUE`, again and again. A command gets structs, and never sees
their flags one by one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
import typer

from shoal.core.errors import UsageError
from shoal.core.run_options import Flag, OptionInfo, describe_option, describe_struct

Command = Callable[..., None]
S = TypeVar("S", bound=msgspec.Struct)


def with_flags(command: Command) -> Command:
    """Give a command the flags of each struct among its parameters, in the place of that parameter.

    A parameter that is annotated with `flag` itself is a flag too.
    """
    parameters: list[inspect.Parameter] = []
    structs: dict[str, type[msgspec.Struct]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if inspect.isclass(kind) and issubclass(kind, msgspec.Struct):
            structs[parameter.name] = kind
            parameters += flags_of(kind)
        else:
            option = describe_option(parameter.name, kind, parameter.default)
            parameters.append(parameter if option.flag is None else parameter_of(option, option.flag))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        made = {name: made_of(kind, given) for name, kind in structs.items()}
        used = {option.name for kind in structs.values() for option in _flagged(kind)}
        command(**{name: value for name, value in given.items() if name not in used}, **made)

    return with_parameters(called, parameters)


def with_parameters(command: Command, parameters: Iterable[inspect.Parameter]) -> Command:
    """Let typer see these parameters in the place of the command's own."""
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    # typer takes types from the annotations, and all else from the signature
    command.__annotations__ = {each.name: each.annotation for each in named}
    command.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return command


def flags_of(kind: type[msgspec.Struct]) -> list[inspect.Parameter]:
    """Make a parameter for typer of each field that has a description."""
    return [parameter_of(option, option.flag or Flag()) for option in _flagged(kind)]


def made_of(kind: type[S], given: Mapping[str, Any]) -> S:
    """Make the struct of what typer has read for its flags; UsageError for a text that is no such list."""
    read = {
        option.name: _read(option, given[option.name]) for option in _flagged(kind) if option.name in given
    }
    return kind(**read)


def parameter_of(option: OptionInfo, how: Flag) -> inspect.Parameter:
    """Make a parameter for typer of an option."""
    names, default = how.names, _text_of(option.default)
    kind: Any = _typed(option) | None if default is None else _typed(option)
    if option.value_type is bool and default is False and not names:
        names = (f"--{option.name.replace('_', '-')}",)  # and no --no-… beside it
    said = typer.Option(
        *names,
        min=how.ge,
        max=how.le,
        metavar=how.metavar,
        help=option.description,
        show_default=how.shown,
    )
    by_name = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(option.name, by_name, default=default, annotation=Annotated[kind, said])


def flag_names(command: Any) -> Iterator[tuple[str, str]]:
    """Yield the name of each parameter of a command of typer's with the flag that it is called in texts."""
    for parameter in command.params:
        if parameter.name is not None:
            yield parameter.name, parameter.opts[0]


def typed_flags(context: typer.Context) -> dict[str, str]:
    """Return the flags that were given on the command line, by parameter."""
    sources = {name: context.get_parameter_source(name) for name, _ in flag_names(context.command)}
    return {
        name: shown
        for name, shown in flag_names(context.command)
        if (source := sources[name]) is not None and source.name == "COMMANDLINE"
    }


def listed(text: str) -> list[str]:
    """Split a text at its commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def numbers(option: str, text: str) -> list[int]:
    """Read whole numbers between commas; UsageError names the option."""
    try:
        return [int(part) for part in listed(text)]
    except ValueError:
        raise UsageError(f"{option} {text} is no list of numbers.", next_step=f"say {option} 2,4.") from None


def assignments(texts: Iterable[str] | None) -> dict[str, str]:
    """Read `name=value` each; hyphens in names are underscores."""
    given = {}
    for text in texts or ():
        name, is_there, value = text.partition("=")
        if not is_there or not name.strip():
            raise UsageError(f"--option {text} sets nothing.", next_step="write --option name=value.")
        given[name.strip().replace("-", "_")] = value
    return given


@functools.cache
def _flagged(kind: type[msgspec.Struct]) -> list[OptionInfo]:
    return [option for option in describe_struct(kind) if option.description]


def _typed(option: OptionInfo) -> Any:
    """Say what typer reads: text for a tuple, texts for a list and a dict."""
    if option.choices:
        return Literal[option.choices]
    if option.value_type is tuple:
        return str
    return list[str] if option.value_type in (list, dict) else option.value_type


def _text_of(default: Any) -> Any:
    """Say what typer has as the default: a tuple as it would be typed, and None for what is empty."""
    if isinstance(default, tuple):
        return ",".join(map(str, default)) or None
    return None if default in ([], {}) else default


def _read(option: OptionInfo, value: Any) -> Any:
    """Make a field's value of what typer has read."""
    if value is None:
        return option.default
    if option.value_type is tuple:
        plain = next((part for part in get_args(option.type) if get_origin(part) is tuple), option.type)
        is_whole = get_args(plain)[0] is int
        return tuple(numbers(_name(option), value) if is_whole else listed(value))
    return assignments(value) if option.value_type is dict else value


def _name(option: OptionInfo) -> str:
    names = option.flag.names if option.flag else ()
    return names[0] if names else f"--{option.name.replace('_', '-')}"
