"""How benchmarks run processes: children with one function each, workers in lock-step, and pools of tasks.

`child` starts a fresh interpreter that runs one function, `module:name`, with the arguments that it is given
and its `Parent`; both sides talk in lines of JSON. A child ends when the function returns; one that serves
until its parent has had enough calls `parent.wait_for_end()`, or takes orders with `parent.receive()` until
there are no more.

`LocalWorkers` starts workers that take part in one group and gives them orders in lock-step. A worker is an
object whose methods are the orders that it takes, made by a class or function that is called with its
`BenchPlace`, its arguments and a stack for what it opens. `ranks` has the same for processes that a launcher
has started, here or on other hosts.

`run_tasks` has processes work through a list of tasks that do not depend on each other.

Importing this does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import os
import secrets
import selectors
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol, Self, TypeVar, cast

import msgspec

from shoal.core import BenchmarkError, Deadline, LoopThread, UsageError
from shoal.core.loop import own_the_process
from shoal.core.placement import Placement
from shoal.core.processes import obey_interrupts
from shoal.core.run_options import EncryptChoice, RunOptions

if TYPE_CHECKING:
    import torch

    from shoal.group.base import Group, GroupSettings

T = TypeVar("T")
_ENDING_S = 10.0
_INTERRUPTED_S = 3.0
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_GROUP_TIMEOUT_S = 120.0
_BESIDE = -1  # the rank of a helper
USUAL_SWITCH_INTERVAL_S = 0.005
Backend = Literal["gloo", "nccl"]


# --- children ---


class Child:
    """A running child, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes], name: str) -> None:
        self._process = process
        self._name = name
        self._read = bytearray()

    @property
    def has_more(self) -> bool:
        """Whether something was read already that `receive` would give: a selector does not know of it."""
        return b"\n" in self._read

    @property
    def exit_code(self) -> int | None:
        """None while it runs, negative when a signal ended it."""
        return self._process.poll()

    def fileno(self) -> int:
        """Readable when there is something to receive that was not read yet (`has_more`); for selectors."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def order(self, **message: Any) -> None:
        """Send something that JSON can carry; one that has ended does not hear it, as `receive` will say."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def ask(self, order: str, **details: Any) -> Any:
        """Give an order, and wait for its answer; for children that `serve`."""
        self.order(order=order, details=details)
        return self.expect()["answer"]

    def end(self) -> None:
        """There are no more orders: it may end. Does not wait for that."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def receive(self) -> dict[str, Any] | None:
        """The next thing that the child tells, None at its end; BenchmarkError when it failed."""
        while not self.has_more and (some := os.read(self.fileno(), _READ_BYTES)):
            self._read += some
        line, is_whole, self._read = self._read.partition(b"\n")
        if not is_whole:
            try:
                code = self._process.wait(_ENDING_S)
            except subprocess.TimeoutExpired:
                self.kill()
                raise BenchmarkError(f"{self._name} told everything, and did not end.") from None
            if code:
                raise BenchmarkError(
                    f"{self._name} ended with {describe_exit(code)}.",
                    cause="what it printed before that is above.",
                )
            return None
        message: dict[str, Any] = msgspec.json.decode(line)
        if "failure" in message:
            raise BenchmarkError(f"{self._name} failed: {message['failure']}", cause=message["trace"])
        return message

    def expect(self) -> dict[str, Any]:
        """The next thing that the child tells; BenchmarkError when it ended instead."""
        message = self.receive()
        if message is None:
            raise BenchmarkError(f"{self._name} ended before it was ready.")
        return message


class Parent:
    """The parent, as a child sees it."""

    def __init__(self, stdin: BinaryIO, stdout: BinaryIO) -> None:
        self._stdin = stdin
        self._stdout = stdout

    def tell(self, **message: Any) -> None:
        """Send something that JSON can carry."""
        self._stdout.write(msgspec.json.encode(message) + b"\n")
        self._stdout.flush()

    def fail(self, error: Exception) -> None:
        """Say what went wrong; whoever receives it meets a BenchmarkError."""
        self.tell(failure=f"{type(error).__name__}: {error}", trace=traceback.format_exc(limit=-3))

    def receive(self) -> dict[str, Any] | None:
        """The next order; None when the parent has had enough, or is gone."""
        line = self._stdin.readline()
        if not line:
            return None
        order: dict[str, Any] = msgspec.json.decode(line)
        return order

    def leave(self) -> None:
        """End this process now: everything is told, and to take a large world apart would take minutes."""
        sys.stderr.flush()
        self._stdout.flush()
        os._exit(0)

    def wait_for_end(self) -> None:
        """Block until the parent has had enough, or is gone."""
        while self._stdin.read(1):
            pass


@contextlib.contextmanager
def child(
    function: str,
    arguments: dict[str, Any],
    *,
    source: Path | None = None,
    name: str = "",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Run `module:name` in a new interpreter for as long as the block lasts.

    `source` is a folder that holds the package to use, for comparing versions; by default the one in use.
    `name` is what errors call it. `variables` count where the environment has none of that name.
    """
    environment = {**(variables or {}), **os.environ}
    if source is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(source), environment.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        )
    has_workers = source is None or (source / "shoal" / "bench" / "workers.py").is_file()
    module = "shoal.bench.workers" if has_workers else "shoal.bench.children"  # as older versions have it
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        # in the background a script's Ctrl-C is not for us, and so not for our children, who would obey it
        process_group=0 if signal.getsignal(signal.SIGINT) is signal.SIG_IGN else None,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    running = Child(process, name or f"The process that runs {function}")
    try:
        running.order(function=function, arguments=arguments)
        yield running
        running.end()
        process.wait(_ENDING_S)
    finally:
        _end(process)
        process.stdout.close()
        running.end()
        process.wait()


