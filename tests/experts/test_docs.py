"""What docs/experts.md shows and quotes is so."""

import contextlib
import importlib
import re
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.bench.experts import PRESETS
from shoal.dht import connect
from shoal.experts import HostingConfig, MixtureSettings, expert_class, hosted, make_expert
from shoal.experts.classes import EXPERT_CLASSES, ExpertClass, TrainingSettings
from shoal.experts.config import load_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "experts.md").read_text()
SOURCE = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))


def rows_of(heading):
    """The cells of the table that begins with this one."""
    table = re.search(rf"^\| {re.escape(heading)} \|.*?\n(.*?)(?=^\n|\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[1:]]


def test_the_code_runs():
    plain = HostingConfig(hidden_dim=64, device="cpu", num_loops=1)
    names = {}
    with contextlib.ExitStack() as stack:
        alone, _ = stack.enter_context(hosted(plain))
        root = stack.enter_context(connect(listen="127.0.0.1:0"))
        in_swarm = HostingConfig(
            hidden_dim=64,
            device="cpu",
            num_loops=1,
            num_experts=4,
            uid_pattern="ffn.[0:4].[0:4]",
            join=(str(root.address),),
        )
        stack.enter_context(hosted(in_swarm))
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            code = block.replace("127.0.0.1:31400", str(alone.address))
            exec(compile(code.replace("127.0.0.1:31337", str(root.address)), "experts.md", "exec"), names)
        assert alone.server.experts["expert0"].num_updates == 1
    assert names["moe"].last_call.num_answered >= 2
    assert names["output"].shape == (32, 64)
    gated = names["Gated"]
    own = ExpertClass("gated", gated, lambda hidden_dim, size: (gated.example_inputs(hidden_dim, size), {}))
    schema = make_expert("expert0", own, 16, TrainingSettings(), 0).schema
    assert [each.shape for each in schema.inputs] == [(16,), (1,)]


def test_the_file_of_flags_is_one(tmp_path):
    path = tmp_path / "experts.toml"
    path.write_text(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])
    config = load_config(path, {})
    assert (config.num_experts, config.adopt, config.max_batch_size) == (16, True, 8192)


def test_tables_name_what_there_is():
    settings = {each.name for each in fields(MixtureSettings)}
    assert {
        name for row in rows_of("setting of a mixture") for name in re.findall(r"`(\w+)`", row[0])
    } == settings
    served = rows_of("`shoal serve`")
    flags = {name.replace("-", "_") for row in served for name in re.findall(r"`--([\w-]+)`", row[0])}
    assert flags <= set(HostingConfig.__struct_fields__)
    classes = [name for name in re.findall(r"`([\w-]+)`", served[0][1]) if ":" not in name]
    assert classes == list(EXPERT_CLASSES)
    assert all(expert_class(name) for name in classes)
    assert set(PRESETS) <= set(re.findall(r"`(\w+)`", PAGE.split("Presets:")[1]))


def test_what_is_compared_with_hivemind_is_there():
    cells = " ".join(row[1] for row in rows_of("hivemind"))
    names = re.findall(r"shoal((?:\.\w+)+)", cells)
    assert len(names) >= 8
    for name in names:
        parent, _, last = f"shoal{name}".rpartition(".")
        assert hasattr(importlib.import_module(parent), last), name
    flags = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", cells)}
    assert flags <= set(HostingConfig.__struct_fields__)


@pytest.mark.parametrize("message", [row[0] for row in rows_of("message")])
def test_quoted_messages_are_the_sources(message):
    for part in message.split("…"):
        words = [re.escape(word) for word in part.strip(" ,").split()]
        # a message may be broken into several literals
        assert re.search(r"(?:\s|\"\s*f?\")+".join(words), SOURCE), part


def test_keys_of_a_result_are_those_that_are_told():
    told = {name for row in rows_of("key of `RESULT`") for name in re.findall(r"`(\w+)`", row[0])}
    summary = (ROOT / "src/shoal/bench/experts.py").read_text()
    made = set(re.findall(r"figures\[\"(\w+)\"\]|^ +\"(\w+)\": start", summary, re.MULTILINE))
    made = {name for pair in made for name in pair if name}
    assert made - {"num_samples", "seconds", "startup_experts_s", "startup_networking_s", "launch_s"} <= told
    assert len(made) > 5
