"""The cost model beside BlueFog's published figures: calibrated on few of its bars, held against the others.

The bars are those of its throughput page: ResNet-50 on machines of 8 V100 (p3.16xlarge) with 25 Gb/s between
them. Horovod's bars of 16 and 32 GPUs at batch 64 tell what the links between machines carry; those of each
neighbour method what an exchange costs that compute does not hide. No other number is fitted, and no other
bar enters the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from shoal.bench.forecast.cost_model import (
    FORWARD_SHARE,
    Method,
    ModelLink,
    ModelNetwork,
    Terms,
    Work,
    fit,
    iteration_s,
)
from shoal.report.tables import Column, Table
from shoal.report.units import digits
from shoal.report.views import Items

SIZES = (16, 32, 64, 128)
CALIBRATED_ON = (16, 32)
BATCH, HALF_BATCH = 64, 32
TOLERANCE = 0.07
"""Of scaling efficiency, for bars that nothing was fitted to."""
IMAGES_PER_S_ALONE = 351.0
"""One GPU at batch 64: the page's ideal box of 44.9 thousand at 128 GPUs."""
PARAMETER_BYTES = 25_557_032 * 4
HOROVOD, HIERARCHICAL, NEIGHBOR = "horovod", "hierarchical", "neighbor"
IMAGES_PER_S: dict[int, dict[str, tuple[float, ...]]] = {
    BATCH: {
        HOROVOD: (5.0e3, 9.5e3, 17.1e3, 29.9e3),
        HIERARCHICAL: (4.9e3, 10.0e3, 20.1e3, 40.4e3),
        NEIGHBOR: (5.2e3, 10.5e3, 21.0e3, 42.8e3),
    },
    HALF_BATCH: {
        HOROVOD: (3.7e3, 5.3e3, 10.2e3, 14.6e3),
        HIERARCHICAL: (3.3e3, 6.8e3, 13.8e3, 27.8e3),
        NEIGHBOR: (4.4e3, 8.6e3, 16.4e3, 32.7e3),
    },
}
"""By batch size and method, for each of `SIZES`; read off the page's figures, to about a hundred."""
_GBIT = 1e9 / 8
NOMINAL = ModelNetwork(
    inside=ModelLink(10e-6, 25e9),  # one NVLink, one direction
    between=ModelLink(50e-6, 25 * _GBIT),
    workers_per_machine=8,
)
"""As the machines' data sheets have it; 50 µs is an ordinary way through TCP."""
_CYCLE_S = 0.005  # Horovod sends what is there so often, and no bucket waits to be full


class Calibrated(msgspec.Struct, frozen=True):
    """All that was fitted: four numbers to six bars."""

    network: ModelNetwork
    """With the effective link between machines."""
    terms: dict[str, Terms]


class Bar(msgspec.Struct, frozen=True):
    """One published figure beside the model's."""

    method: str
    batch_size: int
    num_workers: int
    published: float
    """Images a second, of all together, as the others."""
    nominal: float
    calibrated: float

    @property
    def is_held_out(self) -> bool:
        """Whether nothing was fitted to it."""
        return self.batch_size != BATCH or self.num_workers not in CALIBRATED_ON

    def efficiency(self, images_per_s: float) -> float:
        """Against as many GPUs without anything to share."""
        return images_per_s / (self.num_workers * IMAGES_PER_S_ALONE)

    @property
    def points(self) -> float:
        """By how much the model's scaling efficiency is higher, 0.01 is one point."""
        return self.efficiency(self.calibrated) - self.efficiency(self.published)


def work_at(batch_size: int) -> Work:
    """Describe the work of one GPU; half a batch takes half the time, for the page does not say."""
    return Work(batch_size / IMAGES_PER_S_ALONE, PARAMETER_BYTES)


def method_at(name: str, batch_size: int) -> Method:
    """Describe a method as the page ran it: adapt-while-combine, inner-outer exponential neighbours."""
    if name == HOROVOD:
        work = work_at(batch_size)
        backward_s = work.compute_s - work.forward_s
        return Method(
            kind="all-reduce",
            leaves="as-layers-finish",
            bucket_bytes=PARAMETER_BYTES * _CYCLE_S / backward_s,
            speaks="worker",
        )
    if name == HIERARCHICAL:
        return Method(kind="hierarchical", leaves="after-forward")
    return Method(kind="neighbor", leaves="after-forward", topology="inner-outer-exponential")


@lru_cache(maxsize=1)
def calibrate() -> Calibrated:
    """Fit the model to the bars of `CALIBRATED_ON` at batch 64 alone."""
    work = work_at(BATCH)
    horovod = method_at(HOROVOD, BATCH)

    def all_reduced_s(parameters: Sequence[float]) -> list[float]:
        network = msgspec.structs.replace(NOMINAL, between=_link(*parameters))
        return [iteration_s(work, horovod, network, size) for size in CALIBRATED_ON]

    slow = NOMINAL.between.bytes_per_s
    beginnings = [(share / slow, NOMINAL.between.latency_s) for share in (1, 2, 4, 8)]
    found = fit(all_reduced_s, _measured_s(HOROVOD), beginnings)
    network = msgspec.structs.replace(NOMINAL, between=_link(*found))
    terms = {HOROVOD: Terms()}
    for name in (HIERARCHICAL, NEIGHBOR):
        method = method_at(name, BATCH)

        def combined_s(parameters: Sequence[float], method: Method = method) -> list[float]:
            own = Terms(overhead_s=parameters[0])
            return [iteration_s(work, method, network, size, own) for size in CALIBRATED_ON]

        terms[name] = Terms(*fit(combined_s, _measured_s(name), [(0.01,)]))
    return Calibrated(network, terms)


