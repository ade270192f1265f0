"""The words that a page uses for people: what a benchmark measures, and what its figures are called.

Keys stay what they are in the report, in `RESULT` lines and in the tooltips of the page.
"""

from __future__ import annotations

from typing import NamedTuple


class BenchmarkWords(NamedTuple):
    """What a benchmark is called on a page, what it shows, and how to read it."""

    title: str
    about: str


_BENCHMARKS = {
    "accuracy": BenchmarkWords(
        "How well and how fast each strategy trains",
        "Worker processes on this machine trained the same model from the same start under each strategy. "
        "Look first at the accuracy against seconds and bytes: higher and further left is better.",
    ),
    "collectives": BenchmarkWords(
        "How long workers take to combine their tensors",
        "Each operation was called many times between real worker processes, beside gloo in the same run. "
        "Times are of one call; shorter is better.",
    ),
    "compare": BenchmarkWords(
        "Which strategy reaches the target first",
        "Every strategy had the same task, network, computers and budget, in virtual time, so that the speed "
        "of this machine does not matter. Bands and ± show how far seeds differ.",
    ),
    "convergence": BenchmarkWords(
        "How well a model learns from stale gradients",
        "Trainers with simulated delays updated one model, as in Learning@home's experiment. "
        "Staleness is how many updates others made while a gradient was on its way.",
    ),
    "ddp": BenchmarkWords(
        "How long a training step takes, from one worker to whole machines",
        "PyTorch's DDP benchmark: the same model with growing numbers of workers. Percentiles are over all "
        "iterations of all workers; shorter is better.",
    ),
    "dht": BenchmarkWords(
        "How fast and how surely the peers' table is written and read",
        "Peers with real sockets stored records in a distributed hash table and read them back. "
        "Look first at the share of reads that found their record, then at the time of a call.",
    ),
    "experts": BenchmarkWords(
        "How many samples an expert server handles in a second",
        "Client processes sent batches to a server of experts over real sockets. The echo is the same "
        "traffic without any computing: what the server reaches of it is its own cost.",
    ),
    "latency": BenchmarkWords(
        "How much slow links cost each way of training",
        "The same work was done over links of growing latency, as in Learning@home's experiment. "
        "A way that keeps its throughput to the right is one that hides latency.",
    ),
    "scaling": BenchmarkWords(
        "How speed grows with the number of workers",
        "Each strategy trained with growing numbers of workers. The ideal line multiplies the speed of the "
        "fewest; sharing the cores of one machine keeps everybody below it.",
    ),
    "swarm": BenchmarkWords(
        "How a swarm of peers averages while peers come and go",
        "Peer processes averaged a state round after round while some of them were killed or stopped.",
    ),
    "training": BenchmarkWords(
        "How fast workers train under each strategy",
        "Real worker processes trained in turns under each strategy and under none. The fraction of the "
        "ceiling says what is left of the speed of workers that share nothing; 1 is ideal.",
    ),
    "transport": BenchmarkWords(
        "How fast messages and tensors pass between two processes",
        "Calls and large buffers went over real sockets of this machine, beside plain sockets in one run.",
    ),
    "virtual": BenchmarkWords(
        "How fast networks are simulated",
        "Calls between simulated peers in virtual time; more calls in a second of this machine is better.",
    ),
}

