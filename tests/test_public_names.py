"""What users can import, call and read is what `public_names.json` lists; see `recorded` for changing it."""

import ast
import inspect
import re
import textwrap
import types
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

import shoal
import shoal.dht
import shoal.group
import shoal.strategies
from recorded import check_recorded

RECORDED = Path(__file__).parent / "public_names.json"
PROTOCOLS = (
    "__aenter__", "__aexit__", "__await__", "__call__", "__contains__", "__enter__", "__exit__",
    "__getitem__", "__iter__", "__len__", "__next__",
)  # fmt: skip
"""What the language calls for a user."""
ATTRIBUTE = "attribute"
PUBLIC_CLASSES = [
    value
    for module in (shoal, shoal.group, shoal.strategies)
    for value in (getattr(module, name) for name in module.__all__)
    if inspect.isclass(value)
]


def is_public(name):
    return not name.startswith("_") or name in PROTOCOLS


def default_text(value):
    """Without the module that it comes from, and without its place in memory."""
    if isinstance(value, type | types.FunctionType):
        return value.__qualname__
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text else without_modules(text)


def without_modules(text):
    return re.sub(r"\bshoal(\.\w+)*\.", "", text)


def annotation_text(annotation):
    return without_modules(
        annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    )


def signature_text(function, annotations=None):
    """Annotations as they stand in the source; `annotations` has those of a class's fields."""
    signature = inspect.signature(function)
    texts, has_star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            texts.append("*")
        has_star = has_star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text = star + parameter.name
        if parameter.annotation is not parameter.empty:
            known = (annotations or {}).get(parameter.name)
            text += f": {annotation_text(known if isinstance(known, str) else parameter.annotation)}"
        if parameter.default is not parameter.empty:
            text += f" = {default_text(parameter.default)}"
        texts.append(text)
    result = signature.return_annotation
    arrow = "" if result is signature.empty else f" -> {annotation_text(result)}"
    start = "async " if inspect.iscoroutinefunction(function) else ""
    return f"{start}({', '.join(texts)}){arrow}"


def own_classes(cls):
    """The class and those of Shoal's that it inherits from, the nearest first."""
    return [each for each in cls.__mro__ if each.__module__.split(".")[0] == "shoal"]


def attributes_of(cls):
    """Public ones that `__init__` sets: they stand in no dictionary of the class."""
    if "__init__" not in cls.__dict__ or not inspect.isfunction(cls.__init__):
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls.__init__)))
    except OSError:  # a dataclass's, which has no source
        return
    for node in ast.walk(tree):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self" and is_public(node.attr):
            yield node.attr


def member_text(value, annotation=None):
    """`annotation` is for a property that reads the attribute of a part, and has no function."""
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {signature_text(value.__func__)}"
    if isinstance(value, property):
        is_function = inspect.isfunction(value.fget)
        result = inspect.signature(value.fget).return_annotation if is_function else annotation
        return f"property -> {annotation_text(result)}" + (", settable" if value.fset else "")
    if inspect.isfunction(value):
        return signature_text(value)
    return ATTRIBUTE


def inherited_annotation(cls, name):
    """What the property of that name that `cls` overrides says that it returns."""
    inherited = (vars(base).get(name) for base in cls.__mro__[1:])
    functions = (each.fget for each in inherited if isinstance(each, property))
    return next((inspect.signature(f).return_annotation for f in functions if inspect.isfunction(f)), None)


def members_of(cls):
    """Public members by name, inherited ones too; and the annotations of all fields."""
    members, annotations = {}, {}
    for each in own_classes(cls):
        for name, annotation in inspect.get_annotations(each).items():
            annotations.setdefault(name, annotation)
        for name in [*vars(each), *attributes_of(each), *inspect.get_annotations(each)]:
            if is_public(name):
                annotation = annotations.get(name) or inherited_annotation(each, name)
                members.setdefault(name, member_text(vars(each).get(name), annotation))
    for name, text in members.items():
        if text == ATTRIBUTE and name in annotations:
            members[name] = f"{ATTRIBUTE}: {annotation_text(annotations[name])}"
    return members, annotations


def describe_class(cls):
    """Its constructor, and what it has beyond the public classes that it inherits from."""
    members, annotations = members_of(cls)
    bases = [base for base in cls.__mro__[1:] if base in PUBLIC_CLASSES]
    inherited = members_of(bases[0])[0] if bases else {}
    return {
        "bases": [base.__name__ for base in bases],
        "constructor": signature_text(cls, annotations),
        "members": {name: text for name, text in members.items() if inherited.get(name) != text},
    }


def describe_options(struct):
    """Names and defaults; what they mean stands beside them."""
    defaults = struct()
    return {name: default_text(getattr(defaults, name)) for name in struct.__struct_fields__}


def describe(value):
    if inspect.isclass(value):
        is_options = issubclass(value, shoal.strategies.StrategyOptions)
        return describe_options(value) if is_options else describe_class(value)
    if isinstance(value, Mapping):
        return sorted(value)
    if inspect.ismodule(value):
        return {"module": sorted(value.__all__)}
    if inspect.isfunction(value):
        return signature_text(value)
    return annotation_text(value)


def test_public_names_and_their_signatures_are_those_recorded():
    names = {name: describe(getattr(shoal, name)) for name in shoal.__all__ if name != "__version__"}
    check_recorded(RECORDED, "shoal", names)


@pytest.mark.parametrize("room", [shoal.dht, shoal.group, shoal.strategies], ids=lambda room: room.__name__)
def test_those_of_a_room_are_those_recorded(room):
    names = {}
    for name in room.__all__:
        value = getattr(room, name)
        names[name] = f"shoal.{name}" if name in shoal.__all__ else describe(value)
    check_recorded(RECORDED, room.__name__, names)


def test_the_options_of_strategies_are_those_recorded():
    rows = shoal.strategies.BUILT_IN
    check_recorded(RECORDED, "options", {name: describe_options(row.options) for name, row in rows.items()})


def test_those_that_have_moved_to_their_rooms_are_those_recorded():
    moved = {name: home for name, home in shoal._MOVED.items() if home != "shoal.strategies"}
    names = {f"{home}.{name}": describe(getattr(import_module(home), name)) for name, home in moved.items()}
    check_recorded(RECORDED, "moved", names)