@contextlib.contextmanager
def children(
    function: str,
    arguments: Sequence[dict[str, Any]],
    *,
    name: str,
    variables: Mapping[str, str] | None = None,
) -> Iterator[list[Child]]:
    """Run `module:name` in several new interpreters, each with its own arguments.

    All of them are told to end, or killed after an error, before one is waited for.
    """
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                child(function, own, name=f"{name} {number} of {len(arguments)}", variables=variables)
            )
            for number, own in enumerate(arguments, 1)
        ]
        try:
            yield started
        except BaseException:
            for each in started:
                each.kill()
            raise
        for each in started:
            each.end()


def client_processes(
    function: str, arguments: dict[str, Any], num_clients: int, num_processes: int
) -> contextlib.AbstractContextManager[list[Child]]:
    """Run `module:name` in processes that share clients: each is told the `numbers` of its own."""
    shares = [list(range(rank, num_clients, num_processes)) for rank in range(num_processes)]
    each = [{**arguments, "numbers": numbers} for numbers in shares]
    return children(function, each, name="Client process", variables={"OMP_NUM_THREADS": "1"})


def ask_all(asked: Sequence[Child], order: str, **details: Any) -> list[Any]:
    """Give all of them the same order at once, and return their answers; for children that `serve`."""
    for process in asked:
        process.order(order=order, details=details)
    return [process.expect()["answer"] for process in asked]


