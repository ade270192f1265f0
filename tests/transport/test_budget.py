import random
import threading

from shoal.transport.limits import ByteBudget


def test_takes_and_gives_back():
    budget = ByteBudget(10)
    assert budget.try_take(10)
    assert not budget.try_take(1)
    budget.give_back(4)
    assert budget.used_bytes == 6
    assert budget.try_take(4)


def test_first_come_first_served():
    budget = ByteBudget(10)
    budget.try_take(10)
    granted = []
    for name, size in (("large", 8), ("small", 1), ("other", 5)):
        budget.join_queue(name, size, lambda name=name: granted.append(name))
    budget.give_back(5)
    assert granted == []  # the large one is first, though the small ones would fit
    assert not budget.try_take(1)
    budget.give_back(5)
    assert granted == ["large", "small"]
    assert budget.used_bytes == 9
    budget.give_back(8)
    assert granted == ["large", "small", "other"]


def test_whoever_leaves_the_line_lets_others_pass():
    budget = ByteBudget(10)
    budget.try_take(5)
    granted = []
    budget.join_queue("large", 8, lambda: granted.append("large"))
    budget.join_queue("small", 5, lambda: granted.append("small"))
    assert budget.leave_queue("large")
    assert granted == ["small"]
    assert not budget.leave_queue("small")  # it holds its bytes now
    assert not budget.leave_queue("nobody")
    budget.give_back(5)
    budget.give_back(5)
    assert budget.used_bytes == 0


def test_whoever_could_be_served_at_once_is():
    budget = ByteBudget(10)
    granted = []
    budget.join_queue("a", 10, lambda: granted.append("a"))
    assert granted == ["a"]


def test_what_has_arrived_passes_the_line_into_the_spare_bytes():
    budget = ByteBudget(16, spare_bytes=2)
    budget.try_take(16)
    budget.join_queue("large", 16, lambda: None)
    assert not budget.try_take(1)
    assert budget.try_take(2, may_pass=True)
    assert not budget.try_take(1, may_pass=True)


def test_a_grant_may_give_back_at_once():
    budget = ByteBudget(1)
    budget.try_take(1)
    granted = []

    def pass_on(name):
        granted.append(name)
        budget.give_back(1)

    for name in range(100):
        budget.join_queue(name, 1, lambda name=name: pass_on(name))
    budget.give_back(1)
    assert granted == list(range(100))
    assert budget.used_bytes == 0


def test_several_threads():
    budget = ByteBudget(100)
    most = [0]

    def work(seed):
        rng = random.Random(seed)
        for number in range(500):
            size = rng.randint(1, 60)
            if not budget.try_take(size):
                granted = threading.Event()
                budget.join_queue((seed, number), size, granted.set)
                assert granted.wait(10)
            most[0] = max(most[0], budget.used_bytes)
            budget.give_back(size)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert budget.used_bytes == 0
    assert most[0] <= 100
