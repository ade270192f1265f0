"""What benchmarks measure: each figure's unit and direction, and the words that a page uses for people.

Keys stay what they are in the report, in `RESULT` lines and in the tooltips of the page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shoal.core.untrusted import visible_line
from shoal.report.schema import Direction, Scalar, text
from shoal.report.statistics import percentile
from shoal.report.units import Scale, scale_for


class BenchmarkWords(NamedTuple):
    """What a benchmark is called on a page, what it shows, and how to read it."""

    title: str
    about: str
    topic: str = ""
    """What it is about in two or three words, for a page of several."""


_BENCHMARKS = {
    "accuracy": BenchmarkWords(
        "How well and how fast each strategy trains",
        "Worker processes on this machine trained the same model from the same start under each strategy. "
        "Look first at the accuracy over seconds, then over bytes: higher and further left is better. "
        "± is the 95 % interval of a mean over runs; bands reach from the lowest run to the highest.",
        "accuracy of strategies",
    ),
    "collectives": BenchmarkWords(
        "How long workers take to combine their tensors",
        "Each operation was called many times between real worker processes, beside gloo in the same run. "
        "Times are of one call; shorter is better.",
        "collective operations",
    ),
    "compare": BenchmarkWords(
        "Which strategy reaches the target first",
        "Every strategy had the same task, network, computers and budget. Time is virtual: computed from "
        "the network and the cost of a step, so that the speed of this machine does not matter. "
        "± is the 95 % interval of a mean over runs; bands reach from the lowest run to the highest.",
        "strategies compared",
    ),
    "convergence": BenchmarkWords(
        "How well a model learns from stale gradients",
        "Trainers with simulated delays updated one model, as in Learning@home's experiment. "
        "Staleness is how many updates others made while a gradient was on its way.",
        "learning from stale gradients",
    ),
    "ddp": BenchmarkWords(
        "How long a training step takes, from one worker to whole machines",
        "PyTorch's DDP benchmark: the same model with growing numbers of workers. Percentiles are over all "
        "iterations of all workers; shorter is better.",
        "time of a training step",
    ),
    "dht": BenchmarkWords(
        "How fast and how surely the peers' table is written and read",
        "Peers with real sockets on this machine stored records in a distributed hash table and read them "
        "back. Look first at the share of reads that found their record, then at the time of a call.",
        "the peers' table (DHT)",
    ),
    "experts": BenchmarkWords(
        "How many samples an expert server handles in a second",
        "Client processes sent batches to a server of experts over real sockets. The echo is the same "
        "traffic without any computing; the module alone is the same computing without any network. What "
        "the server reaches of them is its own cost.",
        "an expert server",
    ),
    "latency": BenchmarkWords(
        "How much slow links cost each way of training",
        "The same work was done over links of growing latency, as in Learning@home's experiment. "
        "A way that keeps its throughput to the right is one that hides latency.",
        "the cost of slow links",
    ),
    "scaling": BenchmarkWords(
        "How speed grows with the number of workers",
        "Each strategy trained with growing numbers of workers. The ideal line multiplies the speed of the "
        "fewest; sharing the cores of one machine keeps everybody below it.",
        "speed by number of workers",
    ),
    "swarm": BenchmarkWords(
        "How a swarm of peers averages while peers come and go",
        "Peer processes averaged a state round after round while some of them were killed or stopped.",
        "averaging in a swarm",
    ),
    "training": BenchmarkWords(
        "How fast workers train under each strategy",
        "Real worker processes trained in turns under each strategy and under none. The fraction of the "
        "ceiling says what is left of the speed of workers that share nothing; 100 % is ideal.",
        "speed of training",
    ),
    "transport": BenchmarkWords(
        "How fast messages and tensors pass between two processes",
        "Calls and large buffers went over real sockets of this machine. An echo is a call whose bytes come "
        "back; calls in flight were sent and are not answered yet; a speed in GB/s counts both directions. "
        "Streams are TCP connections, datagrams single UDP packets, encrypted. Plain sockets, without any "
        "protocol of ours, were measured in turns with them.",
        "messages and tensors",
    ),
    "virtual": BenchmarkWords(
        "How fast networks are simulated",
        "Calls between simulated peers in virtual time; more calls in a second of this machine is better.",
        "simulated networks",
    ),
}
_REAL_COMPARE = (
    "Every strategy had the same task, network, computers and budget. Workers are real processes behind "
    "shaped links, so that seconds are of the clock on this machine. ± is the 95 % interval of a mean over "
    "runs; bands reach from the lowest run to the highest."
)
_VIRTUAL_DHT = (
    "Simulated peers stored records in a distributed hash table and read them back. Time is virtual: "
    "computed from the network's delays, so that the speed of this machine does not matter. Look first at "
    "the share of reads that found their record, then at the time of a call."
)


class MetricInfo(NamedTuple):
    """A figure that benchmarks measure: what it is called for people, its unit, and which way is better."""

    words: str
    unit: str = ""
    direction: Direction = "lower"
    shown: Literal["", "percent", "seconds", "setting"] = ""
    """A share that people read in percent; a time that stays in seconds, even below one; a setting or a
    count, of which more is neither better nor worse for who reads a page."""


METRICS: dict[str, MetricInfo] = {
    "accuracy": MetricInfo("accuracy", "", "higher", "percent"),
    "after_fault": MetricInfo("time from a fault to the next step", "s"),
    "asked": MetricInfo("time that clients asked for", "s"),
    "backward_latency": MetricInfo("time of a backward call", "s"),
    "bytes_sent": MetricInfo("bytes sent by all workers together", "B"),
    "bytes_to_target": MetricInfo("bytes sent by all workers to reach the target", "B"),
    "calls_per_s": MetricInfo("calls in a second", "1/s", "higher"),
    "ceiling": MetricInfo("time to move the same bytes over plain sockets", "s"),
    "ceiling_cpu": MetricInfo("processor time to move the same bytes over plain sockets", "s"),
    "chosen": MetricInfo("chosen for the contest", "", "higher", "setting"),
    "completed": MetricInfo("calls that were answered", "", "higher"),
    "consensus_distance": MetricInfo("how far models are apart"),
    "cores_per_worker": MetricInfo("cores of a worker", "", "higher", "setting"),
    "cpu_time": MetricInfo("processor time", "s"),
    "create": MetricInfo("time to start all peers", "s"),
    "distance": MetricInfo("distance from the optimum"),
    "echo": MetricInfo("echo of a large buffer", "GB/s", "higher"),
    "echo_samples_per_s": MetricInfo("samples in a second, echo without computing", "1/s", "higher"),
    "raw_samples_per_s": MetricInfo(
        "samples in a second, blocking sockets without a protocol", "1/s", "higher"
    ),
    "ended_early": MetricInfo("runs that ended early"),
    "examples_per_s": MetricInfo("examples in a second, all workers", "1/s", "higher"),
    "examples_per_s_per_worker": MetricInfo("examples in a second, one worker", "1/s", "higher"),
    "expired_batches": MetricInfo("batches that had expired when read"),
    "failed_calls": MetricInfo("calls that failed"),
    "failed_echoes": MetricInfo("echoes that failed"),
    "failures": MetricInfo("calls that failed, by reason"),
    "final_accuracy": MetricInfo("accuracy at the end", "", "higher", "percent"),
    "final_distance": MetricInfo("distance from the optimum at the end"),
    "final_val_loss": MetricInfo("loss at the end"),
    "forward_latency": MetricInfo("time of a forward call", "s"),
    "fraction_of_ceiling": MetricInfo(
        "speed as a fraction of workers that share nothing", "", "higher", "percent"
    ),
    "fraction_of_own_speed": MetricInfo(
        "speed of a worker as a fraction of its own alone", "", "higher", "percent"
    ),
    "fraction_of_sockets": MetricInfo("speed as a fraction of plain sockets", "", "higher", "percent"),
    "fraction_of_tls_sockets": MetricInfo(
        "speed as a fraction of plain TLS sockets", "", "higher", "percent"
    ),
    "get_bytes": MetricInfo("bytes for a record that is read", "B"),
    "get_datagrams": MetricInfo("datagrams for a record that is read"),
    "get_failures": MetricInfo("reads that failed"),
    "get_hops": MetricInfo("peers asked one after another in a read"),
    "get_latency": MetricInfo("time of a call that reads", "s"),
    "get_messages": MetricInfo("messages for a record that is read"),
    "get_met_dead_at_most": MetricInfo("reads that met a dead peer, at most"),
    "get_round": MetricInfo("time of a round of reads", "s"),
    "get_slowest_met_dead": MetricInfo("slowest read that met a dead peer", "s"),
    "get_success": MetricInfo("share of reads that found their record", "", "higher", "percent"),
    "get_time_per_key": MetricInfo("time for one record that is read, many in a call", "s"),
    "gpu_allocated": MetricInfo("GPU memory in use", "B"),
    "gpu_reserved": MetricInfo("GPU memory that is held", "B"),
    "gpus_per_worker": MetricInfo("GPUs of a worker", "", "higher", "setting"),
    "hung": MetricInfo("rounds that hung"),
    "images_per_s": MetricInfo("images in a second, all workers", "images/s", "higher"),
    "images_per_s_per_worker": MetricInfo("images in a second, one worker", "images/s", "higher"),
    "join": MetricInfo("time to join", "s"),
    "join_rate": MetricInfo("speed at which a joiner receives the state", "MB/s", "higher"),
    "latency": MetricInfo("time of a call", "s"),
    "launch": MetricInfo("time to start the server", "s"),
    "like_machine_0": MetricInfo("machine is built like the first", "", "higher", "setting"),
    "local_samples_per_s": MetricInfo("samples in a second, the module alone", "1/s", "higher"),
    "loss": MetricInfo("loss on test examples"),
    "lost_clients": MetricInfo("clients that were lost"),
    "lost_gradients": MetricInfo("gradients that were lost"),
    "mean_expert_staleness": MetricInfo("average staleness of experts' updates"),
    "mean_staleness": MetricInfo("average staleness of updates"),
    "memory": MetricInfo("memory of all peers", "B"),
    "mixing": MetricInfo("time to mix with neighbours", "s"),
    "not_reached": MetricInfo("runs that did not reach the target"),
    "num_samples": MetricInfo("samples in all", "", "higher", "setting"),
    "peak_rss": MetricInfo("most memory of the process", "B"),
    "round": MetricInfo("time of a round", "s"),
    "round_bytes": MetricInfo("bytes of a round", "B"),
    "round_cpu": MetricInfo("processor time of a round", "s"),
    "round_over_ceiling": MetricInfo("time of a round, as a multiple of moving its bytes"),
    "round_trip": MetricInfo("time of a round trip", "s"),
    "rss_growth": MetricInfo("growth of memory", shown="percent"),
    "run_seconds": MetricInfo("time of the whole run", "s", shown="seconds"),
    "same_bits": MetricInfo("rounds after which all peers hold the same bits", "", "higher", "percent"),
    "samples_per_s": MetricInfo("samples in a second", "1/s", "higher"),
    "scaling_efficiency": MetricInfo("speed as a fraction of linear growth", "", "higher", "percent"),
    "sec_per_iter": MetricInfo("time of a training step", "s"),
    "seconds_per_iteration": MetricInfo("time of a training step", "s"),
    "seconds_to_target": MetricInfo("time to reach the target", "s", shown="seconds"),
    "server_processes": MetricInfo("processes of the server", shown="setting"),
    "server_rss": MetricInfo("memory of the server", "B"),
    "simulated": MetricInfo("virtual time that passed", "s", shown="setting"),
    "slowest_over_fastest": MetricInfo("slowest worker's step over the fastest's"),
    "staleness": MetricInfo("updates behind"),
    "startup_experts": MetricInfo("time to build the experts", "s"),
    "startup_networking": MetricInfo("time to begin to listen", "s"),
    "steps_to_target": MetricInfo("steps to reach the target"),
    "store_bytes": MetricInfo("bytes for a record that is stored", "B"),
    "store_datagrams": MetricInfo("datagrams for a record that is stored"),
    "store_failures": MetricInfo("stores that failed"),
    "store_hops": MetricInfo("peers asked one after another in a store"),
    "store_latency": MetricInfo("time of a call that stores", "s"),
    "store_messages": MetricInfo("messages for a record that is stored"),
    "store_replicas": MetricInfo("peers that hold a record", "", "higher"),
    "store_round": MetricInfo("time of a round of stores", "s"),
    "store_success": MetricInfo("share of stores that succeeded", "", "higher", "percent"),
    "store_time_per_key": MetricInfo("time for one record that is stored, many in a call", "s"),
    "survival": MetricInfo("share of peers that are alive at the end", "", "higher", "percent"),
    "throughput": MetricInfo("samples in a second", "samples/s", "higher"),
    "tokens_per_s": MetricInfo("tokens in a second, all workers", "tokens/s", "higher"),
    "tokens_per_s_per_worker": MetricInfo("tokens in a second, one worker", "tokens/s", "higher"),
    "total": MetricInfo("time that the benchmark took", "s", shown="setting"),
    "touched_experts": MetricInfo("experts that were used", "", "higher", "setting"),
    "train_loss": MetricInfo("loss in training"),
    "tuning_accuracy": MetricInfo("accuracy while a learning rate was chosen", "", "higher", "percent"),
    "tuning_distance": MetricInfo("distance while a learning rate was chosen"),
    "val_accuracy": MetricInfo("accuracy on held-out data", "", "higher", "percent"),
    "val_accuracy_last_5": MetricInfo("accuracy on held-out data, last five", "", "higher", "percent"),
    "val_loss": MetricInfo("loss on held-out data"),
    "virtual_calls_per_s": MetricInfo("simulated calls in a second", "1/s", "higher"),
    "virtual_s": MetricInfo("virtual time that passed", "s", shown="setting"),
    "waited": MetricInfo("time that workers waited", "s", shown="seconds"),
    "wall": MetricInfo("time that the benchmark took", "s", shown="setting"),
    "wall_time": MetricInfo("time that passed", "s"),
    "worst_accuracy": MetricInfo("worst worker's accuracy", "", "higher", "percent"),
    "worst_distance": MetricInfo("worst worker's distance"),
    "worst_final_accuracy": MetricInfo("worst worker's accuracy at the end", "", "higher", "percent"),
    "worst_final_distance": MetricInfo("worst worker's distance at the end"),
}
"""By key: the figures of all benchmarks, but for those of collectives, which are named by the operation."""


def benchmark_words(name: str, config: Mapping[str, Any] | None = None) -> BenchmarkWords:
    """Title and explanation of a benchmark, as it was configured; its name alone where it is none of ours."""
    words, config = _BENCHMARKS.get(name, BenchmarkWords(name, "", name)), config or {}
    if name == "compare" and config.get("is_real"):
        return words._replace(about=_REAL_COMPARE)
    if name == "dht" and config.get("profile") is not None:
        return words._replace(about=_VIRTUAL_DHT)
    return words


def sentence_case(words: str) -> str:
    """The words with a capital letter in front; the rest stays as it is."""
    return words[:1].upper() + words[1:]


def metric_words(key: str) -> str:
    """What a figure is called for people; its key with spaces where no words are known."""
    return METRICS[key].words if key in METRICS else key.replace("_", " ")


def metric_title(key: str) -> str:
    """What a figure is called at the head of a plot, a table or an axis."""
    return sentence_case(metric_words(key))


# --- entries of keys ---

KEYS = {
    "backward": "backward calls",
    "behind": "updates behind",
    "contender": "strategy",
    "expert_class": "expert",
    "global_average_every": "global average every",
    "hidden_dim": "hidden size",
    "in_flight": "in flight",
    "learning_rate": "learning rate",
    "method": "way",
    "num_clients": "clients",
    "num_experts": "experts",
    "num_machines": "machines",
    "num_peers": "peers",
    "num_processes": "processes",
    "num_workers": "workers",
    "passes": "passes",
    "ping_ms": "ping in ms",
    "ping_s": "ping in s",
    "size_bytes": "bytes",
    "waited_for": "waited for",
}
_COUNTS = ("size_bytes", "in_flight")
"""Numbers that stand before their word, as those of every `num_` do."""
_ALONE = ("contender", "strategy", "method", "scenario", "mode", "model", "via", "op", "kind")
"""Entries whose text says enough without the entry's name."""


