"""Writes the two files that come from the registry of strategies: run as `python tools/strategy_files.py`.

- src/shoal/strategies/keywords.py has a TypedDict for each option struct, so that editors complete and type
  checkers check `DiLoCo(group, local_steps=4)`.
- docs/options.md lists every strategy with its names, what it needs and survives, and its options.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import get_type_hints

import shoal
from shoal.strategies import BUILT_IN, OptionInfo, StrategyInfo, StrategyOptions, describe_options, options
from shoal.strategies.options import plain_type

ROOT = Path(__file__).parents[1]
HEAD = '''"""What constructors of strategies take by name, for editors and type checkers.

Written by tools/strategy_files.py from `options`, which says what each means and what it is without it.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict
'''


PAGE_HEAD = """# Options

This page lists what every strategy can be told. In code options are keyword arguments,
`shoal.DiLoCo(group, local_steps=50)`; for `shoal run` they are `--option local_steps=50`, and the most common
ones are flags. [strategies.md](strategies.md) says what the strategies compute.
`tools/strategy_files.py` writes the page from `shoal.strategies.BUILT_IN`.

All strategies have these:
"""


def keywords_source() -> str:
    """The whole file."""
    structs = [
        value
        for name, value in vars(options).items()
        if inspect.isclass(value) and issubclass(value, StrategyOptions) and name == value.__name__
    ]
    return HEAD + "".join(map(_class_source, structs))


def _class_source(struct: type[StrategyOptions]) -> str:
    is_root = struct is StrategyOptions
    base = "TypedDict" if is_root else _name(struct.__base__)
    # a TypedDict may not name a field again that it inherits, and its type is the same
    inherited = () if is_root else struct.__base__.__struct_fields__
    hints = get_type_hints(struct, include_extras=True)
    described = {option.name: option.description for option in describe_options(struct)}
    fields = [
        f'    {name}: {_type_source(hints[name])}\n    """{_sentence(described[name])}"""\n'
        for name in struct.__struct_fields__
        if name not in inherited
    ]
    head = f"\n\nclass {_name(struct)}({base}, total=False):\n"
    head += f'    """These are the keyword arguments for `{struct.__name__}`."""\n'
    return head + "".join(["\n" * bool(fields), *fields])


def _type_source(hint: object) -> str:
    text = inspect.formatannotation(plain_type(hint)[0]).replace("typing.", "")
    return re.sub(r"Optional\[(\w+)\]", r"\1 | None", text).replace("'", '"')


def _name(struct: type) -> str:
    return struct.__name__.replace("Options", "Keywords")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(("…", ".")) else ".")


def options_page() -> str:
    """The whole page."""
    parts = [PAGE_HEAD, _options_table(describe_options(StrategyOptions))]
    return "\n".join([*parts, *map(_strategy_part, BUILT_IN.values())])


def _strategy_part(row: StrategyInfo) -> str:
    common = {option.name: option for option in describe_options(StrategyOptions)}
    own = [option for option in describe_options(row.options) if option != common.get(option.name)]
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
    facts.append("The others go on without a lost worker." if row.survives_loss else "A lost worker ends it.")
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


FILES = {"src/shoal/strategies/keywords.py": keywords_source, "docs/options.md": options_page}
"""The files, and what each should hold."""

if __name__ == "__main__":
    for path, text in FILES.items():
        (ROOT / path).write_text(text())
