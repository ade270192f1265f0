"""Every strategy as it is trained on two machines of two workers each, and what crosses between them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Case:
    """A strategy with options, and how much of it crosses."""

    strategy: str
    crossing: float
    """Copies of the model that go from machine to machine in one step of all four workers, both ways."""
    options: dict = field(default_factory=dict)
    num_servers: int = 0
    lr: float = 0.05
    epochs: int = 6
    is_exact: bool = True
    """Otherwise chance decides, or who is early, and `crossing` is about the most."""
    is_counted: bool = True
    """By the group; what torch sends by itself is not."""

    @property
    def own_words(self):
        """For the program."""
        return ["--lr", self.lr, "--epochs", self.epochs]

    @property
    def option_words(self):
        return [word for name, value in self.options.items() for word in ("--option", f"{name}={value}")]


CASES = {
    "all-reduce": Case("all-reduce", 2),
    "ddp": Case("ddp", 0, is_counted=False),
    "neighbor": Case("neighbor", 6),  # each to the next and the one after: 2 and 4 of these are elsewhere
    "hierarchical": Case("hierarchical", 2),
    "pair": Case("pair", 4 * 2 / 3, is_exact=False),  # of three others two are elsewhere
    # means: each machine sends a half, and the sum of the other half
    "sma": Case("sma", 2),
    "local-sgd": Case("local-sgd", 2 / 4, {"local_steps": 4}),
    "diloco": Case("diloco", 2 / 12, {"local_steps": 12}),
    "push-sum": Case("push-sum", 3, is_exact=False),  # to the next in one round, the one after in another
    # on a loaded machine a worker mixes with what others have put long ago, and learns more slowly
    "window": Case("window", 3, epochs=12),
    # four steps of the servers for one of all workers; two of these, or three, push and pull from elsewhere
    "parameter-server": Case("parameter-server", 4, num_servers=1, lr=0.0125),
    "parameter-server, 2": Case("parameter-server", 6, num_servers=2, lr=0.0125),
}
