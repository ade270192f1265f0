"""Sessions whose other side has not proven its address: few, and none costs another host its place."""

from __future__ import annotations

from shoal.transport.datagrams.answering import Answerer
from shoal.transport.datagrams.sessions import Session

MAX_NEWCOMERS = 4096
MAX_NEWCOMERS_A_HOST = 256


class Newcomers:
    """The oldest of a host goes when the host has too many, the oldest of all when there are too many."""

    def __init__(self, sessions: dict[bytes, Session]) -> None:
        self._sessions = sessions
        self._by_host: dict[str, dict[bytes, Answerer]] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def add(self, answerer: Answerer) -> None:
        """Let packets reach a new session."""
        host = _host_of(answerer)
        if len(self._by_host.get(host, ())) >= MAX_NEWCOMERS_A_HOST:
            self._drop_oldest(host)
        elif self._num >= MAX_NEWCOMERS:
            self._drop_oldest(next(iter(self._by_host)))
        self._by_host.setdefault(host, {})[answerer.id] = answerer
        self._num += 1
        self._sessions[answerer.id] = answerer

    def remove(self, answerer: Answerer) -> None:
        """It is no newcomer any more."""
        host = _host_of(answerer)
        of_host = self._by_host.get(host, {})
        if of_host.pop(answerer.id, None) is not None:
            self._num -= 1
            if not of_host:
                del self._by_host[host]

    def _drop_oldest(self, host: str) -> None:
        answerer = next(iter(self._by_host[host].values()))
        self.remove(answerer)
        self._sessions.pop(answerer.id, None)


def _host_of(answerer: Answerer) -> str:
    return str(answerer.where[0])
