"""Files that come from the registry of strategies are current: keyword arguments, and a page of options.

    SHOAL_RECORD=1 .venv/bin/pytest tests/strategies/test_written_files.py

writes both anew.
"""

import os

import pytest

import strategy_files
from recorded import VARIABLE
from shoal.strategies import BUILT_IN, keywords


@pytest.mark.parametrize("path", strategy_files.FILES)
def test_a_file_is_what_the_registry_says(path):
    file, text = strategy_files.ROOT / path, strategy_files.FILES[path]()
    if os.environ.get(VARIABLE):
        file.write_text(text)
    assert file.read_text() == text, f"set {VARIABLE}=1 and test again"


def test_every_strategy_has_keywords_with_exactly_its_options():
    for row in BUILT_IN.values():
        known = getattr(keywords, row.options.__name__.replace("Options", "Keywords"))
        assert set(known.__annotations__) == set(row.options.__struct_fields__)
        assert known.__total__ is False
