import subprocess

import pytest

from shoal.bench.frame import source_of
from shoal.core import UsageError


def test_a_folder_with_the_package_is_taken_as_it_is(request):
    root = request.config.rootpath
    for folder in (root, root / "src"):
        with source_of(str(folder)) as source:
            assert source == root / "src"


def test_a_folder_without_it_is_refused(tmp_path):
    with pytest.raises(UsageError, match="holds no Shoal"), source_of(str(tmp_path)):
        pass


def test_a_revision_is_checked_out_and_removed_again(request):
    root = request.config.rootpath
    with source_of("HEAD") as source:
        assert (source / "shoal" / "__init__.py").is_file()
        assert root not in source.parents
    assert not source.exists()
    listed = subprocess.run(
        ["git", "worktree", "list"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    assert "shoal-against" not in listed


def test_an_unknown_revision_is_explained():
    with pytest.raises(UsageError, match="no-such-revision"), source_of("no-such-revision"):
        pass
