"""What today's code does, kept in JSON files beside the tests, so that a change of it is seen and meant.

    SHOAL_RECORD=1 .venv/bin/pytest tests/test_public_names.py tests/simulate/test_recorded_runs.py

writes the files anew; `git diff` then shows what has changed.
"""

import json
import os

VARIABLE = "SHOAL_RECORD"
MAX_SHOWN = 20


def recorded(path):
    """All entries of a file."""
    return json.loads(path.read_text()) if path.exists() else {}


def check_recorded(path, name, found):
    """`found` is the entry of that name in the file; with the variable set it is written there instead."""
    entries = recorded(path)
    if os.environ.get(VARIABLE):
        entries[name] = found
        path.write_text(json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    changed = list(_differences(entries.get(name), found, name))
    assert not changed, "\n".join(
        [
            f"{path.name} has something else. Where that is meant: set {VARIABLE}=1, test again.",
            *changed[:MAX_SHOWN],
            *([f"and {len(changed) - MAX_SHOWN} more"] if len(changed) > MAX_SHOWN else []),
        ]
    )


def _differences(before, now, place):
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{place} / {key}")
    elif before != now:
        yield f"{place}: {before!r} is now {now!r}"
