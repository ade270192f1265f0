import json
import math

import numpy as np
import pytest
import torch

from shoal.core import UsageError
from shoal.strategies.start import take_state
from shoal.strategies.states import flatten, rebuild
from strategies.fakes import Mirror


def test_a_state_comes_back_as_it_was():
    state = {
        "state": {0: {"step": torch.tensor(3.0), "betas": (0.9, 0.99)}, 7: {}},
        "list": [1, None, True, "text", torch.ones(2, 2, dtype=torch.bfloat16)],
        "odd": [math.inf, -math.inf, {"$tensor": "a"}, {}],
        "state.0": {"step": torch.tensor(4)},
        "number": np.float64(0.5),
    }
    plain, tensors = flatten(state)
    again = rebuild(json.loads(json.dumps(plain, allow_nan=False)), tensors)
    assert again["state"][0]["step"] == 3.0
    assert again["state.0"]["step"] == 4
    assert again["state"][0]["betas"] == (0.9, 0.99)
    assert again["state"][7] == {}
    assert again["list"][:4] == state["list"][:4]
    assert again["odd"] == state["odd"]
    assert type(again["number"]) is float
    assert math.isnan(rebuild(flatten({"x": math.nan})[0], {})["x"])


def test_what_has_no_place_is_named():
    with pytest.raises(UsageError, match=r"state\.0\.what is of type object"):
        flatten({"state": {0: {"what": object()}}})
    with pytest.raises(UsageError, match="of type object"):
        take_state(Mirror(), lambda: {"x": object()})
