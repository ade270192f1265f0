import re
import subprocess
import sys
import typing

import msgspec
import pytest

from shoal.core import UsageError
from shoal.experts.config import HostingConfig, load_config, options
from shoal.experts.settings import Precision


def test_flags_win_over_the_file(tmp_path):
    path = tmp_path / "experts.toml"
    path.write_text('hidden_dim = 512\nnum_experts = 4\njoin = ["10.0.0.7:31337"]\nlr = 1\nadopt = false\n')
    config = load_config(path, {"num_experts": 8, "uid_pattern": "ffn.[0:32].[0:32]"})
    assert (config.hidden_dim, config.num_experts, config.join) == (512, 8, ("10.0.0.7:31337",))
    assert config.lr == 1.0
    assert config.uid_pattern == "ffn.[0:32].[0:32]"
    assert load_config(None, {}) == HostingConfig()


def test_what_needs_a_swarm_may_come_from_the_file_and_the_swarm_from_a_flag(tmp_path):
    path = tmp_path / "experts.toml"
    path.write_text('uid_pattern = "ffn.[0:4]"\n')
    assert load_config(path, {"join": ["127.0.0.1:1"]}).join == ("127.0.0.1:1",)
    with pytest.raises(UsageError, match="without --join nobody can tell"):
        load_config(path, {})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("hiden_dim = 3", "'hiden_dim' is no key, did you mean 'hidden_dim'?"),
        ("hidden-dim = 3", "did you mean 'hidden_dim'?"),
        ("hidden_dim = 0", "wrong at hidden_dim"),
        ('hidden_dim = "wide"', "wrong at hidden_dim"),
        ("hidden_dim = ", "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path, text, complaint):
    path = tmp_path / "experts.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(complaint)):
        load_config(path, {})


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Cannot read the configuration"):
        load_config(tmp_path / "none.toml", {})


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"hidden_dim": 0}, "--hidden-dim 0: "),
        ({"precision": "fp8"}, "--precision fp8: "),
        ({"uid_pattern": "ffn"}, "has no coordinates"),
        ({"adopt": True, "checkpoint_dir": "d"}, "there is no swarm"),
        ({"adopt": True, "join": ["a:1"]}, "--adopt needs a folder"),
        ({"num_experts": 0}, "no experts to serve"),
        ({"uid": ["expert0", "expert0"]}, "named twice"),
        ({"uid": ["a", "b"], "num_experts": 1}, "2 experts are named"),
        ({"uid": ["plain"], "join": ["a:1"]}, "'plain' is no expert's uid"),
        ({"scheduler": "linear"}, "when it ends"),
        ({"clip_gradients": 1.5}, "cannot be clipped to 1.5 times"),
        ({"clip_gradients": -1}, "--clip-gradients -1: "),
        ({"device": "tpu"}, "cannot be served on 'tpu'"),
    ],
)
def test_flags_that_cannot_be_are_refused(given, complaint):
    with pytest.raises(UsageError, match=re.escape(complaint)):
        load_config(None, given)


def test_options_tell_of_every_field():
    told = {option.name: option for option in options()}
    assert tuple(told) == HostingConfig.__struct_fields__
    assert all(option.description for option in told.values())
    assert (told["hidden_dim"].value_type, told["hidden_dim"].default) == (int, 1024)
    assert (told["num_experts"].value_type, told["num_experts"].default) == (int, None)
    assert told["join"].value_type is tuple
    assert told["adopt"].value_type is bool
    assert told["lr"].value_type is float
    assert told["precision"].choices == typing.get_args(Precision)


def test_a_configuration_can_be_written_down():
    config = HostingConfig(hidden_dim=64, join=("a:1",), uid=("ffn.1",))
    assert msgspec.convert(msgspec.to_builtins(config), HostingConfig) == config


def test_reading_a_configuration_takes_no_torch():
    code = "import sys; from shoal.experts.config import load_config; load_config(None, {'hidden_dim': 3});"
    code += "print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
