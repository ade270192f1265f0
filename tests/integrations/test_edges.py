"""What Trainer and Accelerate do besides plain epochs: streams, resuming, several GPUs."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from shoal.core import UsageError
from shoal.strategies import LocalSGD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Stream(IterableDataset):
    def __init__(self, points):
        self.points = points

    def __iter__(self):
        return (self.points[index] for index in range(len(self.points)))


def trainer_of(folder, data, **more):
    from transformers import Trainer, TrainingArguments

    from integrations.points import LR, Plane

    settings = {
        "per_device_train_batch_size": 8,
        "learning_rate": LR,
        "save_steps": 6,
        "optim": "sgd",
        **more,
    }
    settings |= {"report_to": [], "remove_unused_columns": False, "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(output_dir=folder, **settings)
    return Trainer(model=Plane(), args=args, train_dataset=data)


def streams_and_resumes(group, arguments):
    from integrations.points import Points
    from shoal.integrations.transformers import share

    folder = arguments["folder"]
    streaming = trainer_of(f"{folder}/stream", Stream(Points()), max_steps=4)
    share(streaming, LocalSGD(group), stays=True)
    streaming.train()

    # three epochs of four steps; the first run ends in the middle of the second
    first = trainer_of(f"{folder}/again", Points(), max_steps=6)
    share(first, LocalSGD(group), stays=True)
    first.train()
    group.barrier().wait()
    second = trainer_of(f"{folder}/again", Points(), num_train_epochs=3)
    share(second, LocalSGD(group), stays=True)
    second.train(resume_from_checkpoint=f"{folder}/again/checkpoint-6")
    return [one.model.seen for one in (streaming, first, second)]


def test_a_stream_is_divided_and_a_checkpoint_is_taken_up(workers, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'shoal[integrations]'")
    arguments = {"folder": str(tmp_path)}
    told = workers.run(streams_and_resumes, 2, arguments, timeout_s=200)
    streamed = [number for worker in told for number in worker[0]]
    assert sorted(streamed) == list(range(64))
    seen = [worker[1] + worker[2] for worker in told]
    assert [len(numbers) for numbers in seen] == [96, 96]
    for epoch in range(3):
        both = [number for numbers in seen for number in numbers[32 * epoch : 32 * epoch + 32]]
        assert sorted(both) == list(range(64))


def refusals(group, arguments):
    from accelerate import Accelerator

    from integrations.points import Plane, Points
    from shoal.integrations.accelerate import attach
    from shoal.integrations.transformers import share

    trainer = trainer_of(arguments["folder"], Points())
    trainer.args._n_gpu = 4
    with pytest.raises(UsageError) as with_gpus:
        share(trainer, LocalSGD(group))

    accelerator, plane = Accelerator(cpu=True), Plane()
    loader = DataLoader(Stream(Points()), batch_size=8)
    optimizer = torch.optim.SGD(plane.parameters())
    model, optimizer, _ = accelerator.prepare(plane, optimizer, loader)
    with pytest.raises(UsageError) as with_stream:
        attach(accelerator, LocalSGD(group), model, optimizer)
    return [str(with_gpus.value), str(with_stream.value), accelerator.is_main_process]


def test_what_a_worker_cannot_do_alone_is_refused(workers, tmp_path):
    pytest.importorskip("transformers", reason="pip install 'shoal[integrations]'")
    for rank, told in enumerate(workers.run(refusals, 2, {"folder": str(tmp_path)}, timeout_s=200)):
        assert "CUDA_VISIBLE_DEVICES" in told[0]
        assert "dispatch_batches=False" in told[1]
        assert told[2] == (rank == 0)
