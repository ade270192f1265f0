"""Writes src/shoal/strategies/keywords.py from the option structs: run as `python tools/option_keywords.py`.

A TypedDict for each struct, so that editors complete and type checkers check `DiLoCo(group, local_steps=4)`.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_type_hints

from shoal.strategies import options
from shoal.strategies.options import StrategyOptions, describe_options, plain_type

PATH = Path(__file__).parents[1] / "src" / "shoal" / "strategies" / "keywords.py"
HEAD = '''"""What constructors of strategies take by name, for editors and type checkers.

Written by tools/option_keywords.py from `options`, which says what each means and what it is without it.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict
'''


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


if __name__ == "__main__":
    PATH.write_text(keywords_source())
