"""Every command, its flags, their names, types, defaults and help are what `flags.json` lists.

`recorded` says how the file is written anew: flags may be added and help may be improved, but no command
that was typed yesterday may mean something else today.
"""

import inspect
from pathlib import Path

import typer

from recorded import check_recorded
from shoal.cli.program import app

RECORDED = Path(__file__).parent / "flags.json"


def commands(command, path=("shoal",)):
    """Yield every command of the tree by what is typed for it."""
    yield " ".join(path), command
    for name, child in sorted(getattr(command, "commands", {}).items()):
        yield from commands(child, (*path, name))


def describe_type(parameter):
    """Say what a value may be: its type or its choices, and its limits."""
    kind = inspect.formatannotation(parameter.type_descriptor.annotation)
    limits = {name: getattr(parameter, name, None) for name in ("min", "max")}
    return ", ".join([kind, *(f"{name} {limit}" for name, limit in limits.items() if limit is not None)])


def describe_parameter(parameter):
    """Say all that a user can see of an option or an argument, without what it has not."""
    shown = getattr(parameter, "show_default", None)
    seen = {
        "kind": parameter.param_type_name,
        "names": " ".join([*parameter.opts, *parameter.secondary_opts]),
        "type": describe_type(parameter),
        "default": None if parameter.default is None else str(parameter.default),
        "shown_default": str(shown),
        "help": getattr(parameter, "help", None),
        "metavar": parameter.metavar,
        "is_flag": getattr(parameter, "is_flag", False),
        "is_multiple": getattr(parameter, "multiple", False) or parameter.nargs != 1,
        "is_required": parameter.required,
        "is_hidden": getattr(parameter, "hidden", False),
    }
    return {name: value for name, value in seen.items() if value not in (None, False)}


def describe_command(command):
    """Say what its help says, by parameter and in order."""
    return {
        "help": command.help,
        "epilog": command.epilog,
        "order": " ".join(parameter.name for parameter in command.params),
        "parameters": {parameter.name: describe_parameter(parameter) for parameter in command.params},
    }


def test_every_command_has_the_flags_that_are_recorded():
    root = typer.main.get_command(app)
    check_recorded(RECORDED, "commands", {name: describe_command(each) for name, each in commands(root)})