ABSENT = {"via": "stream"}
"""What an entry is where a key lacks it and others have it."""
VALUES = {
    "via": {
        "shoal": "stream",
        "shoal-tls": "stream, TLS",
        "sockets": "plain sockets",
        "tls-sockets": "plain sockets, TLS",
        "udp": "datagram",
    }
}
"""What some values of entries are called for people."""
_ABSENT_OF = {"fraction_of_tls_sockets": {"via": "stream, TLS"}}


def value_words(name: str, value: Scalar | None, metric: str = "") -> str:
    """A value of a key's entry for people; of a figure without the entry, what that means."""
    if value is None:
        return _ABSENT_OF.get(metric, {}).get(name, ABSENT.get(name, "–"))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return VALUES.get(name, {}).get(value, text(value))
    return f"{value:,}"


def arrow_of(metric: str, direction: str) -> str:
    """Which way is better, as an arrow; '' for what is no result."""
    return "" if _shown_as(metric) == "setting" else "↑" if direction == "higher" else "↓"


def key_words(name: str) -> str:
    """What an entry of a key is called for people."""
    return KEYS.get(name, name.removeprefix("num_").replace("_", " "))


def key_label(key: Mapping[str, Scalar]) -> str:
    """A key for people: 'experts, 12 peers', 'split iid, batch size 32'."""
    return ", ".join(_entry(name, value) for name, value in key.items())


