import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.group.cluster.torch_world import destroy_world


def train_again_and_again(group, arguments):
    for number in range(30):
        store = dist.FileStore(f"{arguments['folder']}/{number}", group.size)
        dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        module = DistributedDataParallel(model, bucket_cap_mb=0.001)
        for _ in range(3):
            module(torch.ones(1, 32)).sum().backward()
        destroy_world()
        del module, model  # the last that torch knows of the group
    return dist.is_initialized()


def test_the_end_does_not_wait_for_a_thread_that_waits_for_it(workers, tmp_path):
    assert workers.run(train_again_and_again, 2, {"folder": str(tmp_path)}) == [False, False]
