"""Pieces of a model that some peers serve and others train through: servers, clients, gates and mixtures."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.experts.checkpoints import Checkpoints
    from shoal.experts.classes import ExpertClass, expert_class, make_expert
    from shoal.experts.client import ExpertClient
    from shoal.experts.config import HostingConfig
    from shoal.experts.errors import RefusedUpdate
    from shoal.experts.expert import Expert
    from shoal.experts.hosting import Hosting, hosted
    from shoal.experts.last_call import LastCall, NotEnoughExperts
    from shoal.experts.mixture import MixtureOfExperts
    from shoal.experts.mixture_settings import MixtureSettings
    from shoal.experts.remote import RemoteExpert
    from shoal.experts.schema import ExpertSchema
    from shoal.experts.server import ExpertServer
    from shoal.experts.settings import ClientSettings, ServerSettings
    from shoal.experts.switch import SwitchMixtureOfExperts, SwitchSettings
    from shoal.experts.training import TrainingSettings

_HOMES = {
    "Checkpoints": "checkpoints",
    "ClientSettings": "settings",
    "Expert": "expert",
    "ExpertClass": "classes",
    "ExpertClient": "client",
    "ExpertSchema": "schema",
    "ExpertServer": "server",
    "Hosting": "hosting",
    "HostingConfig": "config",
    "LastCall": "last_call",
    "MixtureOfExperts": "mixture",
    "MixtureSettings": "mixture_settings",
    "NotEnoughExperts": "last_call",
    "RefusedUpdate": "errors",
    "RemoteExpert": "remote",
    "ServerSettings": "settings",
    "SwitchMixtureOfExperts": "switch",
    "SwitchSettings": "switch",
    "TrainingSettings": "training",
    "expert_class": "classes",
    "hosted": "hosting",
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
