"""What the workers of one machine share: ranges of a nameless file, mapped by all, and the words in them.

`posix_fallocate` takes the pages when they are asked for, so a full /dev/shm is an error here and not a
SIGBUS later; the temporary folder is the second choice.

The first range is the control page, words by which workers tell each other how far they are. Every word has
one writer, save the verdicts, which all who write them write alike. On x86 a store is seen after the stores
before it, and counters are read where they lie. Elsewhere a counter could be seen before the tensor that it
speaks of: there its value travels through a pipe, which orders both.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import platform
import select
import shutil
import struct
import sys
import tempfile
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import torch

from shoal.core import UsageError
from shoal.core.fork import close_in_children, keep_in_children
from shoal.tensors.memory import tensor_over

log = logging.getLogger(__name__)
_MEMORY_FOLDER = Path("/dev/shm")
_MAX_VIEWS = 4096
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_LINE = 8  # words of 8 bytes: a cache line, so that two writers never share one
ARRIVED, FINISHED, PUBLISHED, BEAT, LEFT, VERDICT, ASLEEP, ANNOUNCED = (line * _LINE for line in range(8))
DEVICE_ARRIVED, DEVICE_FINISHED, DEVICE_PUBLISHED = (line * _LINE for line in range(8, 11))
"""Words that a worker's GPU writes when it has come so far: its part of an operation is there, its work is
done; and the number of the last publication whose memory is written."""
NUM_READS = 4
"""Publications in GPU memory that one worker may be reading at the same time."""
READ_CLAIMS, READ_TICKETS, READS_DONE = (
    [(line + 3 * index) * _LINE for index in range(NUM_READS)] for line in range(11, 14)
)
_DESCRIPTIONS_AT = (11 + 3 * NUM_READS) * _LINE
FREED = 0x7FFFFFFF
"""Written over what the GPU of a lost worker owes, so that nobody's stream waits for it."""
DEVICE_CODE = 1 << 60
"""From here on, and below its negative, places that descriptions name are in GPU memory."""
MAX_AHEAD = 512
"""Operations that one worker may be ahead of the slowest: so many descriptions are kept."""
_DESCRIPTION_WORDS = 8
_FACTORS_AT = _DESCRIPTIONS_AT + MAX_AHEAD * _DESCRIPTION_WORDS
PUBLICATIONS = 512
"""Windows in which one worker may publish at the same time."""
PUBLICATION_WORDS = 16
NOT_YET = -1
_FAILED = -1
_MESSAGE = struct.Struct("<iiq")
_DOUBLE, _SINGLE = struct.Struct("=d"), struct.Struct("=f4x")
_IN_PIPES = (ARRIVED, FINISHED, PUBLISHED)
_WAKE = _MESSAGE.pack(0, ASLEEP, 0)
_READ_BYTES = 1 << 16
_FULL_S = 1e-4
IS_ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
"""In this order on all workers: a description names a dtype by its position."""


class MemoryFull(UsageError):
    """No folder has room for that much shared memory."""


def open_files(folder: Path | None) -> list[int]:
    """Makes nameless files for shared memory, best first; UsageError when no folder takes one."""
    temporary = Path(tempfile.gettempdir())
    folders = [folder] if folder else [_MEMORY_FOLDER] if _MEMORY_FOLDER.is_dir() else []
    files = []
    for place in [*folders, *([] if temporary in folders else [temporary])]:
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="shoal-", dir=place)
            Path(path).unlink()
            files.append(descriptor)
    if not files:
        raise UsageError(
            f"No file for shared memory can be created in {' or '.join(map(str, [*folders, temporary]))}.",
            next_step="make one of them writable, or set TMPDIR.",
        )
    return files


class MemoryRange(msgspec.Struct, frozen=True, array_like=True):
    """Where a segment lies in the files."""

    file: int
    """Index among the arena's files."""
    offset_bytes: int
    size_bytes: int


