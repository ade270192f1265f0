"""What today's code does, kept in JSON files beside the tests, so that a change of it is seen and meant.

    SHOAL_RECORD=1 .venv/bin/pytest tests/test_public_names.py

writes the files anew; `git diff` then shows what has changed.
"""

import json
import os

VARIABLE = "SHOAL_RECORD"


def check_recorded(path, found):
    """`found` is what the file has; with the variable set it is written there instead."""
    if os.environ.get(VARIABLE):
        path.write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    recorded = json.loads(path.read_text())
    assert found == recorded, (
        f"{path.name} has something else. Where that is meant: set {VARIABLE}=1 and run this test again."
    )
