import sys
from types import SimpleNamespace

from shoal.launch import ray_bridge
from shoal.launch.ray_bridge import ActorRequest, Bridge


class Room:
    """Of a cluster with fewer CPUs than there are workers."""

    def __init__(self, bundles, num_cpus):
        self.bundles, self.num_cpus = bundles, num_cpus

    def wait(self, _):
        return len(self.bundles) <= self.num_cpus


def test_gpus_are_chosen_for_as_many_workers_as_there_is_room_for(monkeypatch):
    tried = []

    def reserve(bundles, strategy):
        tried.append(bundles)
        return Room(bundles, num_cpus=2)

    module = SimpleNamespace(placement_group=reserve, remove_placement_group=lambda group: None)
    for name in ("ray", "ray.util", "ray.util.placement_group"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ray_bridge, "SHRINK_S", 0.0)
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "GPU": 2.0}}]
    monkeypatch.setattr(ray_bridge, "_check_head", lambda: None)
    request = ActorRequest("", 1.0, start_timeout_s=1.0, num_workers=3, min_workers=1)
    bridge = Bridge(SimpleNamespace(nodes=lambda: nodes), request, lambda report: None)
    group, num_gpus = bridge._reserve()
    assert tried == [[{"CPU": 1.0}] * 3, [{"CPU": 1.0, "GPU": 1.0}] * 2]
    assert (group.bundles, num_gpus) == (tried[-1], 1.0)
