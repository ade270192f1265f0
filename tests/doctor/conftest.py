"""A machine of the test's own: what its files say, and what its programs answer."""

import os

import pytest

from shoal.doctor import machine


@pytest.fixture
def files(monkeypatch):
    """What the system's own files say, by path; those that are not named do not exist."""
    contents = {}
    monkeypatch.setattr(machine, "read", lambda path: contents.get(path, ""))
    return contents


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a program of the test's own on the path, `nvidia-smi` where no other is named."""

    def program(script, name="nvidia-smi"):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(file.parent) + os.pathsep + os.environ["PATH"])
        return str(file)

    return program
