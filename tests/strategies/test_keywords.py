"""The keyword arguments that editors and type checkers know are those of the option structs.

`keywords.py` is written from `options.py`:

    SHOAL_RECORD=1 .venv/bin/pytest tests/strategies/test_keywords.py
"""

import importlib
import os
from pathlib import Path

from option_keywords import keywords_source
from recorded import VARIABLE
from shoal.strategies import keywords
from shoal.strategies.registry import BUILT_IN


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
