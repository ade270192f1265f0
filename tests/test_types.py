"""What a type checker learns of the public names: run on a program that uses them."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # mypy reads torch, on a loaded machine in a minute


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all, with what mypy remembers of torch."""
    return tmp_path_factory.mktemp("types")


def checked(folder, program):
    """What mypy says of a program, by line."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(program).lstrip())
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(path)],
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    told = re.findall(r"^.*?program\.py:(\d+): (?:error|note): (.*)$", done.stdout, re.MULTILINE)
    assert told, done.stdout + done.stderr
    return {int(line): "\n".join(text for other, text in told if other == line) for line, _ in told}


def test_keywords_of_a_strategy_are_known_with_their_types(folder):
    told = checked(
        folder,
        """
        import shoal
        group = shoal.init()
        shoal.DiLoCo(group, local_steps=4, outer_lr=0.5, on_nonfinite="skip", batch_size=None)
        shoal.DiLoCo(group, local_steps="four")
        shoal.DiLoCo(group, outer_rate=0.5)
        """,
    )
    assert list(told) == [4, 5]
    assert 'expected "int"' in told[4]
    assert 'keyword argument "outer_rate"' in told[5]


def test_shard_keeps_the_type_of_what_it_divides(folder):
    told = checked(
        folder,
        """
        import shoal, torch
        from torch.utils.data import DataLoader, TensorDataset
        group = shoal.init()
        reveal_type(shoal.shard(DataLoader(TensorDataset(torch.ones(4))), group))
        reveal_type(shoal.shard(["a"], group))
        reveal_type(shoal.shard(torch.ones(4), group))
        reveal_type(shoal.shard(iter([1, 2]), group))
        """,
    )
    kinds = [re.sub(r"\b(\w+\.)+", "", text).split('"')[1] for text in told.values()]
    assert kinds == ["ShardedLoader[tuple[Tensor, ...]]", "list[str]", "Tensor", "Iterable[int]"]
