"""Hand-made reports of every kind that the page draws."""

import math
import random

from shoal.report import Code, Curve, Report, Row

ENVIRONMENT = {
    "machine": "ws1",
    "cores": 8,
    "device": "cpu",
    "versions": {"python": "3.11.9", "torch": "2.7.1"},
    "before": {"load_average": [0.4, 0.3, 0.2]},
}


def report(benchmark, rows=(), **fields):
    fields = {
        "command": ["shoal", "bench", benchmark],
        "code": Code(version="0.1.0", revision="78c05bc821f5"),
        "environment": ENVIRONMENT,
        "seeds": [0, 1, 2],
    } | fields
    return Report(benchmark=benchmark, created="2026-03-02T10:00:00Z", rows=list(rows), **fields)


def around(rng, centre, spread=0.03, num_starts=3, num_samples=7):
    return [[centre * rng.lognormvariate(0, spread) for _ in range(num_samples)] for _ in range(num_starts)]


def row(key, metric, unit, direction, starts):
    return Row(key=key, metric=metric, unit=unit, direction=direction, starts=starts)


def accuracy(seed=0, delay=1.0):
    """Curves of four strategies on two splits, along three axes, over three starts, with their final rows."""
    rng, rows, curves = random.Random(seed), [], []
    contenders = {
        "all-reduce": (1.0, 1.0),
        "neighbor": (0.94, 0.5),
        "pair": (0.9, 0.25),
        "local-sgd": (0.85, 0.05),
    }
    for split, difficulty in (("iid", 1.0), ("dirichlet:0.1", 1.9)):
        for contender, (speed, share) in contenders.items():
            key = {"contender": contender, "split": split}
            courses, distances = [], []
            for _ in range(3):
                pace = speed / difficulty * rng.lognormvariate(0, 0.08)
                steps = list(range(0, 401, 20))
                axes = {
                    "step": steps,
                    "s": [step * 0.03 * delay * (0.6 + share * 0.4) for step in steps],
                    "bytes": [step * 4.2e5 * share for step in steps],
                }
                values = [0.97 - 0.87 * math.exp(-step / 60 * pace) + rng.gauss(0, 0.004) for step in steps]
                apart = [
                    0.0
                    if contender == "all-reduce"
                    else difficulty * (1 - share) * math.exp(-step / 150) * min(1, step / 20)
                    for step in steps
                ]
                courses.append({"value": values, **axes})
                distances.append({"value": apart, **axes})
            curves.append(Curve(key=key, metric="accuracy", unit="", direction="higher", starts=courses))
            curves.append(
                Curve(key=key, metric="consensus_distance", unit="", direction="lower", starts=distances)
            )
            rows += [
                row(key, "final_accuracy", "", "higher", [[course["value"][-1]] for course in courses]),
                row(key, "bytes_sent", "B", "lower", [[course["bytes"][-1]] for course in courses]),
                row(
                    key,
                    "seconds_to_target",
                    "s",
                    "lower",
                    around(rng, 2.5 / speed * difficulty * delay, 0.1, 3, 1),
                ),
            ]
    headline = [
        "neighbor was the fastest to 90%: 2.6 s, with half the bytes of all-reduce.",
        "local-sgd sent the fewest bytes, 8.4 MB, and ended at 96.4%.",
    ]
    return report("accuracy", rows, curves=curves, result={"headline": headline, "num_workers": 4})