class Segment:
    """A range of shared memory: a region of `stride_bytes` at each rank, all mapped here."""

    def __init__(self, code: int, regions: Mapping[int, torch.Tensor], rank: int) -> None:
        self.code = code
        """A number for its beginning that is the same on all workers."""
        self.stride_bytes = regions[rank].numel()
        self.own_start = self.start = regions[rank].data_ptr()
        self.end = self.start + self.stride_bytes
        """Between start and end lies what can be found in it, the own region at least."""
        self._regions = regions
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def region(self, rank: int, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Views a part of a rank's region as a flat tensor, the same one every time: keep it to yourself."""
        key = (rank, offset_bytes, num_elements, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            found = self._views[key] = self.new_region(*key)
        return found

    def new_region(self, rank: int, offset_bytes: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Makes a flat tensor of a part of a rank's region, to give away."""
        return self._regions[rank][offset_bytes : offset_bytes + num_elements * dtype.itemsize].view(dtype)


class FileSegment(Segment):
    """A segment in a file, where the regions of all ranks follow each other."""

    def __init__(self, place: MemoryRange, memory: mmap.mmap, rank: int, num_ranks: int) -> None:
        self.place = place
        self.flat = tensor_over(memoryview(memory))
        stride = place.size_bytes // num_ranks
        regions = {each: self.flat[each * stride : (each + 1) * stride] for each in range(num_ranks)}
        super().__init__(place.file << 56 | place.offset_bytes, regions, rank)
        self.start = self.flat.data_ptr()
        self.end = self.start + place.size_bytes
        self._memory = memory

    def discard(self) -> None:
        """Gives the pages back to the system, while the mapping may live on."""
        if hasattr(mmap, "MADV_REMOVE"):
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE)


AnySegment = TypeVar("AnySegment", bound=Segment)


class MappedMemory(Generic[AnySegment]):
    """The segments that a worker has mapped, found by a tensor in them or by a number of a peer's."""

    def __init__(self) -> None:
        self._segments: list[AnySegment] = []

    def find(self, tensor: torch.Tensor) -> AnySegment | None:
        """Finds the segment that holds a tensor's memory; None for memory that is not the group's."""
        pointer = tensor.data_ptr()
        for segment in self._segments:
            if segment.start <= pointer < segment.end:
                return segment
        return None

    def find_own(self, tensor: torch.Tensor) -> tuple[AnySegment, int] | None:
        """Finds where in this worker's region a tensor lies; None for other memory and tensors with gaps."""
        segment = self.find(tensor)
        if segment is None or not tensor.is_contiguous():
            return None
        offset = tensor.data_ptr() - segment.own_start
        is_inside = offset >= 0 and offset + tensor.numel() * tensor.element_size() <= segment.stride_bytes
        return (segment, offset) if is_inside else None

    def at(self, code: int) -> tuple[AnySegment, int]:
        """Finds the segment, and the offset in its regions, that a number names."""
        for segment in self._segments:
            if 0 <= code - segment.code < segment.stride_bytes:
                return segment, code - segment.code
        raise UsageError(
            "Another worker refers to memory of the group that this one has given back.",
            next_step="call free() at the same place on all workers.",
        )

    def forget(self, segment: AnySegment) -> None:
        """Forgets a segment; it is unmapped when its last tensor is gone."""
        self._segments.remove(segment)


class Arena(MappedMemory[FileSegment]):
    """The files, and the segments that are mapped of them; only the coordinator makes them grow."""

    def __init__(self, files: Sequence[int], rank: int, num_ranks: int) -> None:
        super().__init__()
        self.files = list(files)
        """Descriptors, best first; ranges of bytes of the first one serve as locks."""
        self._rank = rank
        self._num_ranks = num_ranks
        for descriptor in self.files:
            close_in_children(descriptor)

    def grow(self, region_bytes: int) -> MemoryRange:
        """Takes pages for a region of each rank; MemoryFull when no file has room."""
        size = region_bytes * self._num_ranks
        full: list[str] = []
        for index, descriptor in enumerate(self.files):
            offset = os.fstat(descriptor).st_size
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(descriptor, offset, size)
                else:
                    os.ftruncate(descriptor, offset + size)
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, offset)
                full.append(_describe_full(descriptor))
                continue
            if full:
                log.warning(
                    "shared memory: %s has no room for %.1f MB more; a file in %s is used instead, which may "
                    "be slower. Try: free it, or more of it (docker run --shm-size, mount -o remount,size=)",
                    " and ".join(full),
                    size / 1e6,
                    tempfile.gettempdir(),
                )
            return MemoryRange(index, offset, size)
        raise MemoryFull(
            f"No room for {size / 1e6:.1f} MB of shared memory: {' and '.join(full)} full.",
            next_step="free some space there, or point TMPDIR to a folder with more.",
        )

    def map(self, place: MemoryRange) -> FileSegment:
        """Maps a segment; its pages are looked up at once, not one by one in the first round."""
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if sys.platform == "linux" else 0)
        memory = mmap.mmap(self.files[place.file], place.size_bytes, flags, offset=place.offset_bytes)
        segment = FileSegment(place, memory, self._rank, self._num_ranks)
        self._segments.append(segment)
        return segment

    def close(self) -> None:
        """Closes the files; what is mapped stays for as long as there are tensors in it."""
        self._segments.clear()
        for descriptor in self.files:
            keep_in_children(descriptor)
            os.close(descriptor)
        self.files.clear()


