"""Pieces of a model that some peers serve and others train through: servers, clients, gates and mixtures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.experts.classes import ExpertClass, TrainingSettings, expert_class, make_expert
    from shoal.experts.client.batch import LastCall, NotEnoughExperts
    from shoal.experts.client.client import ExpertClient, RemoteExpert
    from shoal.experts.config import HostingConfig
    from shoal.experts.expert import Expert, RefusedUpdate
    from shoal.experts.mixture import MixtureOfExperts, SwitchMixtureOfExperts, SwitchSettings
    from shoal.experts.schema import ExpertSchema
    from shoal.experts.server.checkpoints import Checkpoints
    from shoal.experts.server.hosting import Hosting, hosted
    from shoal.experts.server.server import ExpertServer
    from shoal.experts.settings import ClientSettings, MixtureSettings, ServerSettings

_HOMES = {
    "Checkpoints": "server.checkpoints",
    "ClientSettings": "settings",
    "Expert": "expert",
    "ExpertClass": "classes",
    "ExpertClient": "client.client",
    "ExpertSchema": "schema",
    "ExpertServer": "server.server",
    "Hosting": "server.hosting",
    "HostingConfig": "config",
    "LastCall": "client.batch",
    "MixtureOfExperts": "mixture",
    "MixtureSettings": "settings",
    "NotEnoughExperts": "client.batch",
    "RefusedUpdate": "expert",
    "RemoteExpert": "client.client",
    "ServerSettings": "settings",
    "SwitchMixtureOfExperts": "mixture",
    "SwitchSettings": "mixture",
    "TrainingSettings": "classes",
    "expert_class": "classes",
    "hosted": "server.hosting",
    "make_expert": "classes",
}
"""Files that are loaded when one of their names is first used: nearly all of them need torch."""

__all__ = [
    "Checkpoints",
    "ClientSettings",
    "Expert",
    "ExpertClass",
    "ExpertClient",
    "ExpertSchema",
    "ExpertServer",
    "Hosting",
    "HostingConfig",
    "LastCall",
    "MixtureOfExperts",
    "MixtureSettings",
    "NotEnoughExperts",
    "RefusedUpdate",
    "RemoteExpert",
    "ServerSettings",
    "SwitchMixtureOfExperts",
    "SwitchSettings",
    "TrainingSettings",
    "expert_class",
    "hosted",
    "make_expert",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shoal.experts' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shoal.experts.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
