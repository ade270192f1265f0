"""`int8:stochastic` rounds differently on each worker, so that errors of a mean cancel, and reproducibly."""

import pytest
import torch
from torch import nn

from shoal.strategies import make_strategy
from shoal.tensors.codecs import Int8, codec_from_name
from strategies import servers
from strategies.bowls import everywhere

CODEC = "int8:tensor,stochastic"
SIZE, COUNT = 4, 20_000
WAYS = {
    "local-sgd": {"local_steps": 1, "codec": CODEC},
    "diloco": {"local_steps": 1, "codec": CODEC, "outer_lr": 1.0, "outer_momentum": 0.0},
    "choco": {"topology": "full", "gamma": 1.0, "codec": CODEC},
}


class Line(nn.Module):
    """All workers have the same gradient, which is `direction()`."""

    def __init__(self):
        super().__init__()
        self.x = nn.Parameter(torch.zeros(COUNT))

    def forward(self):
        return self.x @ direction()


def direction():
    return torch.rand(COUNT, generator=torch.Generator().manual_seed(1)) * 2 - 1


def optimize(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def one_step(strategy, model, optimizer):
    with strategy.attach(model, optimizer, stays=True):
        model().backward()
        optimizer.step()
    return model.x.detach()


def errors(x):
    """Root mean square, in steps of the codec, of how far x is from a step along the direction."""
    return ((x + direction()) / direction().abs().max() * 127).square().mean(-1).sqrt()


def run(name):
    def work(group):
        model = Line()
        return one_step(make_strategy(group, name, **WAYS[name]), model, optimize(model))

    return torch.stack(everywhere(work, SIZE))


ALONE = (1 / 6) ** 0.5
"""The error of one worker's value: the mean of f(1 − f) over f from 0 to 1 is its square."""


@pytest.mark.parametrize("name", ["local-sgd", "diloco"])
def test_errors_of_the_mean_cancel(name):
    rows = run(name)
    assert errors(rows).tolist() == pytest.approx([ALONE / SIZE**0.5] * SIZE, rel=0.03)
    assert torch.equal(run(name), rows)


def test_public_copies():
    """x_i = x + the mean of all errors − one's own, whose sum is zero."""
    rows = run("choco")
    wanted = ALONE * (1 - 1 / SIZE) ** 0.5
    assert errors(rows).tolist() == pytest.approx([wanted] * SIZE, rel=0.03)
    assert errors(rows.mean(0)).item() < 0.01
    assert torch.equal(run("choco"), rows)


def test_errors_of_the_mean_at_a_server_cancel():
    def make_model(rank=0):
        model = Line()
        return model, optimize(model)

    def work(strategy, model, optimizer, rank):
        return one_step(strategy, model, optimizer)

    twice = [servers.run(work, SIZE, make=make_model, mode="sync", compression=CODEC)[0] for _ in range(2)]
    assert errors(twice[0][0]).item() == pytest.approx(ALONE / SIZE**0.5, rel=0.03)
    torch.testing.assert_close(twice[1][0], twice[0][0], rtol=0, atol=1e-6)  # sums of another order


def test_a_codec_goes_on_drawing():
    """What one worker rounds up in one step it may round down in the next."""
    codec = codec_from_name(CODEC)
    codec.reseed(3)
    rows = torch.stack([codec.decode(codec.encode(-direction())) for _ in range(16)])
    assert errors(rows).tolist() == pytest.approx([ALONE] * 16, rel=0.05)
    assert errors(rows.mean(0)).item() == pytest.approx(ALONE / 4, rel=0.05)


def test_the_state_of_another_rank_does_not_make_two_round_alike():
    first, second, again = (codec_from_name(CODEC) for _ in range(3))
    for number, codec in enumerate((first, second, again)):
        codec.reseed(number % 2)
    first.encode(direction())
    second.load_state_dict(first.state_dict())
    again.load_state_dict(first.state_dict())
    texts = [codec.encode(direction()).buffers[0].tobytes() for codec in (first, second, again)]
    assert texts[0] == texts[2] != texts[1]


def test_a_seed_of_ones_own_is_mixed_with_the_number():
    def rounded(seed, number):
        codec = Int8(None, torch.Generator().manual_seed(seed))
        codec.reseed(number)
        return codec.encode(direction()).buffers[0].tobytes()

    texts = {rounded(seed, number) for seed in (0, 1, 2) for number in (0, 1, 2)}
    assert len(texts) == 9
    assert rounded(2, 1) in texts