def _describe_full(descriptor: int) -> str:
    target = f"file {descriptor}"
    with contextlib.suppress(OSError):
        target = str(Path(f"/proc/self/fd/{descriptor}").readlink().parent)
    with contextlib.suppress(OSError):
        return f"{target} ({shutil.disk_usage(target).free / 1e6:.1f} MB free)"
    return target


def code_of(dtype: torch.dtype) -> int:
    """Finds the number by which descriptions name a dtype."""
    try:
        return DTYPES.index(dtype)
    except ValueError:
        raise UsageError(f"Tensors of {dtype} cannot be exchanged.", next_step="view it as uint8.") from None


def failed_beat(culprit: int | None) -> int:
    """Makes the last beat of a worker that gives up, a negative one; it tells because of whose loss."""
    return _FAILED if culprit is None else _FAILED - 1 - culprit


def culprit_of(beat: int) -> int | None:
    """Finds the rank because of which a worker has given up, if its last beat tells."""
    return _FAILED - 1 - beat if beat < _FAILED else None


class _Heard:
    """The words of another rank where counters come through a pipe."""

    def __init__(self, page: ControlPage, rank: int) -> None:
        self._get = partial(page.get, rank)

    def __getitem__(self, name: int) -> int:
        return self._get(name)


class ControlPage:
    """The words of all ranks, which everybody reads; a worker writes its own, and verdicts."""

    def __init__(self, segment: FileSegment, rank: int, size: int) -> None:
        self.memory = segment.flat
        self._address = segment.start
        self._stride_bytes = segment.stride_bytes
        self._rank = rank
        self._size = size
        words, stride = segment.flat.numpy().data.cast("B").cast("q"), segment.stride_bytes // 8
        self._of = [words[each * stride : (each + 1) * stride] for each in range(size)]
        """The words of each rank."""
        self._own = self._of[rank]
        self._numbers_of = [each.cast("B").cast("d") for each in self._of]
        """The same words, as numbers of double precision."""
        self._left = words[LEFT::stride]
        self._verdicts = words[VERDICT::stride]
        self._all_there = memoryview(array("q", [NOT_YET] * size))
        self._publications_at = _FACTORS_AT + MAX_AHEAD * 2 * size
        self._told: list[dict[int, int]] = [dict.fromkeys(_IN_PIPES, 0) for _ in range(size)]
        """The counters that came through the pipe, by rank."""
        counters: list[memoryview | _Heard] = list(self._of)
        if not IS_ORDERED:
            counters = [self._of[each] if each == rank else _Heard(self, each) for each in range(size)]
        self.counters: Sequence[memoryview | _Heard] = counters
        """By rank, then by name, what `get` gives: an operation reads twenty, and each call counts."""

    @staticmethod
    def region_bytes(size: int) -> int:
        """Says how much of the page's memory each rank needs."""
        words = _FACTORS_AT + MAX_AHEAD * 2 * size + PUBLICATIONS * PUBLICATION_WORDS
        return -(-words * 8 // 4096) * 4096

    def clear(self) -> None:
        """Prepares the page before its first use: nobody has left, nobody is judged."""
        for words in self._of:
            words[LEFT] = words[VERDICT] = NOT_YET

    def get(self, rank: int, name: int) -> int:
        """Reads a counter of a rank."""
        if not IS_ORDERED and rank != self._rank and name in _IN_PIPES:
            return self._told[rank][name]
        return self._of[rank][name]

    def set(self, name: int, value: int) -> None:
        """Writes a counter of this worker; `WakePipes.tell` is for those that others wait for."""
        self._own[name] = value

    def take_in(self, rank: int, name: int, value: int) -> None:
        """Remembers a counter that has come through the pipe."""
        if name in _IN_PIPES:
            self._told[rank][name] = value

    def judge(self, rank: int, value: int) -> None:
        """Says that a rank is gone after its operation `value`; the first verdict stands.

        One that woke up when it was judged, and went one operation further, must not be judged again by its
        end: the others have begun that operation without it.
        """
        if self._of[rank][VERDICT] == NOT_YET:
            self._of[rank][VERDICT] = value

    def gone_after(self, rank: int) -> int:
        """Reads the last operation that a rank takes part in, NOT_YET for one that is there."""
        words = self._of[rank]
        left = words[LEFT]
        return left if left != NOT_YET else words[VERDICT]

    def is_complete(self) -> bool:
        """Tells whether nobody is gone, in one look: one at each rank takes longer than a whole count."""
        return self._left == self._all_there and self._verdicts == self._all_there

    def describe(self, seq: int, words: Sequence[int], factors: Sequence[float] | None = None) -> None:
        """Says what this worker's operation `seq` is."""
        at = _DESCRIPTIONS_AT + seq % MAX_AHEAD * _DESCRIPTION_WORDS
        self._own[at : at + len(words)] = array("q", words)
        if factors is not None:
            for at, factor in enumerate(factors, self._factors_at(seq)):
                self._numbers_of[self._rank][at] = factor

    def description(self, rank: int, seq: int) -> list[int]:
        """Reads what a rank's operation `seq` is; valid once it has arrived there."""
        at = _DESCRIPTIONS_AT + seq % MAX_AHEAD * _DESCRIPTION_WORDS
        return self._of[rank][at : at + _DESCRIPTION_WORDS].tolist()

    def factor(self, rank: int, seq: int, receiver: int) -> float:
        """Reads what a rank multiplies with before it sends to `receiver`."""
        return self._numbers_of[rank][self._factors_at(seq) + receiver]

    def _factors_at(self, seq: int) -> int:
        """Finds where a rank's factors of an operation lie, one for each receiver; its weights lie behind."""
        return _FACTORS_AT + seq % MAX_AHEAD * 2 * self._size

    # --- what GPUs say and read ---

    def set_weights(self, seq: int, weights: Mapping[int, float], *, is_double: bool) -> int:
        """Writes the weights of others in this worker's exchange `seq`, 8 bytes for each rank; their address.

        This worker's GPU reads them when the others' parts are there. Until then one that is lost can be left
        out. Numbers of single precision have zeros behind them, so that zeros are nothing in both.
        """
        at, number = self._factors_at(seq) + self._size, _DOUBLE if is_double else _SINGLE
        for rank in range(self._size):
            number.pack_into(self._own, 8 * (at + rank), weights.get(rank, 0.0))
        return self.address(self._rank, at)

    def leave_out(self, rank: int) -> None:
        """Lets a rank that is gone weigh nothing in all exchanges to which its GPU has not given its part.

        Whoever notices the loss does so for everybody, before it frees everybody's streams. Others may be one
        exchange ahead of it.
        """
        seq = self.get(rank, ARRIVED) + 1
        while seq > 0 and not self.was_done_on_device(rank, DEVICE_ARRIVED, seq):
            for numbers in self._numbers_of:
                numbers[self._factors_at(seq) + self._size + rank] = 0.0
            seq -= 1

    def address(self, rank: int, name: int) -> int:
        """Gives the address of a word, for a GPU that writes it or waits for it."""
        return self._address + rank * self._stride_bytes + name * 8

    def is_done_on_device(self, rank: int, name: int, seq: int) -> bool:
        """Tells whether a rank's GPU has said so of an operation, and not somebody else for it."""
        return seq <= self._of[rank][name] < FREED

    def was_done_on_device(self, rank: int, name: int, seq: int) -> bool:
        """Tells the same of a rank that may have been freed: a GPU writes the lower half of a word alone."""
        word = self._of[rank][name]
        lower = word & 0xFFFFFFFF
        return seq <= (word >> 32 if lower == FREED else lower)

    def free_device(self, rank: int) -> None:
        """Lets no stream wait for the GPU of a rank that is gone; what it has said is kept beside it."""
        for name in (DEVICE_ARRIVED, DEVICE_FINISHED, *READS_DONE):
            word = self._of[rank][name]
            if word & 0xFFFFFFFF != FREED:
                self._of[rank][name] = word << 32 | FREED

    def last_given(self, rank: int) -> int:
        """Finds the last operation to which a rank that is gone has given its part, on its GPU too.

        All who ask come to the same number: neither the worker nor its GPU writes any more.
        """
        arrived = self.get(rank, ARRIVED)
        for seq in range(max(0, arrived - MAX_AHEAD) + 1, arrived + 1):
            is_on_device = any(abs(word) >= DEVICE_CODE for word in self.description(rank, seq)[3:5])
            if is_on_device and not self.was_done_on_device(rank, DEVICE_ARRIVED, seq):
                return seq - 1
        return arrived

    def publication(self, rank: int, index: int) -> list[int]:
        """Reads one entry of a rank's table of publications; `window` says what the words mean."""
        at = self._publications_at + index * PUBLICATION_WORDS
        return self._of[rank][at : at + PUBLICATION_WORDS].tolist()

    def set_publication(self, index: int, first: int, *values: int) -> None:
        """Writes words of an entry of this worker's table, one after the other."""
        for at, value in enumerate(values, self._publications_at + index * PUBLICATION_WORDS + first):
            self._own[at] = value


class WakePipes:
    """Tells the other workers that a counter has changed, and wakes those that sleep; one pipe for each."""

    def __init__(self, rank: int, own: int, pipes: Sequence[int], control: ControlPage) -> None:
        self.must_listen = not IS_ORDERED
        """Whether counters of others come through the pipe, and `take_in` reads them."""
        self._rank = rank
        self._own = own
        self._pipes = list(pipes)
        self._control = control
        self._others = [other for other in range(len(pipes)) if other != rank]
        self._unread = b""
        self._poll = select.poll()
        self._poll.register(own, select.POLLIN)
        for descriptor in {own: None, **dict.fromkeys(self._pipes)}:
            close_in_children(descriptor)

    @staticmethod
    def new_pipe() -> tuple[int, int]:
        """Makes a worker's own pipe: the descriptors to read and to write."""
        ends = os.pipe()
        for descriptor in ends:
            os.set_blocking(descriptor, False)
        return ends

    def tell(self, name: int, value: int) -> None:
        """Sets a counter of this worker, for all to see."""
        self._control.set(name, value)
        if not IS_ORDERED:
            message = _MESSAGE.pack(self._rank, name, value)
            for rank in self._others:
                self._send(rank, message)
            return
        for rank in self._others:
            if self._control.counters[rank][ASLEEP]:
                self._send(rank, _WAKE)

    def wake(self, rank: int) -> None:
        """Wakes a rank, if it sleeps."""
        if self._pipes and (not IS_ORDERED or self._control.get(rank, ASLEEP)):
            self._send(rank, _WAKE)

    def wake_self(self) -> None:
        """Lets this worker's waiting thread look again; from any thread."""
        if self._pipes:
            self._send(self._rank, _WAKE)

    def wake_others(self) -> None:
        """Wakes all others that sleep."""
        for rank in self._others:
            self.wake(rank)

    def take_in(self) -> None:
        """Reads what others have told, where their counters cannot be read as they are."""
        if self.must_listen:
            self._drain()

    def sleep(self, timeout_s: float) -> None:
        """Sleeps until somebody tells something; the caller has said ASLEEP and looked once more."""
        self._poll.poll(timeout_s * 1e3)
        self._drain()

    def close(self) -> None:
        """Closes all pipes; telling only sets the counter afterwards."""
        descriptors = {self._own: None, **dict.fromkeys(self._pipes)}
        self._pipes, self._others = [], []
        for descriptor in descriptors:
            keep_in_children(descriptor)
            os.close(descriptor)

    def _send(self, rank: int, message: bytes) -> None:
        while True:
            try:
                os.write(self._pipes[rank], message)
            except BlockingIOError:
                if message is _WAKE or self._control.gone_after(rank) != NOT_YET:
                    return  # one that is not yet read is enough
                self._drain()  # it may be waiting for us to do the same
                time.sleep(_FULL_S)
            except BrokenPipeError:
                return
            else:
                return

    def _drain(self) -> None:
        if not self._pipes:
            return
        with contextlib.suppress(BlockingIOError):
            heard = self._unread + os.read(self._own, _READ_BYTES)
            whole = len(heard) - len(heard) % _MESSAGE.size
            for rank, name, value in _MESSAGE.iter_unpack(heard[:whole]):
                self._control.take_in(rank, name, value)
            self._unread = heard[whole:]