def resident_bytes(pid: int) -> int:
    """Memory of a process; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let it take down what it has started; a moment later it is killed."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_INTERRUPTED_S)
        except subprocess.TimeoutExpired:
            process.kill()


def end_with_parent() -> None:
    """For a child that does not listen to its parent all the time: be interrupted when that is gone.

    At once on Linux, elsewhere when it next tells or receives something. SIGTERM interrupts it too.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def describe_exit(code: int) -> str:
    """An exit status in words."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


# --- a worker's place ---


class BenchPlace(msgspec.Struct, frozen=True):
    """Where a worker is among all: what it computes on, and the groups that it opens with the others."""

    rank: int
    """-1 for a helper, which is beside the workers."""
    size: int
    key: str
    """Tells these workers from all others."""
    folder: str = ""
    """For files that the workers share; it goes with them. Empty where a launcher has started the
    workers."""
    machines: tuple[int, ...] = ()
    """The machine of each rank, where a launcher has started them."""

    @property
    def local_rank(self) -> int:
        """The rank among the workers of this machine: all are on one unless a launcher has started them."""
        return self._mates(self.size).index(self.rank) if self.machines else self.rank

    def set_up_process(self) -> None:
        """Make this process what a user's worker is: one thread that computes, and Python's own pace."""
        import torch

        sys.setswitchinterval(USUAL_SWITCH_INTERVAL_S)
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)  # momentum that fades away would slow down one model before another

    def device(self, kind: str) -> torch.device:
        """Say where this worker computes, 'cpu' or 'cuda': GPUs go by the rank on this machine, in turn.

        Workers share GPUs where there are fewer of them. UsageError where there is none.
        """
        import torch

        if kind == "cpu":
            return torch.device("cpu")
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if num_gpus == 0:
            raise UsageError(
                f"Worker {self.rank} is to compute on a GPU, and torch finds none on its machine.",
                next_step="give --device cpu, or see what `shoal doctor` says there.",
            )
        device = torch.device("cuda", self.local_rank % num_gpus)
        torch.cuda.set_device(device)
        return device

    def open_group(
        self,
        name: str,
        *,
        among: int | None = None,
        workers_per_machine: int | None = None,
        num_servers: int = 0,
        backend: Backend | None = None,
        encrypt: EncryptChoice = "auto",
    ) -> Group:
        """Open the group of the first `among` workers, or of all; each name is used once. Collective.

        It is in shared memory on one machine; over sockets if that is split into several, or a backend is
        asked for. With servers beside the workers, those are to be started (`start_servers`). Workers of a
        launcher get what `shoal.init()` opens. `encrypt` is of streams between machines.
        """
        if num_servers:
            return self.open_with_servers(name, num_servers)
        from shoal.group.base import GroupSettings
        from shoal.group.host import open_host_group
        from shoal.group.solo import SoloGroup

        size = among or self.size
        settings = GroupSettings(
            f"{self.key} {name}",
            timeout_s=_GROUP_TIMEOUT_S,
            workers_per_machine=workers_per_machine,
            backend=backend,
            encrypt=encrypt,
        )
        if self.machines:
            return self._open_launched(size, settings)
        if backend is not None or size > (workers_per_machine or size):
            return self._open_cluster(name, size, settings)
        return SoloGroup() if size == 1 else open_host_group(self._placement(size), settings)

    def open_with_servers(self, name: str, num_servers: int, server: int | None = None) -> Group:
        """Open a group as `open_group` does, with servers beside the workers; `server`: as one of them."""
        from shoal.group.base import GroupSettings
        from shoal.group.host import open_host_group
        from shoal.group.opening import WithServers
        from shoal.group.solo import SoloGroup

        if self.machines:
            raise UsageError(
                "Parameter servers are started beside workers of this machine alone.",
                next_step="leave parameter-server and staleness-aware out, or start servers and workers by "
                "hand: --ps-hosts, --worker-hosts, --job-name and --task-index.",
            )
        own = SoloGroup() if server is not None else self.open_group(name)
        rank = num_servers + self.rank if server is None else server
        size = num_servers + self.size
        settings = GroupSettings(f"{self.key}-{name}-servers", timeout_s=_GROUP_TIMEOUT_S)
        everybody = open_host_group(Placement(rank, size, rank, size, "bench"), settings)
        return WithServers(own, everybody, num_servers)

    @contextlib.contextmanager
    def gloo(self) -> Iterator[None]:
        """Have torch.distributed over gloo, among all workers, for as long as the block lasts.

        It goes through loopback on this machine, and else through the interface that a group has found.
        """
        from torch import distributed

        from shoal.group.cluster.rendezvous import Rendezvous
        from shoal.group.cluster.torch_world import destroy_world

        ranks: dict[str, Any] = {"rank": self.rank, "world_size": self.size}
        if self.machines:
            deadline = Deadline.after(_GROUP_TIMEOUT_S)
            meeting = Rendezvous.open(self._placement(self.size), deadline, f"{self.key} gloo")
            distributed.init_process_group("gloo", store=meeting.store, **ranks)
        else:
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            distributed.init_process_group("gloo", (Path(self.folder) / "gloo").as_uri(), **ranks)
        try:
            yield
        finally:
            destroy_world()

    def _open_launched(self, size: int, settings: GroupSettings) -> Group:
        from shoal.group.opening import open_group

        asked = RunOptions.from_environment()
        settings = msgspec.structs.replace(
            settings, network_interface=asked.network_interface, all_reduce=asked.all_reduce
        )
        if settings.encrypt == "auto":
            settings = msgspec.structs.replace(settings, encrypt=asked.encrypt)
        return open_group(self._placement(size), settings, settings.key)

    def _open_cluster(self, name: str, size: int, settings: GroupSettings) -> Group:
        from torch import distributed

        from shoal.group.cluster import open_cluster_group
        from shoal.group.cluster.rendezvous import Rendezvous, WorkerAddress

        stores: Any = distributed  # whose stubs leave the stores out
        placement = self._placement(size)
        file = str(Path(self.folder) / f"meeting-{name}-{size}")
        meeting = Rendezvous(stores.FileStore(file, size), self.rank, size)
        here = WorkerAddress.here(placement, workers_per_machine=settings.workers_per_machine)
        everybody = meeting.meet(here, Deadline.after(_GROUP_TIMEOUT_S))
        return open_cluster_group(placement, settings, everybody, meeting)

    def _placement(self, size: int) -> Placement:
        if not self.machines:
            return Placement(self.rank, size, self.rank, size, "bench")
        mates, placed = self._mates(size), Placement.from_environment()
        return Placement(
            self.rank,
            size,
            mates.index(self.rank),
            len(mates),
            placed.source,
            placed.rendezvous,
            self.machines[self.rank],
        )

    def _mates(self, size: int) -> list[int]:
        """Return those of the first `size` ranks that are on this machine."""
        here = self.machines[self.rank]
        return [rank for rank in range(size) if self.machines[rank] == here]


# --- workers in lock-step ---


class WorkerSettings(msgspec.Struct, frozen=True):
    """Who the workers are."""

    function: str
    """`module:name`, called with a `BenchPlace`, `arguments` and an ExitStack; returns what takes orders."""
    size: int
    arguments: dict[str, Any] = {}
    answer_s: float = 180.0
    """Whoever has not answered an order after this is taken for stuck."""


class Helper(msgspec.Struct, frozen=True):
    """A process beside the workers, which takes no orders and ends when they do: a parameter server."""

    function: str
    """`module:name`, called as any child's, with `place` and `arguments` among its arguments."""
    name: str
    """The name that errors call it by."""
    arguments: dict[str, Any] = {}


