"""The keyword arguments that editors and type checkers know are those of the option structs.

`keywords.py` is written from `options.py`:

    SHOAL_RECORD=1 .venv/bin/pytest tests/strategies/test_keywords.py
"""

import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from option_keywords import keywords_source
from recorded import VARIABLE
from shoal.strategies import keywords, options
from shoal.strategies.registry import BUILT_IN

ROOT = Path(__file__).parents[2]


def test_the_file_is_what_the_options_say():
    path = Path(keywords.__file__)
    if os.environ.get(VARIABLE):
        path.write_text(keywords_source())
        importlib.reload(keywords)
    assert path.read_text() == keywords_source(), f"set {VARIABLE}=1 and test again"


def test_every_strategy_has_keywords_with_exactly_its_options():
    for row in BUILT_IN.values():
        known = getattr(keywords, row.options.__name__.replace("Options", "Keywords"))
        assert set(known.__annotations__) == set(row.options.__struct_fields__)
        assert known.__total__ is False


@pytest.mark.slow
def test_a_type_checker_knows_options_and_their_types(tmp_path):
    """Of a class whose constructor takes them, as those of the strategies do."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        from typing import Unpack
        from shoal.strategies.keywords import DiLoCoKeywords

        def diloco(**named: Unpack[DiLoCoKeywords]) -> None: ...

        diloco(local_steps=4, outer_lr=0.5, on_nonfinite="skip", batch_size=None)
        diloco(local_steps="four")
        diloco(outer_rate=0.5)
        """)
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert [line.split(": ")[0].rpartition(":")[2] for line in done.stdout.splitlines()[:-1]] == ["8", "9"], (
        done.stdout
    )
    assert options.DiLoCoOptions().local_steps == 100
