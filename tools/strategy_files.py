"""Writes the two files that come from the registry of strategies: run as `python tools/strategy_files.py`.

- src/shoal/strategies/__init__.pyi has a constructor for each strategy, so that editors complete and type
  checkers check `DiLoCo(group, local_steps=4)`, and what the pages of the API say of it.
- docs/options.md lists every strategy with its names, what it needs and survives, and its options.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path

import shoal
from shoal.strategies import BUILT_IN, OptionInfo, StrategyInfo, StrategyOptions, describe_options

ROOT = Path(__file__).parents[1]
STUB_HEAD = '''"""What type checkers and editors know of this package: constructors that take options by name.

Written by tools/strategy_files.py from the registry.
"""

from collections.abc import Callable
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from shoal.core.run_options import OptionInfo as OptionInfo
from shoal.dht import Swarm
from shoal.group import Group
from shoal.strategies.options import (
    WAITS_FOR_ALL as WAITS_FOR_ALL,
    StrategyOptions as StrategyOptions,
    describe_options as describe_options,
)
from shoal.strategies.registry import (
    BUILT_IN as BUILT_IN,
    StrategyInfo as StrategyInfo,
    all_strategies as all_strategies,
    canonical as canonical,
    find as find,
    from_args as from_args,
    load_class as load_class,
    make_strategy as make_strategy,
)
from shoal.strategies.session import TrainingSession as TrainingSession
from shoal.strategies.strategy import Strategy as Strategy
'''


_FIRST = {
    "SwarmTraining": [
        "        swarm: Swarm | Group | None = None,",
        "        *,",
        "        scheduler: Callable[[Optimizer], LRScheduler] | None = None,",
    ]
}
"""What comes before the options, where it is not a group alone."""


PAGE_HEAD = """# Options

This page lists what every strategy can be told. In code options are keyword arguments,
`shoal.DiLoCo(group, local_steps=50)`; for `shoal run` they are `--option local_steps=50`, and the most common
ones are flags. [strategies.md](strategies.md) says what the strategies compute.
`tools/strategy_files.py` writes the page from `shoal.strategies.BUILT_IN`.

All strategies have these:
"""


def stub_source() -> str:
    """The whole stub of the package."""
    rows = list(BUILT_IN.values())
    structs = sorted({row.options.__name__ for row in rows})
    imports = [f"from shoal.strategies.options import {name}" for name in structs]
    for row in sorted(rows, key=lambda row: row.location):
        module, _, name = row.location.partition(":")
        imports.append(f"from {module} import {name} as _{name}")
    return STUB_HEAD + "\n".join(imports) + "\n" + "".join(map(_class_source, rows))


def _class_source(row: StrategyInfo) -> str:
    name = row.location.partition(":")[2]
    lines = [
        f"        {option.name}: {_type_source(option.type)} = {option.default!r},"
        for option in describe_options(row.options)
    ]
    head = [
        f"\nclass {name}(_{name}):",
        *_docstring(row),
        "    def __init__(",
        "        self,",
        *_FIRST.get(name, ["        group: Group | None = None,", "        *,"]),
        f"        options: {row.options.__name__} | None = None,",
    ]
    return "\n".join([*head, *lines, "    ) -> None: ...\n"])


def _docstring(row: StrategyInfo) -> list[str]:
    """What the strategy does, and what its own options mean."""
    own = _own_options(row)
    others = (
        "Options beside those of `StrategyOptions`:" if own else "Options are those of `StrategyOptions`."
    )
    facts = f"By name `{row.name}`. {_after_a_loss(row)} {others}"
    meanings = ["", *(f"- `{option.name}`: {option.description}" for option in own)] if own else []
    lines = [f'"""{row.summary}', "", facts, *meanings, '"""']
    return [f"    {line}".rstrip() for line in lines]


def _after_a_loss(row: StrategyInfo) -> str:
    return "The others go on without a lost worker." if row.survives_loss else "A lost worker ends it."


def _own_options(row: StrategyInfo) -> list[OptionInfo]:
    """Those that not all strategies have, or that have another default here."""
    common = {option.name: option for option in describe_options(StrategyOptions)}
    return [option for option in describe_options(row.options) if option != common.get(option.name)]


def _type_source(hint: object) -> str:
    text = inspect.formatannotation(hint).replace("typing.", "")
    return re.sub(r"Optional\[(\w+)\]", r"\1 | None", text).replace("'", '"')


def options_page() -> str:
    """The whole page."""
    parts = [PAGE_HEAD, _options_table(describe_options(StrategyOptions))]
    return "\n".join([*parts, *map(_strategy_part, BUILT_IN.values())])


def _strategy_part(row: StrategyInfo) -> str:
    own = _own_options(row)
    name = row.location.partition(":")[2]
    public = "shoal" if name in shoal.__all__ else "shoal.strategies"
    facts = [f"Class `{public}.{name}`."]
    if row.aliases:
        facts.append(f"Other names: {', '.join(map(_alias_text, row.aliases.items()))}.")
    if row.paper:
        facts.append(f"Papers: {row.paper}.")
    needs = ["parameter servers (`--num-servers`)"] * row.needs_servers
    needs += ["equally many workers on every machine"] * row.needs_machines
    needs += [row.needs_package] * bool(row.needs_package)
    facts += [f"Needs {' and '.join(needs)}."] * bool(needs)
    facts.append(_after_a_loss(row))
    table = [_options_table(own)] if own else []
    return "\n".join([f"## `{row.name}`", row.summary, " ".join(facts), "", *table])


def _alias_text(alias: tuple[str, Mapping[str, object]]) -> str:
    name, implied = alias
    given = ", ".join(f"`{option}={value}`" for option, value in implied.items())
    return f"`{name}`" + (f" ({given})" if given else "")


def _options_table(described: list[OptionInfo]) -> str:
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in described:
        kind = option.kind.replace("|", ", ")
        default = "–" if option.default is None else f"`{str(option.default).lower()}`"
        lines.append(f"| `{option.name}` | {kind} | {default} | {option.description} |")
    return "\n".join([*lines, ""])


FILES = {"src/shoal/strategies/__init__.pyi": stub_source, "docs/options.md": options_page}
"""The files, and what each should hold."""

if __name__ == "__main__":
    for path, text in FILES.items():
        (ROOT / path).write_text(text())
