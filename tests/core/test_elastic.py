"""A run's coordinator: workers that come, go, fail and are lost at any time end in one generation."""

from __future__ import annotations

import random
from collections import deque

import pytest

from shoal.core.elastic import (
    ANSWERING_S,
    SUSPECT_S,
    Coordinator,
    Form,
    Formed,
    FormingFailed,
    Gather,
    Gathered,
    Leave,
    MeetAt,
    Prepare,
    Progress,
    Reached,
    Waiting,
)

HORIZON = 3
"""How many steps a worker of these tests may do after it has said where it stops."""


class Worker:
    """A worker in lockstep with the others of its generation, moved one action at a time."""

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        self.inbox: deque[object] = deque()
        self.form: Form | None = None
        self.is_in_group = False
        self.is_waiting = False
        self.has_state = False
        self.step = 0
        self.limit: int | None = None
        self.due: int | None = None
        self.reason = ""
        self.left_in_order: list[Form] = []
        self.failed: list[Form] = []

    def wait(self, lost: tuple[int, ...] = ()) -> None:
        if self.form is not None:
            (self.failed if lost else self.left_in_order).append(self.form)
        self.is_waiting, self.is_in_group, self.form = True, False, None
        self.limit = self.due = None
        self.run.up(self.number, Waiting(not self.has_state, lost))

    def read(self) -> None:
        message = self.inbox.popleft()
        generation = self.form.generation if self.form else 0
        match message:
            case Prepare():
                if message.generation == generation:
                    self.limit = self.step + HORIZON
                    self.run.up(self.number, Reached(generation, self.limit))
            case MeetAt():
                if message.generation == generation:
                    assert message.step >= self.step, "somebody has passed the step"
                    self.due = message.step
            case Form():
                assert self.is_waiting
                self.is_waiting, self.form = False, message
                self.run.up(self.number, Gather(message.generation, "address", b"%d" % self.number))
            case Gathered():
                if message.generation == generation:
                    assert [int(value) for value in message.values] == [
                        place.number for place in self.form.places
                    ]
                    self.is_in_group, self.has_state = True, True
                    known = [
                        other.step
                        for other in self.run.alive()
                        if other.form == self.form and other is not self and other.has_state
                    ]
                    self.step = max([self.step, *known])
                    self.run.up(self.number, Formed(generation))
            case FormingFailed():
                if message.generation == generation and not self.is_in_group:
                    self.wait((message.number,))
            case Leave():
                self.reason = message.reason
                self.run.ended(self.number, has_left=True)

    def act(self) -> None:
        """Does one step, if the others of its group let it."""
        if not self.is_in_group:
            return
        assert self.form is not None
        members = [place.number for place in self.form.places]
        gone = [number for number in members if self.run.is_gone(number, self.form)]
        if gone:
            self.wait(tuple(gone))
        elif self.due is not None and self.step >= self.due:
            self.wait()
        elif self.limit is not None and self.due is None and self.step >= self.limit:
            return  # has promised to stop here until it hears where all stop
        elif all(self.run.has_come(number, self.step, self.form) for number in members):
            self.step += 1


