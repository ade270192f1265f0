import os
from pathlib import Path

import pytest

from shoal.core import UsageError
from shoal.launch.output import MAX_QUEUED_BYTES, LogFiles, OutputListener, Terminal


@pytest.fixture
def pipes():
    ends = [os.pipe(), os.pipe()]
    yield ends
    for end in (end for pair in ends for end in pair):
        try:
            os.close(end)
        except OSError:
            continue


def write_some(terminal):
    for _, _, write in terminal.interests():
        write()


def write_all(terminal):
    while terminal.interests():
        write_some(terminal)


def test_lines_go_to_their_stream_with_their_rank(pipes):
    terminal = Terminal(descriptors=(pipes[0][1], pipes[1][1]))
    terminal.lines(2, "stdout", [b"a", b"\xff", b""])
    terminal.lines(11, "stderr", [b"trouble"])
    terminal.say("it ended")
    write_all(terminal)
    assert os.read(pipes[0][0], 100) == b"[2] a\n[2] \xff\n[2] \n"
    assert os.read(pipes[1][0], 100) == b"[11] trouble\nshoal run: it ended\n"


def test_prefixes_may_be_left_out(pipes):
    terminal = Terminal(has_prefix=False, descriptors=(pipes[0][1], pipes[1][1]))
    terminal.lines(2, "stdout", [b"a"])
    write_all(terminal)
    assert os.read(pipes[0][0], 100) == b"a\n"


def test_both_streams_into_one_pipe_keep_their_order(pipes):
    terminal = Terminal(descriptors=(pipes[0][1], pipes[0][1]))
    for number in range(1000):
        terminal.lines(0, "stdout" if number % 2 else "stderr", [b"%d" % number])
    assert len(terminal.interests()) == 1
    write_all(terminal)
    assert os.read(pipes[0][0], 1 << 16).split(b"\n")[:-1] == [b"[0] %d" % number for number in range(1000)]


def test_a_reader_that_does_not_read_fills_the_queue_and_blocks_nobody(pipes):
    reader, writer = pipes[0]
    terminal = Terminal(descriptors=(writer, pipes[1][1]))
    for _ in range(2 * MAX_QUEUED_BYTES // 1000):
        terminal.lines(0, "stdout", [b"x" * 1000])
    assert terminal.is_full
    assert not terminal.is_broken
    os.set_blocking(writer, False)  # where it would block, nothing is lost
    for _ in range(100):
        write_some(terminal)
    taken = len(os.read(reader, 1 << 20))
    while terminal.is_full:
        write_some(terminal)
        taken += len(os.read(reader, 1 << 20))
    assert taken > 0


def test_a_reader_that_has_gone_is_noticed(pipes):
    terminal = Terminal(descriptors=(pipes[0][1], pipes[1][1]))
    os.close(pipes[0][0])
    terminal.lines(0, "stdout", [b"x"])
    write_all(terminal)
    assert terminal.is_broken
    terminal.lines(0, "stdout", [b"x"])
    assert terminal.interests() == []


def test_a_listener_hears_each_line():
    heard, said = [], []
    listener = OutputListener(lambda *line: heard.append(line), said.append)
    listener.lines(1, "stderr", [b"a", b"b"])
    listener.say("done")
    assert heard == [(1, "stderr", b"a"), (1, "stderr", b"b")]
    assert said == ["done"]


def test_log_files_are_opened_before_anything_runs(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written") as failed:
        LogFiles(tmp_path / "file" / "logs", 1, print)
    assert "--log-dir" in str(failed.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is full")
def test_a_log_that_is_full_is_named_once_and_the_others_go_on(tmp_path):
    (tmp_path / "rank-0.log").symlink_to("/dev/full")
    said = []
    with LogFiles(tmp_path, 2, said.append) as logs:
        for _ in range(2):
            logs.write(0, b"x\n")
            logs.write(1, b"x\n")
    assert len(said) == 1
    assert "rank-0.log" in said[0]
    assert (tmp_path / "rank-1.log").read_bytes() == b"x\nx\n"
