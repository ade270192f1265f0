import pytest

from shoal.core import ProtocolError
from shoal.transport.streams.decoder import Assembly, FrameDecoder


def views(*sizes):
    return [memoryview(bytearray(size)) for size in sizes]


def test_pieces_follow_the_views_and_skip_empty_ones():
    memory = views(10, 0, 5, 20)
    assembly = Assembly(memory, 35, lambda: None)
    targets = assembly.next_targets(12, is_from_start=False)
    assert [len(target) for target in targets] == [10, 2]
    assert assembly.left_bytes == 23
    targets = assembly.next_targets(23, is_from_start=False)
    assert [len(target) for target in targets] == [3, 20]
    assert [target.obj for target in targets] == [memory[2].obj, memory[3].obj]
    assert assembly.left_bytes == 0


def test_more_than_was_announced_is_refused():
    assembly = Assembly(views(10), 10, lambda: None)
    assembly.next_targets(4, is_from_start=False)
    with pytest.raises(ProtocolError, match=r"7 bytes arrived for a message that lacks 6"):
        assembly.next_targets(7, is_from_start=False)


def test_without_room_everything_is_dropped_until_a_new_start():
    assembly = Assembly((), 10, lambda: None)
    assert assembly.next_targets(6, is_from_start=False) is None
    with pytest.raises(ProtocolError, match="not asked"):
        assembly.next_targets(6, is_from_start=True)
    assembly.views = views(10)
    assert assembly.next_targets(4, is_from_start=False) is None  # the rest of the first attempt
    assert [len(target) for target in assembly.next_targets(7, is_from_start=True)] == [7]
    assert [len(target) for target in assembly.next_targets(3, is_from_start=False)] == [3]
    assert assembly.left_bytes == 0
    with pytest.raises(ProtocolError, match="not asked"):
        assembly.next_targets(1, is_from_start=True)


def test_a_new_start_that_nobody_asked_for_is_refused():
    with pytest.raises(ProtocolError, match="not asked"):
        Assembly(views(10), 10, lambda: None).next_targets(5, is_from_start=True)


def test_a_body_that_came_along_is_put_into_its_buffers():
    arrivals, done = FrameDecoder(None, 100).arrivals, []
    memory = views(3, 0, 2)
    arrivals.receive(1, memory, memoryview(b"abcde"), lambda: done.append(1))
    assert [bytes(view) for view in memory] == [b"abc", b"", b"de"]
    assert done == [1]
    assert len(arrivals) == 0
    with pytest.raises(ProtocolError, match="announced 5 bytes and carries 4"):
        arrivals.receive(1, views(5), memoryview(b"abcd"), lambda: None)


def test_messages_of_several_calls_arrive_side_by_side():
    decoder = FrameDecoder(None, 100)
    arrivals, done = decoder.arrivals, []
    for call_id in (1, 3):
        arrivals.receive(call_id, views(10), memoryview(b""), lambda call_id=call_id: done.append(call_id))
    arrivals.receive_later(5, 10, lambda: done.append(5))
    assert decoder.expects_chunk
    assert arrivals.ids_with_room() == [1, 3]
    assert arrivals.targets(99, 10, is_from_start=False) is None
    arrivals.targets(3, 10, is_from_start=False)
    arrivals.on_chunk_end(3)
    assert done == [3]
    arrivals.forget(1)
    arrivals.forget(1)
    arrivals.make_room(5, views(10))
    assert arrivals.ids_with_room() == [5]
    arrivals.targets(5, 10, is_from_start=True)
    arrivals.on_chunk_end(5)
    assert done == [3, 5]
    assert not decoder.expects_chunk


@pytest.mark.parametrize("body", [b"", b"abc"])
def test_a_call_has_one_message_at_a_time(body):
    arrivals = FrameDecoder(None, 100).arrivals
    arrivals.receive(1, views(10), memoryview(b""), lambda: None)
    with pytest.raises(ProtocolError, match="before the one before it had ended"):
        arrivals.receive(1, views(3), memoryview(body), lambda: None)