class Run:
    def __init__(self, num_workers: int, seed: int, min_workers: int = 1, num_servers: int = 0) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.workers: dict[int, Worker] = {}
        self.gone: dict[int, bool] = {}
        self.stopped: dict[int, float] = {}
        """By number: since when."""
        self.left: list[int] = []
        self.queue: deque[tuple[int, object]] = deque()
        self.expelled: list[int] = []
        self.coordinator = Coordinator(send=self._down, expel=self._expel, min_workers=min_workers)
        self.next = 0
        for number in range(num_servers + num_workers):
            self.start(is_server=number < num_servers)

    def start(self, *, is_server: bool = False) -> int:
        number, self.next = self.next, self.next + 1
        self.coordinator.add(number, 0 if is_server else number % 2, is_server=is_server)
        self.workers[number] = Worker(self, number)
        return number

    def alive(self) -> list[Worker]:
        return [worker for number, worker in self.workers.items() if number not in self.gone]

    def up(self, number: int, message: object) -> None:
        self.queue.append((number, message))

    def _down(self, number: int, message: object) -> None:
        if number not in self.gone:
            self.workers[number].inbox.append(message)

    def _expel(self, number: int, reason: str) -> None:
        self.expelled.append(number)
        self.gone[number] = True
        self.stopped.pop(number, None)

    def kill(self, number: int) -> None:
        self.ended(number, has_left=False)

    def ended(self, number: int, *, has_left: bool) -> None:
        self.gone[number] = not has_left
        self.stopped.pop(number, None)
        if has_left:
            self.left.append(number)
        self.coordinator.end(number, has_left=has_left)

    def is_gone(self, number: int, form: Form) -> bool:
        """Whether it is not in that group any more: killed, stopped for too long, or failed."""
        if number in self.gone:
            return self.gone[number]
        return number in self.stopped or form in self.workers[number].failed

    def has_come(self, number: int, step: int, form: Form) -> bool:
        other = self.workers[number]
        if number in self.left or number in self.stopped:
            return number in self.left
        return form in other.left_in_order or (other.is_in_group and other.step >= step)

    def turn(self) -> None:
        """Lets something happen: a message arrives, or a worker does something."""
        self.now_s += 0.01
        choices: list[object] = [worker for worker in self.alive() if worker.number not in self.stopped]
        if self.queue:
            choices.append(self.queue)
        chosen = self.random.choice(choices) if choices else None
        if chosen is self.queue:
            number, message = self.queue.popleft()
            self.coordinator.take(number, message)
        elif isinstance(chosen, Worker):
            if not chosen.is_waiting and chosen.form is None and not chosen.reason:
                chosen.wait()
            elif chosen.inbox and self.random.random() < 0.7:
                chosen.read()
            else:
                chosen.act()
        for number, since_s in list(self.stopped.items()):
            if self.now_s - since_s > SUSPECT_S + 1:
                self.coordinator.give_up(number, "it is stopped")
        self.coordinator.advance(self.now_s)

    def settle(self, num_turns: int = 4000) -> None:
        for _ in range(num_turns):
            self.turn()

    def check_one_generation(self) -> None:
        alive = [worker for worker in self.alive() if worker.number not in self.stopped]
        assert alive
        assert all(worker.is_in_group for worker in alive), [
            (worker.number, worker.is_waiting, worker.form) for worker in alive
        ]
        assert len({worker.form.generation for worker in alive}) == 1
        numbers = sorted(worker.number for worker in alive)
        assert sorted(place.number for place in alive[0].form.places) == numbers
        steps = [worker.step for worker in alive]
        assert max(steps) - min(steps) <= 1


def test_the_first_generation_is_that_of_all_who_were_started():
    run = Run(3, seed=0)
    run.settle(500)
    run.check_one_generation()
    assert run.coordinator.generation == 1
    assert run.coordinator.members == (0, 2, 1), "those of one machine stand side by side"


def test_a_worker_that_comes_is_taken_in_after_the_same_step_of_all():
    run = Run(2, seed=1)
    run.settle(500)
    before = max(worker.step for worker in run.alive())
    run.start()
    run.settle(1000)
    run.check_one_generation()
    assert run.coordinator.generation == 2
    assert run.workers[2].step >= before, "it goes on where the others are"


def test_a_lost_worker_is_left_out_and_the_others_go_on():
    run = Run(3, seed=2)
    run.settle(500)
    run.kill(1)
    run.settle(1000)
    run.check_one_generation()
    assert sorted(run.coordinator.members) == [0, 2]


def test_workers_that_are_to_leave_are_told_so_between_two_steps():
    run = Run(4, seed=3)
    run.settle(500)
    run.coordinator.retire([1, 3])
    run.settle(1500)
    run.check_one_generation()
    assert sorted(run.left) == [1, 3]
    assert "smaller" in run.workers[1].reason
    assert run.workers[1].step == run.workers[3].step


def test_a_worker_that_is_to_leave_before_it_has_trained_stops_nobody():
    run = Run(2, seed=3)
    run.settle(500)
    newer = run.start()
    run.coordinator.retire([newer])
    run.settle(500)
    assert run.left == [newer]
    assert run.coordinator.generation == 1
    run.check_one_generation()


