"""What `shoal run` was asked for, as its workers find it in their environment; and options as such.

An option is a field of a struct, `Annotated[TYPE, Meta(description=…)]`, where its name, type, default and
description stand alone: flags, help texts and documentation are made of them. `flag(…)` is such a Meta with
what the command line needs beside that. Some options name code of the user's own, as `package.module:name`
or `file.py:name`: a model, a strategy, an expert, a tracker (`load_named`).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from shoal.core.errors import UsageError, did_you_mean
from shoal.core.untrusted import decode_json

VARIABLE = "SHOAL_RUN"
SECRET_VARIABLE = "SHOAL_RUN_SECRET"
"""The secret of a run over several machines, in hex; workers find it here, agents on standard input."""
RUN_ID_VARIABLE = "SHOAL_RUN_ID"
"""The name of one start of a run, another one after a restart."""
TORCHRUN_ID_VARIABLE = "TORCHELASTIC_RUN_ID"
"""torchrun's name for a run, which `shoal run --env torchrun` sets too."""
CHECKPOINT_VARIABLE, CHECKPOINT_EVERY_VARIABLE = "SHOAL_CHECKPOINT", "SHOAL_CHECKPOINT_EVERY"
"""What --checkpoint and --checkpoint-every are under other launchers."""
TRACK_VARIABLE = "SHOAL_TRACK"
"""What --track is under other launchers."""
Env = Literal["shoal", "torchrun"]
"""Whose variables tell workers their place: Shoal's alone, or torchrun's as well."""
EncryptChoice = Literal["auto", "always", "never"]
"""Whether tensors go encrypted between machines; `auto` leaves it to the network that they are in."""
AllReduceChoice = Literal["auto", "ring", "direct"]
"""How machines reduce together: around a ring, or each directly with all others; `auto` chooses."""
SILENCE_S = 5.0
"""A peer that is silent or stopped for this long, times the patience, is lost."""


class RunOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything has a default, so that a script started by hand or by torchrun works alike."""

    run_id: str = ""
    """Tells this run from others on the machine."""
    strategy: str | None = None
    options: dict[str, Any] = {}
    """Of the strategy, by the names of its options."""
    workers_per_machine: int | None = None
    num_servers: int = 0
    """Parameter servers: so many of the first ranks."""
    network_interface: str | None = None
    """The name of the interface through which machines talk, or an address of it."""
    checkpoint: str | None = None
    """Folder from which an attached strategy resumes, when it holds something, and to which it saves."""
    checkpoint_every: int | None = None
    """Steps from one saving to the next."""
    track: str | None = None
    """The tracker that workers log to: a name or `module:Class`, with `=FOLDER` behind it or not."""
    patience: float = 1.0
    """A peer that is silent for SILENCE_S times this is lost."""
    timeout_s: float | None = None
    """The longest wait for a peer that is alive; None waits on."""
    allow_split: bool = False
    """Whether each side of a network that is cut goes on; otherwise the smaller one stops."""
    encrypt: EncryptChoice = "auto"
    """Whether tensors go encrypted between machines."""
    all_reduce: AllReduceChoice = "auto"
    """How machines reduce together."""
    timeline: str | None = None
    """Each worker writes its part of the Chrome trace to this path with `.RANK` behind it."""
    status_fd: int | None = None
    """A pipe to the launcher, which reads one JSON object a line: `core.status`."""
    status_inode: int | None = None
    """Of that pipe: a process that inherits the variable, not the pipe, must not write to another file."""
    link_fd: int | None = None
    """A socket to the launcher of a run whose workers come and go (`core.elastic`); None in other runs."""
    number: int = 0
    """The number of this worker in such a run, which no other worker ever has."""
    is_joining: bool = False
    """Whether the run was under way when this worker was started."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> RunOptions:
        """Those of this run; defaults without `shoal run`.

        Another launcher inside of `shoal run` starts another run, whose workers inherit what is not theirs.
        """
        environ = os.environ if environ is None else environ
        text = environ.get(VARIABLE)
        if text is None:
            return cls._of_other_launcher(environ)
        try:
            options = decode_json(text, cls)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{VARIABLE} cannot be read: {error}.",
                cause="it was set by hand, or by another version of Shoal.",
                next_step=f"unset {VARIABLE}, or start through `shoal run`.",
            ) from None
        return options if options.run_id == own_run_id(environ) else cls._of_other_launcher(environ)

    @classmethod
    def _of_other_launcher(cls, environ: Mapping[str, str]) -> RunOptions:
        """What can be asked for without `shoal run`: torchrun, MPI and Slurm have no flags of ours."""
        folder, every = environ.get(CHECKPOINT_VARIABLE), environ.get(CHECKPOINT_EVERY_VARIABLE)
        track = environ.get(TRACK_VARIABLE) or None
        if not folder:
            return cls(track=track)
        if every is not None and (not every.isdecimal() or int(every) < 1):
            raise UsageError(
                f"{CHECKPOINT_EVERY_VARIABLE}={every!r} is no number of steps.",
                next_step="set it to 1 or more.",
            )
        return cls(checkpoint=folder, checkpoint_every=None if every is None else int(every), track=track)

    def to_environment(self) -> dict[str, str]:
        """The variable that workers are started with."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def own_run_id(environ: Mapping[str, str]) -> str:
    """The name of the `shoal run` whose worker this process is; empty where it is none.

    It is none when torchrun, inside of that run, has started this process for a run of its own.
    """
    run_id = environ.get(RUN_ID_VARIABLE, "")
    return run_id if environ.get(TORCHRUN_ID_VARIABLE, run_id) == run_id else ""


@dataclass(frozen=True, slots=True)
class Flag:
    """What the command line needs to know of an option beside its name, type, default and description."""

    names: tuple[str, ...] = ()
    """All names that users may type, where it is not the field's name alone: aliases of the documents."""
    ge: float | None = None
    le: float | None = None
    """The limits of a number, as in msgspec's Meta."""
    metavar: str | None = None
    """What stands for the value in help texts."""
    shown: str | bool = True
    """What help texts show as the default: the default itself, this text, or nothing."""


