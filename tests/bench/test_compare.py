""""""

import math

import msgspec
import pytest

from bench.sample_contests import config_of, record_of
from shoal.bench import compare as module
from shoal.bench.compare import (
    MAX_THREADS,
    SHORT_ROUNDS,
    CompareConfig,
    CompareScenario,
    Try,
    best_rate,
    check_contest,
    compared,
    compute_of,
    left_out,
    notes_of,
    read_config,
    reasons_of,
    shown_score,
    shown_target,
    stragglers_of,
    suited,
    why_no_rate,
)
from shoal.bench.frame import Noted
from shoal.core import BenchmarkError, UsageError
from shoal.report import Curve, Row
from shoal.simulate.contest import Trial, run_task
from shoal.simulate.task_facts import facts_of
from shoal.simulate.world import Compute, World
from shoal.strategies import BUILT_IN
from shoal.transport import FaultScript
from shoal.transport.network.distributions import Exponential, Normal


@pytest.fixture
def run(monkeypatch):
    """Run a contest whose processes are this one; `answer(trial)` instead of training, where given."""

    def run(config, answer=None):
        trials, told = [], []

        def run_tasks(function, tasks, *, num_processes, tell):
            assert function == "shoal.simulate.contest:run_task"
            for task in tasks:
                trial = msgspec.convert(task, Trial, str_keys=True)
                trials.append(trial)
                found = run_task(task, tell) if answer is None else answer(trial)
                yield found.plain() if hasattr(found, "plain") else found

        monkeypatch.setattr(module, "run_tasks", run_tasks)
        scenario = CompareScenario(msgspec.json.decode(msgspec.json.encode(config)), 0)
        told = list(scenario.run(lambda _: None))
        return told, trials

    return run


def rows_of(told, metric):
    rows = {}
    for each in told:
        if isinstance(each, Row) and each.metric == metric:
            rows.setdefault(each.key["strategy"], []).append(each)
    return rows


def samples_of(told, metric):
    return {name: [x for row in rows for x in row.samples] for name, rows in rows_of(told, metric).items()}


def test_each_tries_every_rate_once_and_competes_with_its_best(run):
    config = config_of("all-reduce", "pair", learning_rates=(0.05, 0.1, 0.2, 0.4))

    def answer(trial):
        is_better = trial.job.learning_rate == (0.2 if trial.job.strategy == "pair" else 0.1)
        return record_of(0.1, 0.9, 0.9) if is_better else record_of(0.1, 0.2, 0.9)

    told, trials = run(config, answer)
    assert [(trial.job.strategy, trial.job.learning_rate, trial.job.seed) for trial in trials] == [
        *(
            (name, rate, config.tuning_seed)
            for name in ("all-reduce", "pair")
            for rate in config.learning_rates
        ),
        ("all-reduce", 0.1, 5),
        ("all-reduce", 0.1, 6),
        ("pair", 0.2, 5),
        ("pair", 0.2, 6),
    ]
    chosen = rows_of(told, "chosen")
    assert {name: row.key["learning_rate"] for name, (row,) in chosen.items()} == {
        "all-reduce": 0.1,
        "pair": 0.2,
    }
    assert samples_of(told, "steps_to_target") == {"all-reduce": [10.0, 10.0], "pair": [10.0, 10.0]}
    tried = [row.key["learning_rate"] for row in rows_of(told, "tuning_accuracy")["pair"]]
    assert tried == [0.05, 0.1, 0.2, 0.4]


def test_the_grid_grows_for_all_until_the_best_of_each_is_inside(run):
    config = config_of("all-reduce", "pair", learning_rates=(0.1, 0.2))

    def answer(trial):
        best = 0.8 if trial.job.strategy == "pair" else 0.05
        is_better = trial.job.learning_rate == best
        return (
            record_of(0.1, 0.9, 0.9)
            if is_better
            else record_of(0.1, 0.2, 0.3 / abs(trial.job.learning_rate - best))
        )

    told, trials = run(config, answer)
    tried = {trial.job.strategy: [] for trial in trials}
    for trial in trials[: -2 * len(config.seeds)]:
        tried[trial.job.strategy].append(trial.job.learning_rate)
    assert sorted(tried["pair"]) == sorted(tried["all-reduce"])  # the same budget
    assert {0.025, 1.6} <= {*tried["pair"]}
    assert {name: row.key["learning_rate"] for name, (row,) in rows_of(told, "chosen").items()} == {
        "all-reduce": 0.05,
        "pair": 0.8,
    }


