import pytest

from shoal.bench import experts_config
from shoal.bench.experts_config import PRESETS, config_of, default_device, ensure_files
from shoal.bench.machine import Gpu, Gpus
from shoal.core import UsageError

FIELDS = ("num_experts", "num_clients", "batch_size", "max_batch_size", "num_handlers", "backward")
DOCUMENT = {
    "default": (16, 128, 2048, 8192, 64, True),
    "ffn_forward_backward": (16, 128, 2048, 8192, 64, True),
    "ffn_forward": (16, 128, 2048, 8192, 64, False),
    "ffn_small_batch": (4, 128, 32, 8192, 64, False),
    "ffn_small_batch_512clients": (1, 512, 1, 8192, 256, True),
    "ffn_small_batch_512clients_32handlers": (1, 512, 1, 8192, 32, True),
    "ffn_massive": (16, 512, 512, 8192, 256, False),
    "minimalistic": (1, 1, 2048, 8192, 1, True),
    "nop": (16, 128, 2048, 8192, 64, False),
}


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """A machine of 16 cores without a GPU, unless a test says otherwise."""

    def cores(number):
        monkeypatch.setattr(experts_config, "num_cores", lambda: number)

    monkeypatch.setattr(experts_config, "gpus", lambda _: Gpus())
    cores(16)
    return cores


def test_presets_are_the_documents(monkeypatch, cores):
    cores(10_000)
    monkeypatch.setattr(experts_config, "MAX_LOOPS", 10_000)
    assert PRESETS.keys() == DOCUMENT.keys()
    for name, row in DOCUMENT.items():
        config = config_of(name, {})
        assert tuple(getattr(config, field) for field in FIELDS) == row, name
        assert (config.hidden_dim, config.num_batches_per_client, config.precision) == (1024, 16, "fp32")
        assert config.expert_class == ("nop" if name == "nop" else "ffn")
    assert [name for name, preset in PRESETS.items() if preset.should_raise_file_limit] == ["ffn_massive"]


def test_flags_override_a_preset_and_what_follows_from_them_follows():
    config = config_of("ffn-forward", {"batch_size": 100, "num_clients": 6, "backward": True, "seed": 3})
    assert (config.preset, config.batch_size, config.max_batch_size) == ("ffn_forward", 100, 400)
    assert (config.num_clients, config.num_handlers, config.client_processes) == (6, 3, 6)
    assert (config.backward, config.num_calls, config.num_samples) == (True, 6 * 16 * 2, 6 * 16 * 100)
    assert config_of("ffn_small_batch", {"batch_size": 9000}).max_batch_size == 9000


@pytest.mark.parametrize(("num", "loops", "processes"), [(2, 1, 8), (16, 8, 64), (64, 8, 128)])
def test_handlers_and_processes_are_bounded_by_the_cores_unless_they_are_given(num, loops, processes, cores):
    cores(num)
    config = config_of("default", {})
    assert (config.num_handlers, config.client_processes) == (loops, processes)
    given = config_of("default", {"num_handlers": 11, "client_processes": 3})
    assert (given.num_handlers, given.client_processes) == (11, 3)


@pytest.mark.parametrize(
    ("name", "given", "complaint"),
    [
        ("ffn_forwards", {}, "did you mean --preset ffn_forward"),
        ("transformer", {}, "give one of default, "),
        ("default", {"max_batch_size": 2000}, "--max-batch-size 2048"),
        ("default", {"num_clients": 2, "client_processes": 3}, "at least one client for each"),
        ("default", {"device": "tpu"}, "cannot be served on 'tpu'"),
    ],
)
def test_what_cannot_be_measured_is_refused(name, given, complaint):
    with pytest.raises(UsageError, match=complaint):
        config_of(name, given)


def test_the_gpu_is_used_where_torch_and_the_driver_know_of_one(monkeypatch):
    assert default_device() == "cpu"
    monkeypatch.setattr(experts_config, "gpus", lambda _: Gpus((Gpu("NVIDIA H200"),)))
    monkeypatch.setattr(experts_config, "torch_build", lambda: "CUDA 12.8")
    assert config_of("default", {}).device == "cuda"
    assert config_of("default", {"device": "cpu"}).device == "cpu"
    monkeypatch.setattr(experts_config, "torch_build", lambda: "CPU")
    assert default_device() == "cpu"
    with pytest.raises(UsageError, match="no GPU for --device cuda:1"):
        config_of("default", {"device": "cuda:1"})


def test_too_few_files_are_told_in_terms_of_clients(monkeypatch):
    config = config_of("ffn_massive", {})
    assert config.num_files > 512

    def refuse(num_files, *, should_raise):
        assert num_files == config.num_files
        raise UsageError(f"A process needs up to {num_files} open files.", cause="peers", next_step="peers")

    monkeypatch.setattr(experts_config, "ensure_open_files", refuse)
    with pytest.raises(UsageError) as told:
        ensure_files(config, should_raise=False)
    assert "--increase-file-limit" in told.value.next_step
    with pytest.raises(UsageError) as told:
        ensure_files(config, should_raise=True)
    assert "--num-clients" in told.value.next_step
    assert "peers" not in str(told.value)
