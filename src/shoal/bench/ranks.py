"""A benchmark whose workers a launcher has started: torchrun, mpirun, srun, `shoal run`, or -H over ssh.

All of them run the same command. Rank 0 runs the scenario and gives orders through a group of all ranks,
which measures nothing; the others follow, and rank 0 itself works too. `python -m shoal.bench.ranks` is what
`OnHosts` starts on other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import sys
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.bench.crew import Answers, CrewSettings, Helper, Place, Workers, open_worker
from shoal.bench.frame import Receive, Version, make_scenario, tell_rows
from shoal.core import BenchmarkError
from shoal.launch import LaunchSettings, command_of, launch
from shoal.launch.channel import Engine
from shoal.launch.output import Listener, Stream

if TYPE_CHECKING:
    from shoal.group.base import Group

VARIABLE = "SHOAL_BENCH"
"""What `OnHosts` tells the ranks that it starts: the arguments of one start, as JSON."""
_MARK = b"\x1eSHOAL-BENCH "
"""Before what rank 0 tells the head, among all that it prints."""
_OPEN, _ASK, _CLOSE, _END = "open", "ask", "close", "end"
"""What rank 0 tells the others, of which only _ASK holds an order of the scenario."""


class RankCrew:
    """The ranks of a group as a crew, as rank 0 sees it."""

    def __init__(self, control: Group, settings: CrewSettings) -> None:
        self._control = control
        self._settings = settings
        self._worker = RankWorker(control)
        self.is_running = False

    def ask(self, order: str, *, among: int | None = None, **details: Any) -> list[Any]:
        """The answers by rank; BenchmarkError names the first rank that failed, and all begin anew."""
        if not self.is_running:
            self._start()
        return self._tell(_ASK, {"order": order, "details": details}, among)

    def hire(self, helper: Helper) -> None:
        """Nothing: whoever needs it says that it is not there."""

    def close(self) -> None:
        """Let the workers close what they have opened."""
        if self.is_running:
            self._tell(_CLOSE, {})
            self.is_running = False

    def _start(self) -> None:
        control, settings = self._control, self._settings
        if settings.size != control.size:
            raise BenchmarkError(
                f"{settings.size} workers are to be measured, and the launcher has started {control.size}.",
                next_step=f"say --np {control.size}, or let it start {settings.size}.",
            )
        details = {
            "function": settings.function,
            "key": f"bench-{secrets.token_hex(8)}",
            "arguments": settings.arguments,
        }
        self._tell(_OPEN, details)
        self.is_running = True

    def _tell(self, kind: str, details: dict[str, Any], among: int | None = None) -> list[Any]:
        among = among or self._control.size
        message = {"kind": kind, "among": among, "details": details}
        self._control.share(message)
        outcomes = self._control.share(self._worker.follow(message))
        for rank, outcome in enumerate(outcomes):
            if "failure" in outcome:
                self.is_running = False
                raise BenchmarkError(
                    f"rank {rank} of {self._control.size} failed: {outcome['failure']}",
                    cause=outcome["trace"],
                )
        return [outcome["answer"] for outcome in outcomes[:among]]


class RankWorker:
    """What one rank has opened, and how it answers."""

    def __init__(self, control: Group) -> None:
        self._control = control
        self._stack = contextlib.ExitStack()
        self._answers: Answers = {}

    def follow(self, message: dict[str, Any]) -> dict[str, Any]:
        """Do what is ordered; what was opened is abandoned after a failure, so that nobody waits for it."""
        if self._control.rank >= message["among"]:
            return {"answer": None}
        try:
            return {"answer": self._do(message["kind"], message["details"])}
        except Exception as error:  # noqa: BLE001 - whatever it is, rank 0 reports it
            text, trace = f"{type(error).__name__}: {error}", traceback.format_exc(limit=-3)
            with contextlib.suppress(Exception):
                self._stack.__exit__(type(error), error, error.__traceback__)
            self._stack = contextlib.ExitStack()
            return {"failure": text, "trace": trace}

    def _do(self, kind: str, details: dict[str, Any]) -> Any:
        if kind == _ASK:
            return self._answers[details["order"]](**details["details"])
        self._stack.close()
        if kind == _OPEN:
            self._open(**details)
        return None

    def _open(self, function: str, key: str, arguments: dict[str, Any]) -> None:
        control = self._control
        machines = tuple(control.machine_of(rank) for rank in range(control.size))
        place = Place(control.rank, control.size, key, machines=machines)
        self._answers = open_worker(function, place, arguments, self._stack)


class Ranks:
    """What one of the ranks does, for as long as the block lasts; `is_first` gives the orders."""

    def __init__(self, control: Group) -> None:
        self._control = control

    @property
    def is_first(self) -> bool:
        """Whether this is the one that measures and reports."""
        return self._control.rank == 0

    def follow(self) -> None:
        """What all but the first do, until there are no more orders."""
        worker = RankWorker(self._control)
        while (message := self._control.share(None)[0])["kind"] != _END:
            self._control.share(worker.follow(message))

    def start(self, arguments: dict[str, Any], version: Version, receive: Receive) -> None:
        """One start of a scenario, by the first: how `run_benchmark` runs it here."""
        scenario = make_scenario(arguments["benchmark"], arguments["config"], arguments["seed"])
        vars(scenario)["open_crew"] = self._open_crew
        tell_rows(scenario, receive)

    def end(self) -> None:
        """Let the others end."""
        self._control.share({"kind": _END})

    @contextlib.contextmanager
    def _open_crew(self, settings: CrewSettings) -> Iterator[Workers]:
        crew = RankCrew(self._control, settings)
        yield crew
        crew.close()


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other ranks; the first lets them go at the end."""
    from shoal.group import init

    logging.getLogger("shoal.group").setLevel(logging.ERROR)  # that ranks wait for orders is no news
    with init() as control:
        ranks = Ranks(control)
        yield ranks
        if ranks.is_first:
            ranks.end()


class OnHosts:
    """Starts of a scenario on other machines: how `run_benchmark` runs it there."""

    def __init__(self, engine: Engine, settings: LaunchSettings) -> None:
        self._engine = engine
        self._settings = settings

    def __call__(self, arguments: dict[str, Any], version: Version, receive: Receive) -> None:
        """Run the ranks to their end, and pass on what the first one tells."""

        def take(rank: int, stream: Stream, line: bytes) -> None:
            if line.startswith(_MARK):
                receive(msgspec.json.decode(line.removeprefix(_MARK)))
            else:
                sys.stderr.write(f"[{rank}] {line.decode(errors='backslashreplace')}\n")

        told = {VARIABLE: msgspec.json.encode(arguments).decode()}
        variables = {**self._settings.variables, **told}
        settings = dataclasses.replace(self._settings, variables=variables)
        output = Listener(take, lambda text: receive({"progress": text}))
        outcome = launch(settings, output, self._engine)
        if outcome.exit_code:
            raise BenchmarkError(f"The workers ended with {outcome.exit_code}: {outcome.reason}.")


def hosts_command() -> tuple[str, ...]:
    """What is started on every host."""
    return command_of(["shoal.bench.ranks"], is_module=True)


def main() -> None:
    """What a rank does that `OnHosts` has started."""
    arguments = msgspec.json.decode(os.environ[VARIABLE])
    with joined() as ranks:
        if not ranks.is_first:
            ranks.follow()
            return

        def tell(message: dict[str, Any]) -> None:
            sys.stdout.buffer.write(_MARK + msgspec.json.encode(message) + b"\n")
            sys.stdout.buffer.flush()

        ranks.start(arguments, Version(), tell)


if __name__ == "__main__":
    main()
