"""At the end of training the steps since the last round are shared, by all who end after the same step."""

import logging

import pytest
import torch
from torch import nn

from shoal.group import share
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import make_strategy
from strategies.loops import LogLines
from strategies.quadratics import Point, step, targets

CASES = [
    ("local-sgd", {"local_steps": 4}),
    ("local-sgd", {"local_steps": 4, "codec": "int8"}),
    ("all-reduce", {"local_steps": 4}),
    ("diloco", {"local_steps": 4}),
    ("diloco", {"local_steps": 4, "fragments": 3}),
    ("diloco", {"local_steps": 4, "fragments": 2, "overlap_steps": 3, "mixing": 0.5}),
    ("diloco", {"local_steps": 4, "codec": "int8"}),
    ("noloco", {"local_steps": 4}),
    ("sparse-loco", {"local_steps": 4}),
]


def train(group, strategy, num_steps, *, each=None, **settings):
    """The model at its end and before, and what was said of it."""
    told = LogLines()
    logging.getLogger("shoal.strategies.session").addHandler(told)
    model = nn.ModuleDict({name: Point() for name in "abc"})
    model.forward = lambda goal: sum(model[name](goal) for name in "abc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with strategy.attach(model, optimizer, **settings):
            for goal in targets(group.size, num_steps):
                step(model, optimizer, goal[group.rank])
                if each is not None:
                    each()
            before = [point.x.tolist() for point in model.values()]
    finally:
        logging.getLogger("shoal.strategies.session").removeHandler(told)
    return {"before": before, "after": [point.x.tolist() for point in model.values()], "told": told.lines}


def stays(group, _):
    for name, options in CASES:
        strategy = make_strategy(group, name, **options)
        for num_steps in (6, 8):
            result = train(group, strategy, num_steps, stays=True)
            models = torch.tensor(share(group, result["after"]))
            assert (models - models[0]).abs().max() < 1e-6, (name, options)
            if "codec" not in options and num_steps == 6:
                mean = torch.tensor(share(group, result["before"])).mean(0)
                assert name in ("diloco", "sparse-loco") or torch.allclose(
                    torch.tensor(result["after"]), mean
                ), name
        assert not result["told"]
        again = make_strategy(group, name, **options)
        train(group, again, 4, stays=True)
        rounds = again.rounds
        train(group, again, 0, stays=True)
        assert again.rounds == rounds  # there was nothing to share


def test_those_who_stay_end_equal(workers):
    workers.run(stays, 2)
    workers.run(stays, 3)


def leaves(group, arguments):
    strategy = make_strategy(group, arguments["strategy"], **arguments["options"])
    loss = torch.ones(1)
    each = (lambda: group.all_reduce(loss).wait()) if arguments.get("has_collectives") else None
    result = train(group, strategy, arguments["steps"][group.rank], each=each)
    return {**result, "rounds": strategy.rounds}


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("local-sgd", {"local_steps": 100}), ("diloco", {}), ("all-reduce", {"local_steps": 100})],
)
def test_a_run_shorter_than_one_period_ends_with_one_model(workers, strategy, options):
    arguments = {"strategy": strategy, "options": options, "steps": [92, 92]}
    first, second = workers.run(leaves, 2, arguments)
    assert first["before"] != second["before"]
    assert torch.equal(torch.tensor(first["after"]), torch.tensor(second["after"]))
    mean = (torch.tensor(first["before"]) + torch.tensor(second["before"])) / 2
    assert torch.allclose(torch.tensor(first["after"]), mean)
    (said,) = first["told"] + second["told"]
    assert said.startswith(f"{strategy}: this training had 92 steps, and a round comes after every 100")
    assert "--local-steps" in said


@pytest.mark.parametrize("has_collectives", [False, True])
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "noloco", "sparse-loco"])
def test_who_ends_before_the_others_leaves_without_them(workers, strategy, has_collectives):
    arguments = {
        "strategy": strategy,
        "options": {"local_steps": 4},
        "steps": [5, 7, 7],
        "has_collectives": has_collectives,
    }
    early, *late = workers.run(leaves, 3, arguments)
    assert early["after"] == early["before"]
    assert any(
        f"{strategy}: rank 0 ends with a model of its own: 1 step since the last round" in line
        for line in early["told"]
    )
    assert torch.allclose(*(torch.tensor(result["after"]) for result in late), rtol=0, atol=1e-12)
    assert [result["rounds"] for result in late] == [2, 2]
    assert not late[0]["told"]


@pytest.mark.timeout(15)
@pytest.mark.parametrize("strategy", ["local-sgd", "diloco", "noloco", "sparse-loco"])
def test_who_ends_right_before_a_round_of_the_others_is_not_waited_for(workers, strategy):
    """They find it gone from the round, though it has waited to see whether they end with it."""
    arguments = {"strategy": strategy, "options": {"local_steps": 4}, "steps": [7, 8, 8]}
    early, *late = workers.run(leaves, 3, arguments)
    assert early["after"] == early["before"]
    assert [result["rounds"] for result in late] == [2 + (strategy == "noloco")] * 2


def test_the_last_of_all_says_that_its_model_is_its_own(workers):
    arguments = {"strategy": "local-sgd", "options": {"local_steps": 4}, "steps": [4, 6]}
    first, last = workers.run(leaves, 2, arguments)
    assert not first["told"]
    assert last["after"] == last["before"]
    assert ["rank 1 ends with a model of its own: 2 steps" in line for line in last["told"]] == [True]


def loses(group, _):
    strategy = make_strategy(group, "diloco", local_steps=4)
    model = Point()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with strategy.attach(model, optimizer):
        for goal in targets(group.size, 6):
            step(model, optimizer, goal[group.rank])
        if group.rank == 2:
            group.close(ConnectionAbortedError())
            strategy.session.close(is_failed=True)
    return model.x.tolist()


def test_those_who_are_there_end_equal_without_one_that_was_lost(workers):
    *others, lost = workers.run(loses, 3)
    assert others[0] == others[1] != lost


def test_workers_of_two_machines_end_equal(workers):
    arguments = {"strategy": "diloco", "options": {"local_steps": 4}, "steps": [6, 6]}
    first, second = workers.run(leaves, 2, arguments, kind="torch")
    assert torch.allclose(torch.tensor(first["after"]), torch.tensor(second["after"]), rtol=0, atol=1e-12)
    assert first["after"] != first["before"]


def test_who_ends_before_a_round_is_not_waited_for():
    """The other begins a step with a round, and shows so before it waits there."""

    def work(worker):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with make_strategy(worker.group, "local-sgd", local_steps=4).attach(model, optimizer):
            for _ in range(3 if worker.rank == 0 else 8):
                optimizer.zero_grad()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
                worker.compute(0.01)
        return worker.clock.now_s()

    assert [outcome.value < 1 for outcome in run_exact(World(num_workers=2), work)] == [True, True]
