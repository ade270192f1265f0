"""Two replicas meet at their mean, whatever one of them learned meanwhile, and nothing broken gets in."""

import pytest
import torch

from shoal.core import TensorError
from shoal.experts.server.replicas import Piece, meet, move, plan, take
from shoal.tensors import TensorSpec


def tensors(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "wide": (3, 40),
        "long": (50, 2),
        "scalar": (),
        "none": (0, 4),
        "bias": (7,),
        "image": (2, 3, 4, 4),
    }
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    made["image"] = made["image"].contiguous(memory_format=torch.channels_last)
    made["turned"] = torch.randn(6, 5, generator=generator).to(dtype).t()
    return made


def copies(some):
    return {name: tensor.clone() for name, tensor in some.items()}


def exchange(mine, theirs, max_bytes, between=lambda: None):
    for part in plan(mine, max_bytes):
        sent = take(mine, part)
        means = meet(theirs, part, sent)
        between()
        move(mine, part, sent, means)


@pytest.mark.parametrize("max_bytes", [1, 100, 1 << 20])
def test_a_plan_has_everything_once(max_bytes):
    some = tensors(0)
    parts = plan(some, max_bytes)
    filled = {name: torch.full_like(tensor, torch.nan) for name, tensor in some.items()}
    for part in parts:
        for piece, rows in zip(part, take(some, part), strict=True):
            whole = piece.spec.shape == tuple(filled[piece.name].shape)
            (filled[piece.name] if whole else filled[piece.name].narrow(0, piece.start, len(rows))).copy_(
                rows
            )
    assert all(torch.equal(filled[name], some[name]) for name in some)
    pieces = [piece for part in parts for piece in part]
    num_elements = sum(torch.Size(piece.spec.shape).numel() for piece in pieces)
    assert num_elements == sum(tensor.numel() for tensor in some.values())
    for part in parts:
        assert len(part) == 1 or sum(4 * torch.Size(piece.spec.shape).numel() for piece in part) <= max_bytes
    assert plan({}, max_bytes) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_bytes", [100, 1 << 20])
def test_replicas_that_rest_become_their_mean_to_the_bit(dtype, max_bytes):
    mine, theirs = tensors(0, dtype), tensors(1, dtype)
    means = {name: (mine[name].double() + theirs[name].double()) / 2 for name in mine}
    exchange(mine, theirs, max_bytes)
    for name, mean in means.items():
        assert torch.equal(mine[name], theirs[name])
        torch.testing.assert_close(mine[name], mean.to(dtype))


def test_what_was_learned_meanwhile_is_kept_and_so_is_the_mean():
    mine, theirs = tensors(0), tensors(1)
    before = {name: mine[name] + theirs[name] for name in mine}
    learned = {name: tensor / 10 for name, tensor in tensors(2).items()}

    def train():
        for name, tensor in mine.items():
            tensor.add_(learned[name])

    exchange(mine, theirs, 1 << 20, between=train)
    for name in mine:
        torch.testing.assert_close(mine[name] + theirs[name], before[name] + learned[name])
        torch.testing.assert_close(mine[name] - theirs[name], learned[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_changes_nothing(value):
    mine, theirs = tensors(0), tensors(1)
    (part,) = plan(mine)
    sent = take(mine, part)
    before = copies(theirs)
    sent[-1][0, 0] = value
    with pytest.raises(TensorError, match="'turned' is not finite"):
        meet(theirs, part, sent)
    assert all(torch.equal(theirs[name], before[name]) for name in theirs)
    before = copies(mine)
    with pytest.raises(TensorError, match="'turned' is not finite"):
        move(mine, part, take(mine, part), sent)
    assert all(torch.equal(mine[name], before[name]) for name in mine)


def test_masks_of_infinities_that_both_have_stay():
    mask = torch.full((3, 3), -torch.inf).triu(1)
    mine, theirs = {"mask": mask.clone()}, {"mask": mask.clone()}
    exchange(mine, theirs, 1 << 20)
    assert torch.equal(mine["mask"], mask)
    assert torch.equal(theirs["mask"], mask)


@pytest.mark.parametrize(
    ("name", "start", "given"),
    [
        ("other", 0, torch.zeros(3)),
        ("x", 0, torch.zeros(3, 3)),
        ("x", 0, torch.zeros(4, 2, dtype=torch.float64)),
        ("x", 0, torch.zeros(5, 2)),
        ("x", 1, torch.zeros(4, 2)),
        ("x", -1, torch.zeros(1, 2)),
        ("x", 2**62, torch.zeros(2, 2)),
        ("x", 4, torch.zeros(0, 2)),
        ("x", 0, torch.zeros(())),
        ("scalar", 0, torch.zeros(1)),
    ],
)
def test_pieces_that_do_not_fit_are_refused(name, start, given):
    own = {"x": torch.ones(4, 2), "scalar": torch.ones(())}
    part = (Piece(name, start, TensorSpec("float32", tuple(given.shape))),)
    with pytest.raises(TensorError):
        meet(own, part, [given])
    assert torch.equal(own["x"], torch.ones(4, 2))