class Workers(Protocol):
    """The workers of a start, as its scenario sees them."""

    @property
    def is_running(self) -> bool:
        """Whether workers are there that have followed all orders so far."""

    def ask(self, order: str, *, among: int | None = None, **details: Any) -> list[Any]:
        """The answers of the first `among` workers, or of all, by rank."""

    def start_helper(self, helper: Helper) -> None:
        """Start a process beside the workers."""


def start_servers(workers: Workers, function: str, num_servers: int, **role: Any) -> None:
    """Start parameter servers beside the workers; each is told its role, and which `server` it is."""
    for server in range(num_servers):
        workers.start_helper(Helper(function, f"server {server}", {**role, "server": server}))


OpenWorkers = Callable[[WorkerSettings], contextlib.AbstractContextManager[Workers]]
"""How a scenario gets its workers for a block: `LocalWorkers` itself, or what `ranks` puts in its place."""


class LocalWorkers:
    """The workers, as the process sees them that gives the orders; a context manager.

    They are started by the first order. Once one of them has failed all are ended, and the next order starts
    them afresh: `is_running` tells whether they still know what they were told.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._helpers: list[Child] = []
        self._place: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether workers are there that have followed all orders so far."""
        return bool(self._children)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None and self._children:
            self._end()
        else:
            self._abandon()

    def ask(self, order: str, *, among: int | None = None, **details: Any) -> list[Any]:
        """The answers by rank; BenchmarkError names the rank that failed, and ends all of them."""
        if not self._children:
            self._start()
        asked = self._children[:among]
        for worker in asked:
            worker.order(order=order, details=details)
        return self._gather(lambda worker: worker.expect()["answer"], f"'{order}'", len(asked))

    def start_helper(self, helper: Helper) -> None:
        """Start a process for as long as the workers are there; it is killed with them when one fails.

        Its failure is one of the order that is under way then, or of the next.
        """
        if not self._children:
            self._start()
        self._helpers.append(self._begin("run_helper", helper, _BESIDE, helper.name))

    def _start(self) -> None:
        settings = self._settings
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-bench-"))
        key = f"bench-{secrets.token_hex(8)}"
        self._place = {"size": settings.size, "key": key, "folder": folder}
        for rank in range(settings.size):
            self._children.append(
                self._begin("run_worker", settings, rank, f"rank {rank} of {settings.size}")
            )

    def _begin(self, function: str, who: WorkerSettings | Helper, rank: int, name: str) -> Child:
        arguments = {
            "function": who.function,
            "place": {"rank": rank, **self._place},
            "arguments": who.arguments,
        }
        return self._stack.enter_context(_tuned_child(function, arguments, name))

    def _end(self) -> None:
        """All at once: they may have to say goodbye to each other."""
        for worker in (*self._children, *self._helpers):
            worker.end()
        self._gather(lambda worker: worker.receive(), "the end", len(self._children))
        for helper in self._helpers:
            self._see_off(helper)
        self._children, self._helpers = [], []
        self._stack.close()

    def _see_off(self, helper: Child) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(helper, selectors.EVENT_READ)
            while selector.select(self._settings.answer_s):
                if helper.receive() is None:
                    return
        helper.kill()
        raise BenchmarkError(
            f"a process beside the workers goes on {self._settings.answer_s:g} s after them."
        )

    def _abandon(self) -> None:
        for worker in (*self._children, *self._helpers):
            worker.kill()
        self._children, self._helpers = [], []
        self._stack.close()

    def _gather(self, take: Callable[[Child], T], what: str, num_asked: int) -> list[T]:
        answers: dict[int, T] = {}
        failures: dict[int, BenchmarkError] = {}
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._children[:num_asked]):
                selector.register(worker, selectors.EVENT_READ, rank)
            for helper in self._helpers:
                selector.register(helper, selectors.EVENT_READ, _BESIDE)
            while len(answers) < num_asked and not failures:
                ready = selector.select(self._settings.answer_s)
                if not ready:
                    stuck = [rank for rank in range(num_asked) if rank not in answers]
                    failures[stuck[0]] = self._stuck(stuck, what)
                for key, _ in ready:
                    rank = key.data
                    selector.unregister(key.fileobj)
                    try:
                        if rank == _BESIDE:
                            cast(Child, key.fileobj).receive()
                        else:
                            answers[rank] = take(self._children[rank])
                    except BenchmarkError as error:
                        failures[rank] = error
            if failures:
                raise self._failure(failures, selector)
        return [answers[rank] for rank in range(num_asked)]

    def _failure(
        self, failures: dict[int, BenchmarkError], selector: selectors.BaseSelector
    ) -> BenchmarkError:
        """The first failure; but who missed a process that has gone is not the one to name."""
        for key, _ in selector.select(0):
            try:
                cast(Child, key.fileobj).receive()
            except BenchmarkError as error:
                failures[key.data] = error
        killed = [rank for rank in failures if rank == _BESIDE or (self._children[rank].exit_code or 0) < 0]
        self._abandon()
        return failures[killed[0] if killed else next(iter(failures))]

    def _stuck(self, ranks: list[int], what: str) -> BenchmarkError:
        names = ", ".join(map(str, ranks))
        return BenchmarkError(
            f"rank {names} of {len(self._children)} did not answer {what} within "
            f"{self._settings.answer_s:g} s.",
            cause="workers wait for each other in a different order, or the machine is overloaded.",
            next_step="run it with fewer workers, or smaller sizes.",
        )