def bars() -> list[Bar]:
    """Every published bar beside the model with data-sheet numbers, and with calibrated ones."""
    found = calibrate()
    rows = []
    for batch_size, methods in IMAGES_PER_S.items():
        for name, published in methods.items():
            work, method = work_at(batch_size), method_at(name, batch_size)
            for size, images_per_s in zip(SIZES, published, strict=True):
                nominal_s = iteration_s(work, method, NOMINAL, size)
                calibrated_s = iteration_s(work, method, found.network, size, found.terms[name])
                num_images = batch_size * size
                rows.append(
                    Bar(
                        name,
                        batch_size,
                        size,
                        images_per_s,
                        num_images / nominal_s,
                        num_images / calibrated_s,
                    )
                )
    return rows


def ratios() -> list[tuple[str, int, float, float]]:
    """At batch 32 each method's images a second over Horovod's: method, GPUs, published, predicted."""
    found = {(bar.method, bar.num_workers): bar for bar in bars() if bar.batch_size == HALF_BATCH}
    rows = []
    for name in (HIERARCHICAL, NEIGHBOR):
        for size in SIZES:
            ours, theirs = found[name, size], found[HOROVOD, size]
            rows.append((name, size, ours.published / theirs.published, ours.calibrated / theirs.calibrated))
    return rows


def published_items() -> Items:
    """What the model says of BlueFog's figures, and with which numbers."""
    found = calibrate()
    items: Items = [("BlueFog's published scaling beside the cost model", "bold"), "", _inputs(found)]
    columns = ("GPUs", "published", "data sheet", "calibrated", "points", "")
    table = Table("Scaling efficiency at batch 64", (Column("method", "left"), *map(Column, columns)))
    for bar in bars():
        if bar.batch_size == BATCH:
            cells = (bar.published, bar.nominal, bar.calibrated)
            says = ("held out" if abs(bar.points) <= TOLERANCE else "held out, missed") * bar.is_held_out
            table.rows.append(
                (
                    bar.method,
                    str(bar.num_workers),
                    *(f"{bar.efficiency(value):.1%}" for value in cells),
                    f"{100 * bar.points:+.1f}",
                    says or "fitted",
                )
            )
    items.append(table)
    half = Table(
        "Images a second over Horovod's at batch 32 (nothing fitted)",
        (Column("method", "left"), Column("GPUs"), Column("published"), Column("predicted"), Column("off")),
    )
    for name, size, published, predicted in ratios():
        cells_at = (f"{published:.2f}", f"{predicted:.2f}", f"{predicted / published - 1:+.0%}")
        half.rows.append((name, str(size), *cells_at))
    items.append(half)
    held_out = [bar for bar in bars() if bar.is_held_out and bar.batch_size == BATCH]
    worst = max(held_out, key=lambda bar: abs(bar.points))
    items.append(
        f"At {worst.num_workers} GPUs {worst.method} is off most of the bars held out at batch 64: by "
        f"{100 * worst.points:+.1f} points, of {100 * TOLERANCE:.0f} allowed."
    )
    return [*items, ""]


def published_result() -> dict[str, Any]:
    """Say the same for the RESULT line."""
    found = calibrate()
    held_out = [bar for bar in bars() if bar.is_held_out and bar.batch_size == BATCH]
    worst = max(abs(bar.points) for bar in held_out)
    return {
        "held_out_within_points": round(100 * worst, 1),
        "is_within_tolerance": worst <= TOLERANCE,
        "calibrated": msgspec.to_builtins(found),
        "nominal": msgspec.to_builtins(NOMINAL),
        "bars": [
            {
                **msgspec.to_builtins(bar),
                "nominal": round(bar.nominal),
                "calibrated": round(bar.calibrated),
                "is_held_out": bar.is_held_out,
                "points": round(100 * bar.points, 1),
            }
            for bar in bars()
        ],
        "ratios_at_batch_32": [
            {
                "method": name,
                "num_workers": size,
                "published": round(published, 2),
                "predicted": round(predicted, 2),
            }
            for name, size, published, predicted in ratios()
        ],
    }


def _inputs(found: Calibrated) -> Table:
    """What goes into the model, and which part of it was fitted."""
    columns = (
        Column("input", "left"),
        Column("data sheet"),
        Column("calibrated"),
        Column("fitted to", "left"),
    )
    rows: list[tuple[str, ...]] = [
        ("parameters", f"{PARAMETER_BYTES / 1e6:.1f} MB", "", ""),
        ("one GPU at batch 64", f"{IMAGES_PER_S_ALONE:.0f} images/s", "", ""),
        ("forward, of compute", f"{FORWARD_SHARE:.0%}", "", ""),
        ("inside a machine", _link_text(NOMINAL.inside), "", ""),
        ("between machines", _link_text(NOMINAL.between), _link_text(found.network.between), HOROVOD),
    ]
    overheads_ms = {name: 1e3 * found.terms[name].overhead_s for name in (HIERARCHICAL, NEIGHBOR)}
    rows += [(f"not hidden, {name}", "0 ms", f"{ms:.1f} ms", name) for name, ms in overheads_ms.items()]
    return Table("ResNet-50 on machines of 8 GPUs", columns, rows)


def _link_text(link: ModelLink) -> str:
    return f"{digits(link.bytes_per_s / _GBIT)} Gb/s, {1e6 * link.latency_s:.0f} µs"


def _link(seconds_per_byte: float, latency_s: float) -> ModelLink:
    return ModelLink(latency_s, 1 / max(seconds_per_byte, 1e-15))


def _measured_s(method: str) -> list[float]:
    """An iteration of each bar that may be fitted to."""
    published = dict(zip(SIZES, IMAGES_PER_S[BATCH][method], strict=True))
    return [BATCH * size / published[size] for size in CALIBRATED_ON]