def flag(
    text: str,
    *names: str,
    ge: float | None = None,
    le: float | None = None,
    metavar: str | None = None,
    shown: str | bool = True,
) -> msgspec.Meta:
    """Describe an option that has a flag; `text` is its help."""
    return msgspec.Meta(description=text, extra={"flag": Flag(names, ge, le, metavar, shown)})


Hostfile = Annotated[
    Path | None, flag("A file with one host on each line: host slots=N, or host:N.", metavar="FILE")
]
SshPort = Annotated[
    int | None, flag("The port of sshd on the other hosts.", "-p", "--ssh-port", metavar="PORT")
]
SshUser = Annotated[str | None, flag("The user name on the other hosts.", metavar="NAME")]
SshOption = Annotated[list[str] | None, flag("An option for ssh -o. Can be repeated.", metavar="NAME=VALUE")]
RemotePython = Annotated[
    str | None,
    flag("The Python interpreter on the other hosts. Default: the same path as here.", metavar="PATH"),
]
RemoteCwd = Annotated[
    str | None, flag("The folder on the other hosts. Default: the same as here.", metavar="DIR")
]
NetworkInterface = Annotated[
    str | None, flag("The network interface between the machines, for example eth0.", metavar="NAME")
]
"""The flags of all commands that reach other hosts by ssh."""


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option, as help texts and documentation show it."""

    name: str
    """It has underscores, as in code."""
    type: Any
    """It is the field's type without its limits."""
    default: Any
    description: str
    flag: Flag | None = None
    """What `flag` said of it, if it did."""

    @property
    def kind(self) -> str:
        """It is 'int', 'float', 'bool', 'text', or the choices as 'a|b'."""
        if self.choices:
            return "|".join(self.choices)
        return self.value_type.__name__ if self.value_type in (int, float, bool) else "text"

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts that it may be, where not all are allowed."""
        return get_args(self._plain) if get_origin(self._plain) is Literal else ()

    @property
    def value_type(self) -> Any:
        """The class of its values: bool, int, float, str, or tuple for what may be given often."""
        return str if self.choices else get_origin(self._plain) or self._plain

    @property
    def _plain(self) -> Any:
        """The type of a value that is not None."""
        if get_origin(self.type) in (Union, types.UnionType):
            return next(part for part in get_args(self.type) if part is not types.NoneType)
        return self.type


def describe_struct(kind: type[msgspec.Struct]) -> list[OptionInfo]:
    """List the fields of a struct that have defaults, in order."""
    hints = get_type_hints(kind, include_extras=True)
    described = []
    for field in msgspec.structs.fields(kind):
        has_factory = field.default_factory is not msgspec.NODEFAULT
        default = field.default_factory() if has_factory else field.default
        if default is not msgspec.NODEFAULT:
            described.append(describe_option(field.name, hints[field.name], default))
    return described


def describe_option(name: str, hint: Any, default: Any) -> OptionInfo:
    """Describe one option by its annotation; the outermost description and flag count."""
    description, said = "", None
    while get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        for note in notes:
            description = description or getattr(note, "description", None) or ""
            said = said or (getattr(note, "extra", None) or {}).get("flag")
    return OptionInfo(name, _without_limits(hint), default, description, said)


def _without_limits(hint: Any) -> Any:
    """Take the limits out of a type and of the parts of a union."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        hint = Union[tuple(_without_limits(part) for part in get_args(hint))]  # noqa: UP007
    return hint


def load_named(name: str, what: str) -> Any:
    """Gives what the user's own `package.module:NAME` or `file.py:NAME` stands for; `what` it should be.

    UsageError when it is written otherwise, or is not there. What the module itself raises passes through.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute.isidentifier():
        raise UsageError(
            f"{name!r} names no {what}.", next_step="write it as package.module:NAME or file.py:NAME."
        )
    module = _load_module(where, what)
    if not hasattr(module, attribute):
        public = [each for each in vars(module) if not each.startswith("_") and callable(vars(module)[each])]
        raise UsageError(
            f"{where} has no {attribute!r}.{did_you_mean(attribute, public)}",
            next_step=f"name what is there, as {where}:{(public or ['NAME'])[0]}.",
        )
    return getattr(module, attribute)


def _load_module(where: str, what: str) -> ModuleType:
    """Imports the module, or runs the file, from which `what` should come."""
    if where.endswith(".py"):
        return _run_file(where, what)
    if str(Path.cwd()) not in sys.path:
        # the `shoal` program lacks the current folder, which `python -m` has; at the end it hides nothing
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"There is no module {error.name!r}, from which the {what} should come.",
            cause=f"it is misspelt, or neither installed nor on PYTHONPATH nor in {Path.cwd()}.",
            next_step="start in the folder that holds it, set PYTHONPATH to that folder, or install it.",
        ) from None


def _run_file(where: str, what: str) -> ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise UsageError(
            f"There is no file {where!r}, from which the {what} should come.",
            next_step=f"give its path from {Path.cwd()}, on every machine that needs it.",
        )
    name = f"shoal_file_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known  # its classes stay the same
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a file that ends in .py has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # for what the file imports from beside it
    sys.modules[name] = module  # dataclasses and annotations look their module up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
