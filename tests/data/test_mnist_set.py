import functools
import http.server
import shutil
import socket
import threading
from pathlib import Path

import pytest
import torch

from shoal.data import DataError, mnist, mnist_set

REPOSITORY = Path(__file__).parents[2]
FILES = REPOSITORY / "data" / "mnist"
TEST_FILES = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")


@pytest.fixture(autouse=True)
def nowhere(tmp_path, monkeypatch):
    """A folder to work in from which no MNIST can be seen, and no way to the internet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(mnist_set, "MIRRORS", (dead_address(),))
    monkeypatch.setattr(mnist_set, "__file__", str(tmp_path / "site" / "shoal" / "data" / "mnist_set.py"))


@pytest.fixture
def mirror(tmp_path):
    """A folder of files, and the address that serves them."""
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    )
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def put(folder, names=TEST_FILES):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(FILES / name, folder / name)


def dead_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def test_the_repositorys_own_files_are_whole(monkeypatch):
    monkeypatch.setattr(mnist_set, "__file__", str(REPOSITORY / "src" / "shoal" / "data" / "mnist_set.py"))
    images, labels = mnist()
    assert images.shape == (60_000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize("layout", ["", "mnist", "MNIST/raw"])
def test_a_given_folder_may_have_several_layouts(tmp_path, layout):
    put(tmp_path / "sets" / layout)
    images, labels = mnist(train=False, folder=tmp_path / "sets")
    assert images.shape == (10_000, 1, 28, 28)
    assert labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_places_are_looked_at_in_order(tmp_path, monkeypatch):
    put(tmp_path / "cache" / "shoal" / "mnist")
    assert len(mnist(train=False)[1]) == 10_000
    for path in (tmp_path / "data" / "mnist", tmp_path / "sets"):
        path.mkdir(parents=True)
        for name in TEST_FILES:
            (path / name).write_bytes(b"damaged")
        monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "sets"))
        with pytest.raises(DataError, match=str(path)):
            mnist(train=False)


def test_a_given_folder_without_the_files_is_an_error_that_names_them(tmp_path):
    put(tmp_path / "cache" / "shoal" / "mnist")
    put(tmp_path / "half", TEST_FILES[:1])
    with pytest.raises(DataError, match="half has no MNIST") as caught:
        mnist(train=False, folder=tmp_path / "half")
    assert all(name in caught.value.next_step for name in TEST_FILES)


def test_downloads_once_from_the_first_mirror_that_has_it(tmp_path, monkeypatch, mirror):
    folder, address = mirror
    put(folder)
    monkeypatch.setattr(mnist_set, "MIRRORS", (dead_address(), address + "missing/", address))
    assert len(mnist(train=False)[1]) == 10_000
    kept = tmp_path / "cache" / "shoal" / "mnist"
    assert sorted(path.name for path in kept.iterdir()) == sorted(TEST_FILES)
    monkeypatch.setattr(mnist_set, "MIRRORS", (dead_address(),))
    assert len(mnist(train=False)[1]) == 10_000


def test_a_download_with_another_checksum_is_not_kept(tmp_path, monkeypatch, mirror):
    folder, address = mirror
    put(folder)
    (folder / TEST_FILES[0]).write_bytes((FILES / TEST_FILES[0]).read_bytes()[:-1000])
    monkeypatch.setattr(mnist_set, "MIRRORS", (address,))
    with pytest.raises(DataError, match="ends too early"):
        mnist(train=False)
    assert not list(tmp_path.glob("cache/**/*.gz"))


def test_without_a_way_to_the_mirrors_the_error_says_which_files_to_put_where(tmp_path):
    with pytest.raises(DataError, match="not on this machine and cannot be downloaded") as caught:
        mnist(train=False)
    assert f"{mnist_set.MIRRORS[0]}{TEST_FILES[0]}: " in caught.value.what
    assert "refused" in caught.value.what
    assert all(name in caught.value.next_step for name in TEST_FILES)
    assert str(tmp_path / "cache" / "shoal" / "mnist") in caught.value.next_step


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path, monkeypatch, mirror):
    folder, address = mirror
    put(folder)
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setattr(mnist_set, "MIRRORS", (address,))
    assert len(mnist(train=False)[1]) == 10_000
