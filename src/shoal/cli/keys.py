"""`shoal keys`: this user's identity on this machine, and secrets for swarms.

Private keys go to files that only this user may read, and nowhere else; a secret goes to stdout or to a file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.flags import with_flags
from shoal.cli.output import text_stream, write_encoded
from shoal.cli.program import Verbs
from shoal.core.errors import IdentityError, UsageError
from shoal.core.identity import Identity, default_identity_path, new_secret, write_private_file
from shoal.core.run_options import flag
from shoal.report.tables import emit, tell_result

app = typer.Typer(
    cls=Verbs,
    help="Show or make this user's identity, and make secrets for swarms.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_show_locals=False,
)

JsonFile = Annotated[Path | None, flag("Write the result as JSON; - is stdout.", "--json", metavar="FILE")]
IdentityFile = Annotated[
    Path | None,
    flag("The identity's file; by default this user's own.", "--file", metavar="PATH", shown=False),
]


@app.command()
@with_flags
def show(file: IdentityFile = None, json_file: JsonFile = None) -> None:
    """Print the peer id, and where the key lies.

    This user's own identity is created on first use; a file that --file names must exist.
    """
    path = default_identity_path() if file is None else file
    identity = Identity.load_or_create(path) if file is None else Identity.load(path)
    peer_id = str(identity.peer_id)
    _report({"peer_id": peer_id, "file": str(path)}, [f"peer id  {peer_id}", f"file     {path}"], json_file)


@app.command()
@with_flags
def new(
    file: IdentityFile = None,
    replace: Annotated[
        bool, flag("Replace the identity that lies there; it cannot be brought back.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Make a new identity, an Ed25519 key; refuses to replace one unless told to."""
    path = file or default_identity_path()
    _refuse_folder(path)
    replaced = _peer_id_at(path)
    identity = Identity.generate()
    try:
        identity.save(path, replace=replace)
    except FileExistsError:
        raise UsageError(
            f"There is an identity in {path} already: {_peer_id_at(path) or 'a key that cannot be read'}. "
            "Replacing it loses that peer id for good: lists that allow it and records that it signed would "
            "name a peer that nobody can be again.",
            next_step="keep it, give another --file, or add --replace.",
        ) from None
    peer_id = str(identity.peer_id)
    lines = [f"peer id  {peer_id}", f"file     {path}"]
    if replaced is not None:
        lines.append(f"replaced {replaced}")
    _report({"peer_id": peer_id, "file": str(path), "replaced": replaced}, lines, json_file)


@app.command()
@with_flags
def secret(
    file: Annotated[
        Path | None,
        flag(
            "Write it there, for this user's eyes alone; by default it goes to stdout.",
            metavar="PATH",
            shown=False,
        ),
    ] = None,
    replace: Annotated[bool, flag("Replace the secret that lies there; it cannot be brought back.")] = False,
) -> None:
    """Make a secret for a swarm: peers that share it may talk to each other.

    Give it to every peer by --secret-file or SHOAL_SECRET.
    """
    if file is None:
        emit(new_secret(), sys.stdout)  # alone there, so that a shell can take it
        tell_result({"file": None}, sys.stderr)
        return
    _refuse_folder(file)
    try:
        write_private_file(file, new_secret().encode() + b"\n", replace=replace)
    except FileExistsError:
        raise UsageError(
            f"{file} exists already. Replacing a secret shuts out every peer that still has the old one.",
            next_step="keep it, give another --file, or add --replace.",
        ) from None
    _report({"file": str(file)}, [f"file     {file}"], None)


def _report(result: dict[str, object], lines: list[str], json_file: Path | None) -> None:
    out = text_stream(json_file)
    for line in lines:
        emit(line, out)
    write_encoded(msgspec.json.encode(result) + b"\n", json_file)
    tell_result(result, out)


def _peer_id_at(path: Path) -> str | None:
    try:
        return str(Identity.load(path).peer_id)
    except IdentityError:
        return None


def _refuse_folder(path: Path) -> None:
    if path.is_dir():
        raise UsageError(
            f"{path} is a folder.", next_step=f"name a file in it, for example {path / 'identity.pem'}"
        )