def test_the_grid_does_not_grow_for_ever(run):
    _, trials = run(
        config_of("pair", learning_rates=(0.1, 0.2)),
        lambda trial: record_of(0.1, trial.job.learning_rate / 100),
    )
    assert max(trial.job.learning_rate for trial in trials) == 1.6


def test_all_have_the_same_world_and_job_but_for_what_is_theirs(run):
    world = World(num_workers=2, workers_per_machine=1)
    _, trials = run(config_of("all-reduce", "parameter-server", world=world), lambda _: record_of(0.1, 0.9))
    assert [trial.world.num_servers for trial in trials] == [0, 0, 1, 1]
    assert {trial.world.workers_per_machine for trial in trials} == {1}
    common = [
        msgspec.structs.replace(trial.job, strategy="", options={}, seed=0).__repr__() for trial in trials
    ]
    assert len(set(common)) == 1


def test_a_single_rate_is_not_tuned(run):
    told, trials = run(config_of(learning_rates=(0.3,)), lambda _: record_of(0.1, 0.9))
    assert len(trials) == 4
    assert not rows_of(told, "tuning_accuracy")


def test_rows_hold_what_was_at_the_end_and_where_the_target_was_reached(run):
    told, _ = run(
        config_of("pair"),
        lambda trial: record_of(
            0.1, 0.5, 0.85, 0.9, worst=0.1, pace_s=trial.job.seed, staleness={0: 6, 2: 3}
        ),
    )
    samples = {
        metric: samples_of(told, metric)["pair"]
        for metric in (
            "seconds_to_target",
            "bytes_to_target",
            "final_accuracy",
            "run_seconds",
            "mean_staleness",
        )
    }
    assert samples == {
        "seconds_to_target": [10.0, 12.0],
        "bytes_to_target": [2000.0, 2000.0],
        "final_accuracy": [0.9, 0.9],
        "run_seconds": [15.0, 18.0],
        "mean_staleness": [pytest.approx(2 / 3)] * 2,
    }
    assert samples_of(told, "worst_final_accuracy")["pair"] == pytest.approx([0.8, 0.8])
    behind = [(row.key["behind"], row.samples) for row in rows_of(told, "staleness")["pair"]]
    assert behind == [(0, [6.0]), (2, [3.0])] * 2
    curves = [each for each in told if isinstance(each, Curve) and each.metric == "accuracy"]
    assert [curve.starts[0]["s"] for curve in curves] == [[0.0, 5.0, 10.0, 15.0], [0.0, 6.0, 12.0, 18.0]]
    assert not rows_of(told, "not_reached")


def test_who_waited_for_whom_is_told_of_pairs_that_did(run):
    told, _ = run(
        config_of("pair"),
        lambda trial: record_of(0.1, 0.9, waited_s=[[0.0, 1.5], [0.0, 0.0]]),
    )
    waits = rows_of(told, "waited")["pair"]
    assert [(row.key["rank"], row.key["waited_for"], row.samples) for row in waits] == [(0, 1, [1.5])] * 2


def test_who_does_not_reach_the_target_says_why(run):
    def answer(trial):
        if trial.job.seed == 5:
            return record_of(0.1, 0.85)
        return record_of(0.1, 0.5, error="it diverged: after 10 steps.")

    told, _ = run(
        config_of("pair", learning_rates=(0.1, 0.2)),
        answer=lambda trial: record_of(0.1, 0.5, 0.6 - trial.job.learning_rate),
    )
    (_, last) = rows_of(told, "not_reached")["pair"]
    assert last.key["why"].startswith("still improving at the end, at the smallest rate of the grid")
    told, _ = run(config_of("pair"), answer)
    (row,) = rows_of(told, "not_reached")["pair"]
    assert row.key["why"].startswith("it diverged: after 10 steps; best 50.0 %")
    assert samples_of(told, "final_accuracy")["pair"] == [0.85]