def _entry(name: str, value: Scalar) -> str:
    words = visible_line(key_words(name))
    if isinstance(value, bool):
        return f"{words}: {'yes' if value else 'no'}"
    if isinstance(value, str):
        return value_words(name, value) if name in _ALONE else f"{words} {text(value)}"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
    is_count = name.startswith("num_") or name in _COUNTS
    return f"{shown} {_one(words) if value == 1 else words}" if is_count else f"{words} {shown}"


def _one(words: str) -> str:
    """The singular of what is counted."""
    return words.removesuffix("es") if words.endswith("sses") else words.removesuffix("s")


# --- words that a page explains ---

GLOSSARY = {
    "all-reduce": "workers average their gradients over all of them at every step, and so keep one model",
    "batch": "the examples that a worker uses for one step, or the things that one call carries",
    "ddp": "PyTorch's DistributedDataParallel, which averages gradients as all-reduce does",
    "DHT": "distributed hash table: peers keep records for each other, without a central server",
    "diloco": "workers train alone for many steps; an outer optimizer then takes the mean of their changes",
    "dirichlet": "workers have uneven shares of each class of the data; a smaller number is more uneven",
    "expert": "a part of a model that a server computes for others, who call it over the network",
    "ffn": "an expert of linear layers, the feed-forward part of a transformer",
    "gradient": "how the loss changes with each parameter: what a training step is made from",
    "hops": "peers that are asked one after another until the answer is there",
    "iid": "every worker's part of the data is drawn evenly from all of it",
    "local-sgd": "workers train alone for several steps, then all average their models",
    "lr": "learning rate: how far a training step goes along the gradient",
    "momentum": "the share of the last steps' direction that a step keeps",
    "neighbor": "each worker averages its model with those of a few neighbours",
    "p95": "the value that 95 % of the measurements stay below; p50 is the median",
    "pair": "as a strategy: a worker averages its model with the last one of another, drawn at random",
    "parameter-server": "workers send gradients to servers, which keep the model and send it back",
    "rank": "the number of a worker, from 0",
    "RESULT": "the last line that a command prints, for programs that read it",
    "seed": "the number from which all chance of a run is drawn",
    "sma": "each worker's model is pulled towards the mean of all models",
    "staleness-aware": "a parameter server that gives old gradients less weight",
    "step": "one update of a worker's model from one batch",
    "strategy": "how the workers exchange what they have learned",
    "virtual time": "time that was computed from a model of network and computers, and did not pass",
}
"""What a page explains at its end, as far as it uses the word."""


