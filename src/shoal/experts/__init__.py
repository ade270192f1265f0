"""Pieces of a model that some peers serve and others train through: servers, clients, gates and mixtures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.experts.classes import ExpertClass as ExpertClass
    from shoal.experts.classes import TrainingSettings as TrainingSettings
    from shoal.experts.classes import expert_class as expert_class
    from shoal.experts.classes import make_expert as make_expert
    from shoal.experts.client.batch import LastCall as LastCall
    from shoal.experts.client.batch import NotEnoughExperts as NotEnoughExperts
    from shoal.experts.client.client import ExpertClient as ExpertClient
    from shoal.experts.client.client import RemoteExpert as RemoteExpert
    from shoal.experts.config import HostingConfig as HostingConfig
    from shoal.experts.expert import Expert as Expert
    from shoal.experts.expert import RefusedUpdate as RefusedUpdate
    from shoal.experts.mixture import MixtureOfExperts as MixtureOfExperts
    from shoal.experts.mixture import SwitchMixtureOfExperts as SwitchMixtureOfExperts
    from shoal.experts.mixture import SwitchSettings as SwitchSettings
    from shoal.experts.schema import ExpertSchema as ExpertSchema
    from shoal.experts.server.checkpoints import Checkpoints as Checkpoints
    from shoal.experts.server.hosting import Hosting as Hosting
    from shoal.experts.server.hosting import hosted as hosted
    from shoal.experts.server.server import ExpertServer as ExpertServer
    from shoal.experts.settings import ClientSettings as ClientSettings
    from shoal.experts.settings import MixtureSettings as MixtureSettings
    from shoal.experts.settings import ServerSettings as ServerSettings

_NAMES = {
    "classes": ("ExpertClass", "TrainingSettings", "expert_class", "make_expert"),
    "client.batch": ("LastCall", "NotEnoughExperts"),
    "client.client": ("ExpertClient", "RemoteExpert"),
    "config": ("HostingConfig",),
    "expert": ("Expert", "RefusedUpdate"),
    "mixture": ("MixtureOfExperts", "SwitchMixtureOfExperts", "SwitchSettings"),
    "schema": ("ExpertSchema",),
    "server.checkpoints": ("Checkpoints",),
    "server.hosting": ("Hosting", "hosted"),
    "server.server": ("ExpertServer",),
    "settings": ("ClientSettings", "MixtureSettings", "ServerSettings"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
"""Files that are loaded when one of their names is first used: nearly all of them need torch."""

__all__ = sorted(_HOMES)  # noqa: PLE0605 - type checkers read the imports above


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.experts' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.experts.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
