"""Experts as a configuration describes them: new ones, and those that were saved, as they were.

All of it may block, and none of it touches the device.
"""

from __future__ import annotations

import hashlib
import logging

from shoal.core import UsageError
from shoal.experts.checkpoints import Checkpoints, SavedExpert
from shoal.experts.classes import expert_class, make_expert
from shoal.experts.config import HostingConfig
from shoal.experts.expert import Expert
from shoal.experts.training import TrainingSettings

log = logging.getLogger(__name__)


class ExpertMaker:
    """Makes the experts of one host; UsageError at once when the configuration names no such class."""

    def __init__(self, config: HostingConfig, checkpoints: Checkpoints | None) -> None:
        self._config = config
        self._checkpoints = checkpoints
        self._class = expert_class(config.expert_class)
        self._training = TrainingSettings(
            optimizer=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            scheduler=config.scheduler,
            num_warmup_steps=config.num_warmup_steps,
            num_training_steps=config.num_training_steps,
            max_grad_norm=config.max_grad_norm,
            clip_gradients=config.clip_gradients,
        )
        self.about = {"expert_class": self._class.name, "hidden_dim": config.hidden_dim}
        """What is saved beside an expert, so that it is not mistaken for one of another kind."""

    def saved_uids(self) -> list[str]:
        """Of experts that can be restored."""
        return [] if self._checkpoints is None else self._checkpoints.uids()

    def make(self, uid: str) -> Expert:
        """As it was saved last, or new."""
        saved = None if self._checkpoints is None else self._checkpoints.load(uid)
        if saved is None:
            return self.new(uid)
        expert = self.like(saved)
        for warning in expert.load(saved.state):
            log.warning("%s", warning)
        expert.num_changes = 0
        return expert

    def new(self, uid: str) -> Expert:
        """With its first weights: the same ones at all servers of an expert, so that replicas begin alike."""
        digest = hashlib.blake2b(f"{self._config.seed} {uid}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "big") >> 1
        return make_expert(uid, self._class, self._config.hidden_dim, self._training, seed)

    def like(self, saved: SavedExpert) -> Expert:
        """One that a saved state can be loaded into; UsageError when it was one of another kind."""
        differences = [
            f"{name} {saved.about[name]}, not {value}"
            for name, value in self.about.items()
            if name in saved.about and saved.about[name] != value
        ]
        if differences:
            raise UsageError(
                f"The expert {saved.uid} was saved with {' and '.join(differences)}.",
                cause=f"{saved.path.parent.parent} holds experts of another kind.",
                next_step="serve the kind that was saved, or give another --checkpoint-dir.",
            )
        return self.new(saved.uid)