def one_line(error: BenchmarkError) -> str:
    """What happened, as a row or a line of progress says it."""
    return " ".join(error.what.split())


def run_worker(arguments: dict[str, Any], parent: Parent) -> None:
    """What the process of a worker does; all is closed in the end, so that the interpreter need not be."""
    end_with_parent()
    with contextlib.ExitStack() as stack:
        place = msgspec.convert(arguments["place"], BenchPlace)
        serve(parent, open_worker(arguments["function"], place, arguments["arguments"], stack))
    parent.leave()


def run_helper(arguments: dict[str, Any], parent: Parent) -> None:
    """What the process of a helper does."""
    end_with_parent()
    _function(arguments["function"])(arguments, parent)


def server_place(arguments: dict[str, Any]) -> tuple[BenchPlace, dict[str, Any]]:
    """Make this process a parameter server: its place among the helpers, and the role that it was given."""
    place = msgspec.convert(arguments["place"], BenchPlace)
    place.set_up_process()
    return place, arguments["arguments"]


def serve(parent: Parent, worker: object, loop: LoopThread | None = None) -> None:
    """Answer orders by the worker's methods until there are no more; coroutines among them run on the loop.

    What one of them raises is told before anything is closed.
    """
    while (order := parent.receive()) is not None:
        try:
            answer = getattr(worker, order["order"])(**order["details"])
            if loop is not None and inspect.iscoroutine(answer):
                answer = loop.run(answer)
        except Exception as error:
            parent.fail(error)
            raise
        parent.tell(answer=answer)