def test_what_nobody_brought_to_its_end_has_no_last_figures(run):
    ended = {0: "rank 1 is lost.", 1: "rank 1 was killed."}
    told, _ = run(
        config_of("pair", "neighbor"),
        lambda trial: record_of(0.1, 0.5 if trial.job.strategy == "pair" else 0.9, ended=ended),
    )
    for metric in (
        "final_accuracy",
        "worst_final_accuracy",
        "run_seconds",
        "bytes_sent",
        "consensus_distance",
    ):
        assert rows_of(told, metric) == {}
    why = "ended early, rank 0 says: rank 1 is lost"
    assert [row.key["why"] for row in rows_of(told, "not_reached")["pair"]] == [
        f"{why}; best 50.0 % at step 10"
    ] * 2
    assert samples_of(told, "seconds_to_target") == {"neighbor": [1.0, 1.0]}
    assert [row.key["why"] for row in rows_of(told, "ended_early")["neighbor"]] == [why] * 2
    assert any(isinstance(each, Curve) for each in told)


def test_who_diverges_at_every_rate_does_not_compete(run):
    def answer(trial):
        is_wild = trial.job.strategy == "pair"
        return record_of(0.1, error="it diverged." if is_wild else "")

    told, trials = run(config_of(learning_rates=(0.1, 0.2)), answer)
    assert len([trial for trial in trials if trial.job.seed in (5, 6)]) == 2
    assert [row.key["why"] for row in rows_of(told, "not_reached")["pair"]] == [
        "diverged at every rate of the grid"
    ] * 2
    assert "pair" not in rows_of(told, "chosen")


def test_a_run_that_fails_is_a_row_and_the_others_go_on(run):
    def answer(trial):
        return BenchmarkError("its process died") if trial.job.strategy == "pair" else record_of(0.1, 0.9)

    told, _ = run(config_of("pair", "all-reduce"), answer)
    (row,) = rows_of(told, "final_accuracy")["pair"]
    assert "its process died" in row.error
    assert samples_of(told, "final_accuracy")["all-reduce"] == [0.9, 0.9]


def test_the_best_rate_is_first_at_the_target_then_best_at_the_end():
    late, early = record_of(0.1, 0.2, 0.8, 0.95), record_of(0.1, 0.8, 0.7, 0.85)
    better = record_of(0.1, 0.8, 0.9, 0.9)
    failed = record_of(0.1, 0.9, 0.9, error="it diverged.")
    assert best_rate({1.0: late, 2.0: early, 3.0: failed}, 0.8) == 2.0
    assert best_rate({1.0: early, 2.0: better}, 0.8) == 2.0
    assert best_rate({1.0: late, 2.0: early}, 0.99) == 1.0
    assert best_rate({1.0: failed, 2.0: BenchmarkError("no")}, 0.8) is None
    near, far = record_of(9.0, 1.0, task="quadratic"), record_of(9.0, 3.0, task="quadratic")
    assert best_rate({1.0: near, 2.0: far}, 0.1) == 1.0


def test_a_rate_that_ends_lower_by_more_than_noise_is_not_taken_though_it_was_first():
    quick, sound = record_of(0.1, 0.85, 0.8, 0.8, 0.8), record_of(0.1, 0.5, 0.94, 0.95, 0.951)
    assert best_rate({1.0: quick, 2.0: sound}, 0.8) == 2.0


def test_who_could_not_start_says_why_instead_of_a_rate():
    unfit = record_of(error="it needs an optimizer with momentum.")
    assert why_no_rate({0.1: unfit, 0.2: unfit}) == (
        "could not take part: it needs an optimizer with momentum"
    )
    wild, stuck = record_of(0.1, error="it diverged: after 5 steps."), record_of(0.1, error="Nothing moves.")
    assert why_no_rate({0.1: wild, 0.2: wild}) == "diverged at every rate of the grid"
    assert why_no_rate({0.1: wild, 0.2: stuck}) == "Nothing moves"


def test_many_workers_are_stacked_where_they_can_be():
    config = config_of("neighbor", "pair", world=World(num_workers=500))
    jobs = [Try(contender, 0.1, 0).job(config) for contender in config.contenders]
    assert [suited(job, config.world) for job in jobs] == ["stacked", "exact"]
    assert suited(jobs[0], World(num_workers=8)) == "exact"


def test_two_contests_of_one_seed_are_equal_to_the_bit(run):
    config = config_of(
        "all-reduce",
        "pair",
        "choco",
        task="quadratic",
        world=World(num_workers=3),
        split="dirichlet:0.5",
        learning_rates=(0.1, 0.5),
        steps=8,
        eval_every=4,
        momentum=0.0,
        target=2.0,
        seeds=(3,),
    )
    first, second = ([each for each in run(config)[0] if not isinstance(each, Noted)] for _ in range(2))
    assert first == second
    assert {each.key["strategy"] for each in first} == {"all-reduce", "pair", "choco"}
    assert set(samples_of(first, "final_distance")) == {"all-reduce", "pair", "choco"}


