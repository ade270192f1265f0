"""Workers without processes, for scenarios that are told what workers answer."""


class FakeWorkers:
    """Notes what it is asked for; how workers answer, and which orders of `failing` break them, is left."""

    failing = ()

    def __init__(self, settings):
        self.is_running = False
        self.orders = []
        self.helpers = []
        type(self).latest = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def start_helper(self, helper):
        self.helpers.append(helper)
