"""Builds the wheel and the source distribution in a temporary folder, and checks them as a user gets them.

    python tools/packaging_checks.py

Nothing is downloaded, and nothing is left in the repository. It prints what is wrong, and exits with 1.
"""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
NEEDED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "src", "tests")
SKIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc")
URLS = ("Homepage", "Documentation", "Source", "Changelog", "Issues")
_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)]*)\)|(?:href|src)=\"(?!https?:|mailto:|#)([^\"]*)\"")


def relative_links(text: str) -> list[str]:
    """Targets of links that lead nowhere from a package index's page."""
    return [first or second for first, second in _LINK.findall(text)]


def build(folder: Path) -> tuple[Path, Path]:
    """The source distribution and the wheel that is made from it."""
    copy, made = folder / "copy", folder / "dist"
    copy.mkdir()
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=SKIPPED)
        else:
            shutil.copy(source, copy / name)
    # the environment that runs this has setuptools: an isolated one would be downloaded
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(made), str(copy)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"The package cannot be built:\n{done.stdout}")
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> list[str]:
    """What is missing in them, or too much."""
    package = ROOT / "src"
    wanted = [
        path.relative_to(package).as_posix()
        for path in (package / "shoal").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
    with tarfile.open(sdist) as archive:
        sources = [name.partition("/")[2] for name in archive.getnames()]
    said = [f"{name} is not in the wheel." for name in sorted(wanted) if name not in inside]
    said += [
        f"src/{name} is not in the source distribution." for name in wanted if f"src/{name}" not in sources
    ]
    strangers = [name for name in inside if not name.startswith(("shoal/", "shoal-"))]
    said += [f"{name} does not belong into the wheel." for name in strangers]
    tests = [name for name in sources if name.startswith("tests/")]
    said += [f"{name} is in the source distribution, without all that it needs to run." for name in tests]
    return said


def check_metadata(wheel: Path) -> list[str]:
    """What the page of a package index would lack."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    urls = [value.partition(",")[0] for value in metadata.get_all("Project-URL", [])]
    said = [f"pyproject.toml has no {name} in [project.urls]." for name in URLS if name not in urls]
    if not metadata["Author"]:
        said.append("pyproject.toml names no author.")
    description = metadata.get_payload(decode=True).decode()
    if not description.strip():
        said.append("The package has no description.")
    said += [f"The description links to {link!r}, which is relative." for link in relative_links(description)]
    return said


def check_twine(*files: Path) -> list[str]:
    """What a package index would refuse."""
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, files)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return [f"twine check --strict fails:\n{done.stdout}"] if done.returncode else []


def check_program(wheel: Path, folder: Path) -> list[str]:
    """Whether the program starts from the wheel alone."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    program = (
        "import shoal; from shoal.cli.program import run; "
        "print(shoal.__file__, flush=True); raise SystemExit(run(['--help']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
    )
    is_from_wheel = done.stdout.startswith(str(folder))
    if done.returncode or not is_from_wheel or "bench" not in done.stdout:
        return [f"`shoal --help` does not run from the wheel:\n{done.stdout}"]
    return []


def main() -> int:
    """Build, check, and say what is wrong; the exit code."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        sdist, wheel = build(folder)
        said = [
            *check_contents(sdist, wheel),
            *check_metadata(wheel),
            *check_twine(sdist, wheel),
            *check_program(wheel, folder / "installed"),
        ]
        names = f"{sdist.name} and {wheel.name}"
    for line in said:
        print(line)
    if not said:
        print(f"{names} hold everything and can be published.")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