def test_all_is_every_strategy_but_those_that_pass_their_group_by():
    contenders = compared(["all"], {})
    assert left_out() == ["ddp", "horovod", "swarm"]
    assert [each.strategy for each in contenders] == [name for name in BUILT_IN if name not in left_out()]
    with pytest.raises(UsageError, match="ddp cannot be compared"):
        compared(["all", "ddp"], {})


def test_all_shortens_rounds_that_a_contest_is_too_short_for_and_says_so():
    local_steps = SHORT_ROUNDS["diloco"]["local_steps"]
    for texts, common, expected in (
        (["all"], {}, local_steps),
        (["all"], {"local_steps": "3"}, 3),
        (["all", "diloco"], {}, 100),
        (["diloco"], {}, 100),
    ):
        named = {each.name: each for each in compared(texts, common)}
        assert named["diloco"].options["local_steps"] == expected
        told = any("diloco local_steps=8" in note for note in notes_of(texts, common))
        assert told == (expected == local_steps)


def test_who_is_left_out_is_said():
    assert "ddp and horovod" in notes_of(["all"], {})[0]
    assert notes_of(["neighbor"], {}) == []


def test_a_strategy_may_take_part_beside_all_with_options_of_its_own():
    contenders = compared(["all", "neighbor topology=ring"], {})
    assert [each.options["topology"] for each in contenders if each.strategy == "neighbor"] == [
        "exponential-2",
        "ring",
    ]


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        ("10", 10.0),
        ("exponential:12.5", Exponential(mean=12.5)),
        ("normal:10:2", Normal(mean=10.0, deviation=2.0)),
    ],
)
def test_a_step_costs_a_number_or_a_distribution(text, cost):
    assert compute_of(text) == cost


@pytest.mark.parametrize("text", ["fast", "-1", "exponential", "exponential:0", "normal:10", "weibull:1"])
def test_other_costs_are_refused(text):
    with pytest.raises(UsageError, match="no cost of a step"):
        compute_of(text)


def test_stragglers_are_ranks_with_factors():
    assert stragglers_of(["1:10", "3:2.5"]) == {1: 10.0, 3: 2.5}
    for text in ("1", "a:2", "1:0"):
        with pytest.raises(UsageError, match="--stragglers"):
            stragglers_of([text])


def test_a_config_survives_a_report():
    world = World(num_workers=4, compute=Compute(step_ms=Exponential(mean=3.0), factors={1: 2.0}))
    config = config_of("all-reduce", "neighbor topology=ring", world=world)
    again = read_config(msgspec.json.decode(msgspec.json.encode(config)))
    assert again == config
    assert isinstance(again, CompareConfig)


def test_servers_are_there_for_those_that_need_them_and_chances_follow_the_seed():
    config = config_of("all-reduce", "parameter-server", num_servers=2)
    plain, served = (config.world_of(contender, 6) for contender in config.contenders)
    assert (plain.num_servers, served.num_servers) == (0, 2)
    assert plain.seed == 6
    assert config.tuning_seed not in config.seeds


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seeds": ()}, "nothing is compared"),
        ({"steps": 0}, "nothing is trained"),
        ({"learning_rates": (0.1, -1.0)}, "no learning rate"),
        ({"split": "even"}, "no split"),
        ({"is_real": True, "world": World(num_workers=2, faults=FaultScript())}, "virtual time alone"),
        ({"seeds": (-5, -4)}, "-5 is no seed"),
        ({"target": math.nan}, "no target"),
        ({"momentum": math.nan}, "no momentum"),
        (
            {
                "is_real": True,
                "contenders": compared(["pair", "staleness-aware"], {}),
                "world": World(num_workers=2, between="machines"),
            },
            "^staleness-aware: servers",
        ),
    ],
)
def test_what_cannot_be_is_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        config_of(**fields)


