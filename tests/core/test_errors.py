import copy
import inspect
import pickle
import re

import pytest

from shoal.core import errors
from shoal.core.errors import DeadlineExceeded, PeerError, PeerLost, ShoalError, UsageError

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, ShoalError)]


def drawn_tree():
    """The tree of the docstring, as {name: parent}."""
    parents, path = {}, ["ShoalError"]
    for line in errors.__doc__.splitlines():
        match = re.match(r"^    ((?:[│ ]   )*)[├└]── (\w+)", line)
        if match:
            depth = len(match[1]) // 4 + 1
            del path[depth:]
            parents[match[2]] = path[-1]
            path.append(match[2])
    return parents


def real_tree():
    return {
        kind.__name__: next(base.__name__ for base in kind.__bases__ if issubclass(base, ShoalError))
        for kind in CLASSES
        if kind is not ShoalError
    }


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    assert drawn_tree() == real_tree()
    assert len(real_tree()) >= 15


def test_the_builtin_kinds_are_those_that_the_docstring_names():
    named = {match[1]: match[2] for match in re.finditer(r"(\w+) +[^\n]*\(also a (\w+)\)", errors.__doc__)}
    also = {
        kind.__name__: base.__name__
        for kind in CLASSES
        for base in kind.__bases__
        if kind is not ShoalError and not issubclass(base, ShoalError)
    }
    assert named == also


@pytest.mark.parametrize("kind", CLASSES)
def test_every_message_says_what_why_and_what_next(kind):
    error = kind("It broke.", cause="a stone.", next_step="another stone.")
    assert str(error) == "It broke.\n  Likely cause: a stone.\n  Try: another stone."
    assert str(kind("It broke.")) == "It broke."
    assert kind.__doc__


@pytest.mark.parametrize("kind", CLASSES)
def test_errors_survive_copying_whole(kind):
    error = kind("It broke.", cause="a stone.", next_step="another stone.")
    for again in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(again) is kind
        assert str(again) == str(error)


def test_peer_errors_name_the_peer():
    lost = PeerLost("It left.", peer="7 (10.0.0.7)", next_step="wait.")
    assert isinstance(lost, PeerError)
    assert lost.peer == "7 (10.0.0.7)"
    assert PeerError("It left.").peer is None


def test_callers_who_know_only_the_builtin_errors_catch_ours():
    with pytest.raises(ValueError, match="wrong"):
        raise UsageError("wrong")
    with pytest.raises(TimeoutError, match="late"):
        raise DeadlineExceeded("late")
