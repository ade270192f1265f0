"""Figures that the documents of other systems print, to stand beside ours where a benchmark comes from one.

They are theirs, on their hardware. Where a report's setup is not the document's, a page says how they differ
instead of comparing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.report.html.distributions import number_cell
from shoal.report.html.markup import Markup, Section, element, how, joined, table, titled
from shoal.report.html.plots import Shown, dotted
from shoal.report.schema import Report, Row, Scalar, flatten, is_number, text
from shoal.report.statistics import percentile, start_medians
from shoal.report.units import digits
from shoal.report.words import key_label, key_words, metric_title, scale_of


@dataclass(frozen=True)
class Published:
    """A figure of a document, and what a run must have for it to be the same measurement."""

    metric: str
    value: float
    key: Mapping[str, Scalar] = field(default_factory=dict)
    """The entries of the row that has ours, where a report has several of the metric."""


@dataclass(frozen=True)
class Document:
    """What one document printed of one command."""

    benchmark: str
    source: str
    hardware: str
    figures: tuple[Published, ...]
    settings: Mapping[str, Any]
    """By the dotted name in a report's config; a list in a report has to hold the value."""
    kind: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a run that the document has nothing to say about unless they are equal."""


_EXPERTS = {
    "num_experts": 16,
    "num_clients": 128,
    "num_batches_per_client": 16,
    "batch_size": 2048,
    "hidden_dim": 1024,
    "device": "cuda",
}
_GTX = "one GTX 1080 Ti"
_V100 = "machines of 4 or 8 V100, 25 Gb/s between them"
_NEIGHBOR: dict[str, Scalar] = {"strategy": "neighbor", "batch_size": 64}
_STAGES = ("no ddp", "1M/1G", "1M/2G", "1M/4G", "1M/8G", "2M/8G")
_DDP_S = {
    "resnet50": (0.097, 0.100, 0.103, 0.103, 0.104, 0.104),
    "resnet101": (0.162, 0.171, 0.176, 0.176, 0.179, 0.179),
    "resnext50_32x4d": (0.145, 0.147, 0.153, 0.153, 0.157, 0.157),
    "resnext101_32x8d": (0.415, 0.425, 0.438, 0.439, 0.447, 0.450),
}
_EXPERT_RUNS = (("default", True, 28_581.213, 3.075), ("ffn_forward", False, 97_604.282, 3.065))
DOCUMENTS = (
    *(
        Document(
            "experts",
            f"hivemind's documentation, benchmark_throughput.py --preset {preset}",
            _GTX,
            (Published("samples_per_s", samples_per_s), Published("startup_experts", startup_s)),
            _EXPERTS,
            {"backward": has_backward, "expert_class": "ffn"},
        )
        for preset, has_backward, samples_per_s, startup_s in _EXPERT_RUNS
    ),
    Document(
        "dht",
        "hivemind's documentation, benchmark_dht.py",
        "one machine that the document does not describe",
        (
            Published("get_success", 1.0),
            Published("store_success", 1.0),
            Published("survival", 1.0),
            Published("get_time_per_key", 0.00664),
            Published("store_time_per_key", 0.01487),
            Published("create", 105.0),
        ),
        {"num_peers": 1024, "plan.num_experts": 16_384, "plan.expert_batch_size": 64},
        {"plan.mode": "experts", "profile": None},
    ),
    Document(
        "convergence",
        "Learning@home's notebook: 64 experts in each of 4 layers; read off its plot, one seed",
        "a simulation, as ours is",
        (Published("val_accuracy", 0.943),),
        {
            "num_experts": 64,
            "num_layers": 4,
            "layer_dim": 512,
            "num_trainers": 64,
            "delay_ms": 1000.0,
            "steps": 20_480,
        },
        {"model": "dmoe"},
    ),
    Document(
        "scaling",
        "BlueFog's documentation, pytorch_benchmark.py --dist-optimizer=neighbor_allreduce",
        _V100,
        (
            Published("images_per_s", 4310.6, _NEIGHBOR | {"num_workers": 16}),
            Published("scaling_efficiency", 0.95, _NEIGHBOR | {"num_workers": 128}),
        ),
        {"model": "resnet50", "image_size": 224, "batch_sizes": 64, "num_workers": 16, "device": "cuda"},
    ),
    Document(
        "ddp",
        "PyTorch's DDP benchmark, benchmark.py",
        "2 machines of 8 GPUs with NVLink, nccl",
        tuple(
            Published("sec_per_iter", seconds, {"model": model, "label": label})
            for model, times in _DDP_S.items()
            for label, seconds in zip(_STAGES, times, strict=True)
        ),
        {"batch_size": 32, "image_size": 224, "num_workers": 16, "device": "cuda"},
    ),
)


HOW = (
    "Figures that the documents of the system from which this benchmark comes print, measured on its "
    "hardware. Ours stand beside them only where the settings are the same, and hardware still differs."
)


def beside_documents(shown: Sequence[Shown]) -> Section:
    """What documents print of the same measurement, and ours where the setups are the same."""
    parts = []
    for item in shown:
        config = flatten(item.report.config)
        for document in DOCUMENTS:
            is_of = document.benchmark == item.report.benchmark and not config.keys().isdisjoint(
                document.settings
            )
            if is_of and all(_is_equal(config, name, value) for name, value in document.kind.items()):
                parts.append(_table(document, item, config))
    return Section("Published by others", HOW, joined(parts))


def _table(document: Document, item: Shown, config: Mapping[str, Any]) -> Markup:
    models = config.get("models", ())
    differences = "; ".join(_differences(document, config))
    rows = []
    for figure in document.figures:
        if "model" in figure.key and figure.key["model"] not in models:
            continue
        scale = scale_of(figure.metric, _unit_of(item.report, figure.metric), [figure.value])
        name = metric_title(figure.metric) + (f" · {key_label(figure.key)}" if figure.key else "")
        cells = [element("td", name, title=figure.metric), number_cell(scale.format(figure.value))]
        if not differences:
            row = _row_of(item.report, figure)
            ours = "–" if row is None else scale.format(percentile(start_medians(row), 50))
            cells.append(number_cell(ours))
        rows.append(element("tr", *cells))
    if not rows:
        return Markup()
    columns = ["in the document"] if differences else ["in the document", "here"]
    heads = [element("th", "figure"), *(element("th", name, kind="number") for name in columns)]
    said = "These are for other settings and cannot be compared with this report: "
    return titled(dotted(item.label, document.source, document.hardware), table(heads, rows)) + how(
        f"{said}{differences}." if differences else ""
    )


def _differences(document: Document, config: Mapping[str, Any]) -> Iterator[str]:
    """Each setting that is not the document's, in words."""
    for name, value in document.settings.items():
        if not _is_equal(config, name, value):
            words = key_words(name.rpartition(".")[2])
            yield f"{words} {_shown(value)} there, {_shown(config.get(name, 'unknown'))} here"


def _is_equal(config: Mapping[str, Any], name: str, value: Any) -> bool:
    found = config.get(name)
    if isinstance(found, list | tuple):
        return any(each == value for each in found)
    if name == "device":
        return bool(str(found).partition(":")[0] == value)
    return bool(found == value)


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " and ".join(map(_shown, value))
    if not is_number(value):
        return text(value)
    return f"{value:,}" if isinstance(value, int) else digits(value)


def _row_of(report: Report, figure: Published) -> Row | None:
    """The one row that measured the same."""
    found = [
        row
        for row in report.rows
        if row.metric == figure.metric
        and row.starts
        and all(row.key.get(name) == value for name, value in figure.key.items())
    ]
    return found[0] if len(found) == 1 else None


def _unit_of(report: Report, metric: str) -> str:
    return next((row.unit for row in report.rows if row.metric == metric), "")