def test_strategies_with_servers_take_part_while_workers_come_and_go_but_not_under_every_fault():
    churn = '[[fault]]\nkind = "join"\nat_s = 1.0\n'
    contenders = compared(["parameter-server", "all-reduce"], {})
    world = World(num_workers=2, faults=FaultScript.parse(churn))
    config = config_of(contenders=contenders, world=world)
    assert [config.world_of(each, 0).num_servers for each in contenders] == [1, 0]
    cut = '[[fault]]\nkind = "partition"\nat_s = 0.1\npeers = ["rank:1"]\n'
    world = World(num_workers=2, faults=FaultScript.parse(churn + cut))
    with pytest.raises(UsageError, match="Fault 1 cannot happen where parameter servers"):
        config_of(contenders=contenders, world=world)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (record_of(0.1, 0.5, 0.6, 0.7, 0.75), "still improving at the end; best 75.0 % at step 40"),
        (record_of(0.1, 0.7, 0.75, 0.75, 0.75, 0.75), "flat at the end; best 75.0 % at step 20"),
        (record_of(0.1, 0.7, 0.4, 0.1, 0.1), "fell back by the end; best 70.0 % at step 10"),
        (record_of(0.1, 0.1, 0.05), "never better than at the start; best 10.0 % at step 0"),
        (record_of(0.1, 0.5, error="it diverged."), "it diverged; best 50.0 % at step 10"),
        (record_of(error="it needs momentum."), "could not take part: it needs momentum"),
        (
            record_of(0.1, 0.5, ended={0: "rank 1 is lost.", 1: "it was killed."}),
            "ended early, rank 0 says: rank 1 is lost; best 50.0 % at step 10",
        ),
        (record_of(0.1, 0.3, 0.5, ended={1: "killed"}), "still improving at the end; best 50.0 % at step 20"),
        (record_of(9.0, 3.0, 2.0, 1.0, task="quadratic"), "still improving at the end; best 1.00 at step 30"),
    ],
)
def test_a_run_has_one_reason(record, reason):
    assert reasons_of([record]) == {reason: 1}


def test_runs_of_one_kind_are_told_together():
    records = [record_of(0.1, 0.5, 0.7), record_of(0.1, 0.6, 0.8), record_of(0.1, error="it diverged.")]
    assert reasons_of(records) == {
        "still improving at the end; best 75.0 % at step 20": 2,
        "it diverged; best 10.0 % at step 0": 1,
    }
    assert reasons_of([]) == {}
    assert list(reasons_of(records[2:], "at the largest rate of the grid")) == [
        "it diverged, at the largest rate of the grid; best 10.0 % at step 0"
    ]


def test_shares_are_percentages_and_distances_are_not():
    assert shown_score(facts_of("digits"), 0.9123) == "91.2 %"
    assert shown_target(facts_of("digits"), 0.9) == "90 %"
    assert shown_target(facts_of("quadratic"), 0.01) == "0.01"


def quadratic(*strategies, num_workers=4, **fields):
    world = fields.pop("world", World(num_workers=num_workers))
    return config_of(*strategies, task="quadratic", world=world, **fields)


def test_what_can_be_held_is_not_complained_of():
    assert check_contest(config_of("all", world=World(num_workers=8, workers_per_machine=4))) == []
    assert check_contest(quadratic("neighbor", num_workers=500)) == []
    assert check_contest(quadratic("neighbor", executor="stacked")) == []


def test_threads_for_many_workers_are_slow_and_for_more_refused():
    (note,) = check_contest(quadratic("neighbor", "pair", num_workers=65))
    assert "pair" in note
    assert "neighbor" not in note
    with pytest.raises(
        UsageError, match=f"pair would need(.|\n)*leave pair out(.|\n)*--workers {MAX_THREADS}"
    ):
        check_contest(quadratic("neighbor", "pair", num_workers=MAX_THREADS + 1))
    with pytest.raises(UsageError, match="leave --executor exact out"):
        check_contest(quadratic("neighbor", num_workers=MAX_THREADS + 1, executor="exact"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (quadratic("neighbor", "pair", executor="stacked"), "has no pair"),
        (quadratic("neighbor topology=rong"), "neighbor topology=rong: there is no topology 'rong'"),
        (quadratic("extra topology=mesh:5x5"), "mesh"),
        (quadratic("hierarchical topology=x"), "no topology 'x'"),
        (quadratic("choco codec=zip"), "unknown codec"),
        (config_of("neighbor", world=World(num_workers=2000)), "1437 examples cannot be divided"),
        (
            quadratic(
                world=World(
                    num_workers=2, faults=FaultScript.parse("[[fault]]\nkind = 'kill'\npeer = 'rank:7'")
                )
            ),
            "no worker is called 'rank:7'",
        ),
    ],
)
def test_what_no_run_could_do_is_refused(config, message):
    with pytest.raises(UsageError, match=message):
        check_contest(config)
