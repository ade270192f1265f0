"""Client processes that the tests of a fleet give orders to; they know neither torch nor a server."""

import os
import signal
import time
from types import SimpleNamespace

from shoal.bench.workers import serve


def attend(arguments, parent):
    numbers = arguments["numbers"]
    batch_size, num_batches = (arguments["config"][name] for name in ("batch_size", "num_batches_per_client"))

    def experts():
        if arguments["uids"] == ["deadly"] and 0 in numbers:
            os.kill(os.getpid(), signal.SIGKILL)
        if arguments["uids"] == ["silent"] and 0 in numbers:
            time.sleep(60)
        return {
            "num_samples": len(numbers) * num_batches * batch_size,
            "forward_us": [1000 + number for number in numbers],
            "failures": {"PeerBusy": 1},
            "first_failure": "PeerBusy: later",
            "ended_s": time.monotonic(),
        }

    serve(parent, SimpleNamespace(connect=lambda: None, experts=experts))
