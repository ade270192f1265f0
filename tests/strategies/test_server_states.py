import contextlib
import threading

import pytest
import torch

from group.hosts import open_hosts
from shoal.core import CheckpointError
from shoal.group.functions import PIECE_BYTES, receive_state, send_state

STATES = [
    {},
    {
        0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(PIECE_BYTES // 4 + 5), "none": torch.empty(0)},
        1: {"half": torch.randn(7).bfloat16(), "is_on": True, "flags": torch.tensor([True, False])},
        2: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), PIECE_BYTES],
    },
    [torch.arange(PIECE_BYTES, dtype=torch.uint8)],
    [torch.empty(0, dtype=torch.int32)],
]


def sent(state):
    with open_hosts(2) as groups:

        def serve():
            window = groups[0].window("states", PIECE_BYTES, torch.uint8, sources=[0])
            send_state(window, 1, state)

        thread = threading.Thread(target=serve)
        thread.start()
        window = groups[1].window("states", PIECE_BYTES, torch.uint8, sources=[0])

        @contextlib.contextmanager
        def next_slot():
            while 0 not in window.wait():
                pass
            with window.slot(0) as slot:
                yield slot
                slot.clear()

        got = receive_state(next_slot)
        thread.join(20)
        assert not window.filled()
        return got


@pytest.mark.parametrize("state", STATES, ids=["nothing", "several pieces", "one whole piece", "no elements"])
def test_a_state_arrives_as_it_was(state):
    got = sent(state)
    torch.testing.assert_close(got, state, rtol=0, atol=0)
    if len(state) == 3:
        assert got[2][0].is_contiguous(memory_format=torch.channels_last)


def test_what_cannot_travel_is_told():
    with pytest.raises(CheckpointError, match="type object"):
        sent({0: object()})
