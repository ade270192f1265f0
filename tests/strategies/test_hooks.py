"""Hooks that stay with their model."""

import copy
import pickle

from shoal.strategies.hooks import Hook


def test_a_copy_does_nothing():
    calls = []
    hook = Hook(lambda *args: calls.append(args))
    for copied in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
        assert copied(1, 2) is None
        assert not calls
    hook(1, 2)
    assert calls == [(1, 2)]