_METRICS = {
    "bytes_sent": "bytes sent in all",
    "bytes_to_target": "bytes sent to reach the target",
    "calls_per_s": "calls in a second",
    "chosen": "chosen learning rate",
    "consensus_distance": "how far models are apart",
    "cores_per_worker": "cores of a worker",
    "create": "time to start all peers",
    "asked": "time that clients asked for",
    "backward_latency": "time of a backward call",
    "echo": "echo of a large buffer",
    "echo_samples_per_s": "samples in a second, echo without computing",
    "raw_samples_per_s": "samples in a second, blocking sockets without a protocol",
    "failed_calls": "calls that failed",
    "failed_echoes": "echoes that failed",
    "forward_latency": "time of a forward call",
    "ended_early": "runs that ended early",
    "examples_per_s": "examples in a second, all workers",
    "examples_per_s_per_worker": "examples in a second, one worker",
    "expired_batches": "batches that had expired when read",
    "final_accuracy": "accuracy at the end",
    "final_distance": "distance at the end",
    "final_val_loss": "loss at the end",
    "fraction_of_ceiling": "speed as a fraction of workers that share nothing",
    "fraction_of_own_speed": "speed of a worker as a fraction of its own alone",
    "get_bytes": "bytes of a read",
    "get_datagrams": "datagrams of a read",
    "get_failures": "reads that failed",
    "get_hops": "peers asked one after another in a read",
    "get_latency": "time of a read",
    "get_messages": "messages of a read",
    "get_met_dead_at_most": "reads that met a dead peer, at most",
    "get_round": "time of a round of reads",
    "get_slowest_met_dead": "slowest read that met a dead peer",
    "get_success": "share of reads that found their record",
    "get_time_per_key": "time of a read, many at once",
    "gpus_per_worker": "GPUs of a worker",
    "images_per_s": "images in a second, all workers",
    "images_per_s_per_worker": "images in a second, one worker",
    "latency": "time of a call",
    "launch": "time to start the server",
    "like_machine_0": "machine is built like the first",
    "local_samples_per_s": "samples in a second, the module alone",
    "lost_clients": "clients that were lost",
    "lost_gradients": "gradients that were lost",
    "mean_expert_staleness": "average staleness of experts' updates",
    "mean_staleness": "average staleness of updates",
    "memory": "memory of all peers",
    "mixing": "time to mix with neighbours",
    "num_samples": "samples in all",
    "not_reached": "runs that did not reach the target",
    "peak_rss": "most memory of the process",
    "round_trip": "time of a round trip",
    "run_seconds": "time of the whole run",
    "samples_per_s": "samples in a second",
    "scaling_efficiency": "speed as a fraction of linear growth",
    "sec_per_iter": "time of a training step",
    "seconds_per_iteration": "time of a training step",
    "seconds_to_target": "time to reach the target",
    "server_processes": "processes of the server",
    "server_rss": "memory of the server",
    "simulated": "virtual time that passed",
    "slowest_over_fastest": "slowest worker's step over the fastest's",
    "startup_experts": "time to build the experts",
    "startup_networking": "time to begin to listen",
    "steps_to_target": "steps to reach the target",
    "store_bytes": "bytes of a store",
    "store_datagrams": "datagrams of a store",
    "store_failures": "stores that failed",
    "store_hops": "peers asked one after another in a store",
    "store_latency": "time of a store",
    "store_messages": "messages of a store",
    "store_replicas": "peers that hold a record",
    "store_round": "time of a round of stores",
    "store_success": "share of stores that succeeded",
    "store_time_per_key": "time of a store, many at once",
    "survival": "share of peers that are alive at the end",
    "throughput": "samples in a second",
    "tokens_per_s": "tokens in a second, all workers",
    "tokens_per_s_per_worker": "tokens in a second, one worker",
    "total": "time that the benchmark took",
    "touched_experts": "experts that were used",
    "train_loss": "loss in training",
    "tuning_accuracy": "accuracy while a learning rate was chosen",
    "val_accuracy": "accuracy on held-out data",
    "val_accuracy_last_5": "accuracy on held-out data, last five",
    "val_loss": "loss on held-out data",
    "virtual_calls_per_s": "simulated calls in a second",
    "virtual_s": "virtual time that passed",
    "waited": "time that workers waited",
    "wall": "time that the benchmark took",
    "worst_accuracy": "worst worker's accuracy",
    "worst_final_accuracy": "worst worker's accuracy at the end",
}


def benchmark_words(name: str) -> BenchmarkWords:
    """Title and explanation of a benchmark; its name alone where it is none of ours."""
    return _BENCHMARKS.get(name, BenchmarkWords(name, ""))


def sentence_case(words: str) -> str:
    """The words with a capital letter in front; the rest stays as it is."""
    return words[:1].upper() + words[1:]


def metric_words(key: str) -> str:
    """What a figure is called for people; its key with spaces where no words are known."""
    return _METRICS.get(key, key.replace("_", " "))