def test_servers_have_the_first_ranks_of_each_generation():
    run = Run(3, seed=1, num_servers=2)
    run.settle(800)
    assert run.coordinator.members == (0, 1, 2, 4, 3), "servers, then those of their machine, then the other"
    run.kill(2)
    newer = run.start()
    run.settle(2000)
    run.check_one_generation()
    assert run.coordinator.members[:2] == (0, 1)
    assert sorted(run.coordinator.members) == [0, 1, 3, 4, newer]


def test_servers_are_no_workers():
    run = Run(2, seed=2, num_servers=2, min_workers=2)
    run.settle(800)
    run.coordinator.retire([2])
    run.settle(1500)
    assert run.coordinator.num_short == 1
    run.kill(3)
    assert not run.coordinator.has_state, "servers alone do not know how far the data is"


def test_servers_end_when_the_workers_have_finished():
    run = Run(2, seed=2, num_servers=1)
    run.settle(800)
    for number in (1, 2):
        run.ended(number, has_left=True)
    run.workers[0].wait()
    run.settle(200)
    assert run.workers[0].reason == "the other workers have finished"


def test_what_workers_gather_needs_no_server():
    run = Run(2, seed=2, num_servers=1)
    run.settle(800)
    sent: list[tuple[int, object]] = []
    coordinator = Coordinator(send=lambda number, message: sent.append((number, message)), expel=run._expel)
    for number in range(3):
        coordinator.add(number, 0, is_server=number == 0)
        coordinator.take(number, Waiting(True))
    coordinator.advance(0.0)
    sent.clear()
    for number in (1, 2):
        coordinator.take(number, Gather(1, "address", b"%d" % number, is_of_workers=True))
    assert sent == [(number, Gathered(1, "address", (b"1", b"2"))) for number in (1, 2)]


def test_the_others_learn_what_a_lost_worker_has_said_last():
    run = Run(3, seed=2)
    run.settle(500)
    run.coordinator.take(1, Progress(b"earlier"))
    run.coordinator.take(1, Progress(b"later"))
    run.kill(1)
    run.settle(1000)
    form = run.workers[0].form
    assert form is not None
    assert form.lost == ((1, b"later"),)
    run.start()
    run.settle(1000)
    form = run.workers[0].form
    assert form is not None
    assert form.lost == ()


def test_the_last_one_that_has_the_state_leaves_only_when_another_has_it():
    run = Run(1, seed=8)
    run.settle(200)
    run.coordinator.retire([0])
    newer = run.start()
    run.settle(2000)
    run.check_one_generation()
    assert run.left == [0]
    assert run.workers[newer].step >= run.workers[0].step > 0


def test_a_worker_that_comes_when_all_have_finished_is_sent_home():
    run = Run(2, seed=4)
    run.settle(500)
    late = run.start()
    for number in (0, 1):
        run.ended(number, has_left=True)
    run.settle(500)
    assert run.workers[late].reason == "the other workers have finished"


def test_a_stopped_worker_is_given_up_once_others_have_lost_it():
    run = Run(3, seed=5)
    run.settle(500)
    run.stopped[2] = run.now_s
    run.settle(int(SUSPECT_S / 0.01) + 1500)
    assert run.expelled == [2]
    run.check_one_generation()


def test_fewer_than_the_smallest_number_wait_for_more():
    run = Run(2, seed=6, min_workers=2)
    run.settle(500)
    run.kill(0)
    run.settle(500)
    assert run.coordinator.num_short == 1
    assert run.workers[1].is_waiting
    run.start()
    run.settle(500)
    assert run.coordinator.num_short == 0
    run.check_one_generation()


def test_a_state_that_nobody_has_any_more_is_noticed():
    run = Run(2, seed=7)
    run.settle(500)
    assert run.coordinator.has_state
    run.kill(0)
    run.start()
    run.kill(1)
    assert not run.coordinator.has_state