def open_worker(
    function: str, place: BenchPlace, arguments: dict[str, Any], stack: contextlib.ExitStack
) -> Any:
    """Make this process the worker that `function` says."""
    return _function(function)(place, arguments, stack)


# --- tasks ---


def run_tasks(
    function: str, tasks: Sequence[dict[str, Any]], *, num_processes: int, tell: Callable[[str], None]
) -> Iterator[Any | BenchmarkError]:
    """What `module:name` returns for each task, by JSON; a task that fails gives its BenchmarkError.

    It is called as `function(task, tell)` in a process that has one thread for torch. What it tells is told
    here with the number of the task before it, when there are several.
    """
    if num_processes < 1:
        raise UsageError(f"{num_processes} processes do nothing.", next_step="give 1 or more.")
    waiting = list(enumerate(tasks))[::-1]
    done: dict[int, Any | BenchmarkError] = {}
    num_told = 0
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:

        def start() -> None:
            name = f"The process that runs {function}"
            entered = stack.enter_context(_tuned_child("work_through", {"function": function}, name))
            give(entered)

        def give(worker: Child) -> None:
            if not waiting:
                worker.end()
                return
            number, task = waiting.pop()
            worker.order(task=task)
            selector.register(worker, selectors.EVENT_READ, number)

        for _ in range(min(num_processes, len(tasks))):
            start()
        while num_told < len(tasks):
            for key, _ in selector.select():
                worker, number = cast(Child, key.fileobj), int(key.data)
                label = f"{number + 1}/{len(tasks)} " if len(tasks) > 1 else ""
                try:
                    answer = _heard(worker, label, tell)
                except BenchmarkError as error:
                    selector.unregister(worker)
                    done[number] = error
                    if waiting:
                        start()
                    continue
                if answer is not None:
                    selector.unregister(worker)
                    done[number] = answer["answer"]
                    give(worker)
            while num_told in done:
                yield done.pop(num_told)
                num_told += 1


def _heard(worker: Child, label: str, tell: Callable[[str], None]) -> dict[str, Any] | None:
    """Pass on all that a worker has said about its progress; its answer, if that was among it."""
    while True:
        message = worker.expect()
        if "progress" not in message:
            return message
        tell(f"{label}{message['progress']}")
        if not worker.has_more:
            return None


def work_through(arguments: dict[str, Any], parent: Parent) -> None:
    """What a process of the pool does: one task after another, until there are no more."""
    end_with_parent()
    import torch

    torch.set_num_threads(1)
    function = _function(arguments["function"])
    while (order := parent.receive()) is not None:
        parent.tell(answer=function(order["task"], lambda text: parent.tell(progress=text)))
    parent.leave()


def _tuned_child(
    function: str, arguments: dict[str, Any], name: str
) -> contextlib.AbstractContextManager[Child]:
    """Run a function of this module in a child whose C library is tuned as that of `shoal run`'s workers."""
    from shoal.launch.settings import TUNING  # all of `launch` comes with it

    return child(f"shoal.bench.workers:{function}", arguments, name=name, variables=TUNING)


def _function(name: str) -> Callable[..., Any]:
    """Import the function that `module:name` means."""
    module, _, attribute = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return found


def main() -> None:
    """What a child does: read what to run, run it, and tell when it fails."""
    own_the_process()
    obey_interrupts()
    stdin = sys.stdin.buffer
    # what the function prints must not mix with what it tells
    stdout = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    parent = Parent(stdin, stdout)
    order = msgspec.json.decode(stdin.readline())
    try:
        try:
            _function(order["function"])(order["arguments"], parent)
        except BrokenPipeError:
            sys.exit(1)  # the parent is gone
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent reports it
            # it ends by itself: the parent, who hears this, need not interrupt it
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            parent.fail(error)
            sys.exit(1)
    except KeyboardInterrupt:
        os._exit(130)  # what was cut short is not to be collected, and complained of
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