def words_used(said: str) -> dict[str, str]:
    """Those of the glossary that a text uses, with what they mean."""
    return {
        word: meaning
        for word, meaning in GLOSSARY.items()
        if re.search(rf"(?<![\w-]){re.escape(word)}s?(?![\w-])", said, re.IGNORECASE)
    }


# --- units ---

_LARGE_RATE = 1e7
_LEAST_SECONDS = 0.01
_BYTE_RATES = ("B/s", "kB/s", "MB/s", "GB/s", "TB/s", "bytes/s")


def scale_of(metric: str, unit: str, values: Sequence[float]) -> Scale:
    """The scale in which a page shows values of a figure, by their median: shares in percent, rates whole."""
    reference = percentile([abs(value) for value in values], 50) if values else 1.0
    shown = _shown_as(metric)
    if shown == "percent" and unit in {"", "1"}:
        return Scale(0.01, "%")
    if shown == "seconds" and reference >= _LEAST_SECONDS:
        return Scale(1.0, "s")
    if unit.endswith("/s") and unit not in _BYTE_RATES:
        name = "/s" if unit == "1/s" else unit
        return Scale(1e6, f"million {name}") if reference >= _LARGE_RATE else Scale(1.0, name)
    return scale_for(unit, reference)


def _shown_as(metric: str) -> str:
    return METRICS[metric].shown if metric in METRICS else ""