def test_of_two_that_cannot_connect_the_newer_one_is_given_up_in_the_end():
    sent: list[tuple[int, object]] = []
    expelled: list[int] = []
    coordinator = Coordinator(
        send=lambda number, message: sent.append((number, message)),
        expel=lambda number, reason: expelled.append(number),
    )
    for number in range(2):
        coordinator.add(number, number)
        coordinator.take(number, Waiting(is_fresh=True))
    coordinator.advance(0.0)
    for _ in range(3):
        if expelled:
            break
        coordinator.take(0, Waiting(is_fresh=True, lost=(1,)))
        coordinator.take(1, Waiting(is_fresh=True, lost=(0,)))
        coordinator.advance(0.0)
    assert expelled == [1]
    assert coordinator.members == (0,)


def coordinator_of(num_workers, expelled, sent=None, min_workers=1, machines=None):
    """A coordinator whose first generation is told to form."""
    coordinator = Coordinator(
        send=lambda number, message: None if sent is None else sent.append((number, message)),
        expel=lambda number, reason: expelled.append(number),
        min_workers=min_workers,
    )
    for number in range(num_workers):
        coordinator.add(number, 0 if machines is None else machines[number])
        coordinator.take(number, Waiting(is_fresh=True))
    coordinator.advance(0.0)
    return coordinator


def all_form(coordinator):
    for number in coordinator.members:
        coordinator.take(number, Formed(coordinator.generation))


def test_nobody_is_given_up_for_losses_that_follow_from_another():
    """Twice one dies, another one closes because of that, and the rest loses both."""
    expelled: list[int] = []
    coordinator = coordinator_of(4, expelled)
    for dead in (3, 2):
        all_form(coordinator)
        coordinator.end(dead, has_left=False)
        first, *others = range(dead)
        for number in others:
            coordinator.take(number, Waiting(is_fresh=False, lost=(dead, first)))
        coordinator.take(first, Waiting(is_fresh=False, lost=(dead,)))
        coordinator.advance(0.1)
        assert coordinator.members == tuple(range(dead))
    assert expelled == []


def test_who_waits_for_more_workers_gives_nobody_up():
    expelled: list[int] = []
    coordinator = coordinator_of(3, expelled, min_workers=3)
    all_form(coordinator)
    coordinator.end(2, has_left=False)
    coordinator.take(0, Waiting(is_fresh=False, lost=(2, 1)))
    coordinator.take(1, Waiting(is_fresh=False, lost=(2,)))
    for tick in range(100):
        coordinator.advance(0.1 * tick)
    assert expelled == []
    assert coordinator.num_short == 1


def test_who_was_told_that_one_is_gone_has_not_failed_to_reach_it():
    """0 cannot reach 1 twice; 2 and 3 only hear from 0 that the group has failed."""
    expelled: list[int] = []
    coordinator = coordinator_of(4, expelled)
    for _ in range(2):
        coordinator.take(0, Waiting(is_fresh=True, lost=(1,)))
        for number in (1, 2, 3):
            coordinator.take(number, Waiting(is_fresh=True, lost=(0,)))
        coordinator.advance(0.0)
    assert expelled == [1]
    assert coordinator.members == (0, 2, 3)


def test_a_loss_while_the_next_group_forms_is_told_also_if_another_one_has_formed_already():
    sent: list[tuple[int, object]] = []
    coordinator = coordinator_of(3, [], sent)
    coordinator.take(2, Progress(b"far"))
    coordinator.take(0, Formed(1))
    coordinator.end(2, has_left=False)
    coordinator.take(1, Formed(1))  # on its way when the other one was lost
    for number in (0, 1):
        coordinator.take(number, Waiting(is_fresh=False, lost=(2,)))
    coordinator.advance(0.1)
    forms = [message for _, message in sent if isinstance(message, Form) and message.generation == 2]
    assert [form.lost for form in forms] == [((2, b"far"),)] * 2


def test_one_that_never_says_when_it_can_stop_is_given_up_in_the_end():
    """It holds the interpreter's lock, while the others have stopped for somebody who comes."""
    expelled: list[int] = []
    coordinator = coordinator_of(2, expelled)
    all_form(coordinator)
    coordinator.add(2, 0)
    coordinator.take(2, Waiting(is_fresh=True))
    coordinator.advance(1.0)
    coordinator.take(0, Reached(1, 5))
    coordinator.advance(1.1)
    coordinator.advance(ANSWERING_S)
    assert expelled == []
    coordinator.advance(ANSWERING_S + 3.0)
    assert expelled == [1]


