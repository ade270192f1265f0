"""The room's public names are exactly those that it lists."""

import types

import shoal.tensors


def test_all_is_exact():
    public = {
        name
        for name, value in vars(shoal.tensors).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == set(shoal.tensors.__all__)
