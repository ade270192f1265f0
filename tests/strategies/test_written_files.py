"""Files that come from the registry of strategies are current: constructors for editors, a page of options.

    SHOAL_RECORD=1 .venv/bin/pytest tests/strategies/test_written_files.py

writes both anew.
"""

import os

import pytest

import strategy_files
from recorded import VARIABLE


@pytest.mark.parametrize("path", strategy_files.FILES)
def test_a_file_is_what_the_registry_says(path):
    file, text = strategy_files.ROOT / path, strategy_files.FILES[path]()
    if os.environ.get(VARIABLE):
        file.write_text(text)
    assert file.read_text() == text, f"set {VARIABLE}=1 and test again"