@pytest.mark.parametrize(("machines", "expected"), [("0011", [2, 3]), ("011", [0]), ("00112", [2, 3, 4])])
def test_of_machines_that_do_not_reach_each_other_the_larger_and_older_goes_on(machines, expected):
    expelled: list[int] = []
    coordinator = Coordinator(
        send=lambda number, message: None, expel=lambda number, reason: expelled.append(number)
    )
    for number, machine in enumerate(machines):
        coordinator.add(number, int(machine))
        coordinator.take(number, Waiting(is_fresh=True))
    coordinator.advance(0.0)
    for _ in range(2):
        for number, machine in enumerate(machines):
            others = [other for other, its in enumerate(machines) if its != machine]
            coordinator.take(number, Waiting(is_fresh=False, lost=tuple(others)))
        coordinator.advance(0.0)
    assert sorted(expelled) == expected


def test_one_that_others_have_lost_and_that_still_answers_is_given_time():
    expelled: list[int] = []
    coordinator = Coordinator(
        send=lambda number, message: None, expel=lambda number, reason: expelled.append(number)
    )
    for number in range(3):
        coordinator.add(number, number)
        coordinator.take(number, Waiting(is_fresh=True))
    coordinator.advance(0.0)
    coordinator.take(2, Waiting(is_fresh=False, lost=(0, 1)))
    coordinator.advance(0.0)
    coordinator.take(0, Reached(1, 7))
    coordinator.advance(0.1)
    coordinator.advance(SUSPECT_S + 1.0)
    assert expelled == [1]
    coordinator.take(0, Waiting(is_fresh=False, lost=(2,)))
    coordinator.advance(SUSPECT_S + 4.0)
    assert coordinator.generation == 2
    assert expelled == [1]


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_all_who_are_there_end_in_one_generation(seed):
    """Kills, stops, arrivals and departures at random moments, several of them inside of one change."""
    run = Run(4, seed=seed)
    chance = random.Random(seed + 1000)
    for _ in range(12):
        run.settle(chance.randrange(1, 250))
        what = chance.choice(["kill", "start", "retire", "stop", "two"])
        numbers = [worker.number for worker in run.alive() if worker.number not in run.stopped]
        if what == "start" or len(numbers) < 3:
            run.start()
        elif what == "retire":
            run.coordinator.retire([chance.choice(numbers)])
        elif what == "stop":
            run.stopped[chance.choice(numbers)] = run.now_s
        else:
            for number in chance.sample(numbers, 2 if what == "two" else 1):
                run.kill(number)
    run.settle(6000)
    run.check_one_generation()


def finish(run: Run, number: int) -> None:
    """Its program has come to its end: it leaves its group in order."""
    run.ended(number, has_left=True)


@pytest.mark.parametrize("has_lost", [False, True])
@pytest.mark.parametrize("comes_late", [False, True])
def test_who_comes_while_the_others_finish_is_sent_home_also_after_a_loss(has_lost, comes_late):
    run = Run(3, seed=3)
    run.settle()
    joiner = run.start()
    if not comes_late:
        run.workers[joiner].wait()
    if has_lost:
        run.kill(2)
    for number in range(2 if has_lost else 3):
        finish(run, number)
    assert run.coordinator.has_state
    assert run.coordinator.num_short == 0
    run.settle()
    assert run.workers[joiner].reason == "the other workers have finished"


def test_a_run_that_has_ended_after_a_loss_is_short_of_nobody():
    run = Run(2, seed=4)
    run.settle()
    run.kill(1)
    finish(run, 0)
    assert run.coordinator.num_short == 0


def test_workers_are_told_by_which_address_others_reach_their_machine():
    run = Run(3, seed=4)
    run.coordinator.addresses = {1: "10.0.0.2"}
    run.settle(500)
    form = run.workers[0].form
    assert form is not None
    assert {place.number: place.address for place in form.places} == {0: "", 1: "10.0.0.2", 2: ""}
