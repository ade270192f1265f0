"""Actors on a Ray cluster: room for them in one placement group, then each where it was given room."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shoal.core import SYSTEM_CLOCK
from shoal.launch.ray_actor import AgentActor
from shoal.launch.ray_reports import Place, Refusal, Request, reason_of

SHRINK_S = 5.0
"""For room for all workers, where fewer would do; a second more for each that is left out."""
_TICK_S = 0.2
_SAY_S = 10.0


class Placing:
    """Of one start. `say` gets what the cluster lacks; `check` may raise to give up."""

    def __init__(
        self, ray: Any, request: Request, say: Callable[[str], None], check: Callable[[], None]
    ) -> None:
        self._ray = ray
        self._request = request
        self._say = say
        self._check = check

    def place(self) -> tuple[list[Any], list[Place]]:
        """Actors and where they are, those of a node one after the other; Refusal."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, num_gpus = self._reserve()
        remote = self._ray.remote(AgentActor)
        actors = [
            remote.options(
                num_cpus=self._request.num_cpus,
                num_gpus=num_gpus,
                max_concurrency=2,  # it reads while it writes
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
            ).remote()
            for i in range(group.bundle_count)
        ]
        asked = [actor.where.remote() for actor in actors]
        try:
            places = [Place(*place) for place in self._ray.get(asked, timeout=self._request.start_timeout_s)]
        except Exception as error:
            raise Refusal(
                f"A worker's actor could not be started: {reason_of(error)}.",
                "a node that has just gone, or on which Shoal is not installed.",
                "install the same Shoal on all nodes; `ray status` shows which there are.",
            ) from error
        order = {node: i for i, node in enumerate(dict.fromkeys(place.node for place in places))}
        pairs = sorted(zip(actors, places, strict=True), key=lambda pair: order[pair[1].node])
        return [actor for actor, _ in pairs], [place for _, place in pairs]

    def _reserve(self) -> tuple[Any, float]:
        """A placement group for as many workers as there is room for, and the GPUs that each has there."""
        from ray.util.placement_group import placement_group, remove_placement_group

        request = self._request
        patience_s = SHRINK_S
        for num_workers in range(request.num_workers, request.min_workers - 1, -1):
            num_gpus = self._choose_gpus(num_workers)
            bundle = {"CPU": request.num_cpus, **({"GPU": num_gpus} if num_gpus else {})}
            group = placement_group([bundle] * num_workers, strategy="PACK")
            limit_s = request.start_timeout_s if num_workers == request.min_workers else patience_s
            if self._wait_for(group, limit_s, _describe(num_workers, bundle)):
                return group, num_gpus
            remove_placement_group(group)
            patience_s = 1.0
        raise Refusal(
            f"The Ray cluster has no room for {_describe(request.min_workers, bundle)}; {self._room()}.",
            "other jobs hold the rest, or nodes are missing.",
            "give a smaller -np or a longer --start-timeout; `ray status` shows what is in use.",
        )

    def _wait_for(self, group: Any, limit_s: float, workers: str) -> bool:
        began_s = said_s = SYSTEM_CLOCK.now_s()
        while not group.wait(_TICK_S):
            self._check()
            now_s = SYSTEM_CLOCK.now_s()
            if now_s - began_s > limit_s:
                return False
            if now_s - said_s > _SAY_S:
                said_s = now_s
                self._say(f"waiting for room for {workers} on the Ray cluster; {self._room()}")
        return True

    def _choose_gpus(self, num_workers: int) -> float:
        if self._request.num_gpus is not None:
            return self._request.num_gpus
        return 1.0 if sum(self._totals("GPU")) >= num_workers else 0.0

    def _totals(self, resource: str) -> Iterator[float]:
        """Of each node."""
        for node in self._ray.nodes():
            if node["Alive"]:
                yield float(node["Resources"].get(resource, 0.0))

    def _room(self) -> str:
        cpus, num_gpus, free = (
            list(self._totals("CPU")),
            sum(self._totals("GPU")),
            self._ray.available_resources(),
        )
        has_gpus = f" and {num_gpus:g} GPUs ({free.get('GPU', 0.0):g} free)" if num_gpus else ""
        nodes = "1 node has" if len(cpus) == 1 else f"{len(cpus)} nodes have"
        return f"its {nodes} {sum(cpus):g} CPUs ({free.get('CPU', 0.0):g} free){has_gpus}"


def _describe(num_workers: int, bundle: dict[str, float]) -> str:
    each = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
    return f"{num_workers} worker{'' if num_workers == 1 else 's'} with {each} each"