def scaling(seed=0):
    """Images a second and efficiency of three strategies at 1, 2 and 4 workers, and predictions to 1,024."""
    rng, rows, curves = random.Random(seed), [], []
    for batch_size in (64, 32):
        for strategy, loss in (("neighbor", 0.02), ("hierarchical", 0.035), ("all-reduce", 0.06)):
            key = {"strategy": strategy, "batch_size": batch_size}
            for count in (1, 2, 4):
                efficiency = 1 / (1 + loss * math.log2(count) * 64 / batch_size)
                at = key | {"num_workers": count}
                rows += [
                    row(
                        at,
                        "images_per_s",
                        "1/s",
                        "higher",
                        around(rng, 5.5 * batch_size * count * efficiency / 64),
                    ),
                    row(at, "scaling_efficiency", "", "higher", around(rng, efficiency, 0.02)),
                ]
            counts = [2**power for power in range(11)]
            shares = [1 / (1 + loss * math.log2(count) * 64 / batch_size) for count in counts]
            speeds = [
                5.5 * batch_size / 64 * count * share for count, share in zip(counts, shares, strict=True)
            ]
            for metric, unit, values in (("images_per_s", "1/s", speeds), ("scaling_efficiency", "", shares)):
                points = {"num_workers": counts, "value": values}
                curves.append(Curve(key=key, metric=metric, unit=unit, direction="higher", starts=[points]))
    return report(
        "scaling", rows, curves=curves, result={"headline": ["neighbor scales best: 0.96 at 4 workers."]}
    )


def training(seed=0):
    """Speeds and iteration times of three strategies with one slow worker, and who waited for whom."""
    rng, rows = random.Random(seed), []
    for strategy, speed, share in (("none", 100, 0.0), ("sync-sgd", 30, 1.0), ("pair-averaging", 92, 0.02)):
        rows += [
            row({"strategy": strategy}, "examples_per_s", "1/s", "higher", around(rng, speed)),
            row({"strategy": strategy}, "fraction_of_ceiling", "", "higher", around(rng, speed / 100)),
        ]
        for rank in range(4):
            times = around(rng, 3.2 / speed * (1 + 2 * (rank == 1 and share < 1)), 0.15, 3, 60)
            rows.append(
                row({"strategy": strategy, "rank": rank}, "seconds_per_iteration", "s", "lower", times)
            )
            for other in range(4):
                if strategy != "none" and other != rank:
                    wait = share * (2.4 if other == 1 else 0.12)
                    key = {"strategy": strategy, "rank": rank, "waited_for": other}
                    rows.append(row(key, "waited", "s", "lower", around(rng, wait)))
    rows.append(
        Row(
            key={"strategy": "horovod"},
            metric="examples_per_s",
            unit="1/s",
            direction="higher",
            error="horovod is not installed",
        )
    )
    return report("training", rows, config={"batch_size": 32, "num_workers": 4})


def latencies(seed=0, slower=1.0):
    """Times of calls of several sizes over six starts: what a comparison judges."""
    rng = random.Random(seed)
    rows = [
        row(
            {"scenario": "echo", "size_bytes": size},
            "latency",
            "s",
            "lower",
            around(rng, seconds * slower, 0.1, 6, 80),
        )
        for size, seconds in ((100, 9e-5), (10_000, 1.4e-4), (1_000_000, 1.1e-3))
    ]
    return report("transport", rows, config={"slower": slower})


def convergence(seed=0, delay_ms=1000):
    """Accuracy along updates over three seeds, and how far behind updates of trainers and experts were."""
    rng, key = random.Random(seed), {"contender": f"dmoe, {delay_ms} ms"}
    steps = [1024.0 * number for number in range(1, 11)]
    courses = [
        {
            "value": [1 - 0.5 * math.exp(-step / 3000) + rng.gauss(0, 0.01) for step in steps],
            "step": steps,
            "s": [step / 64 for step in steps],
        }
        for _ in range(3)
    ]
    curves = [Curve(key=key, metric="val_accuracy", unit="", direction="higher", starts=courses)]
    rows = [row(key, "val_accuracy", "", "higher", [[course["value"][-1]] for course in courses])]
    for whose, mean in (("trainers", delay_ms / 50), ("experts", delay_ms / 100)):
        for behind in range(int(8 * mean) + 1):
            counts = [[float(round(1000 * math.exp(-behind / mean)))] for _ in range(3)]
            rows.append(row({**key, "of": whose, "behind": behind}, "staleness", "", "lower", counts))
    return report("convergence", rows, curves=curves)
