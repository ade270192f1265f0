"""Hugging Face's Trainer."""

from points import LR, NUM_EPOCHS, Plane, Points, main
from transformers import Trainer, TrainerCallback, TrainingArguments

from shoal.integrations.transformers import share


def train(strategy, batch_size, folder, num_accumulated):
    args = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=NUM_EPOCHS,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=num_accumulated,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        optim="sgd",
        logging_steps=4,
        save_steps=4,
        eval_strategy="epoch",
        report_to=[],
        remove_unused_columns=False,
        use_cpu=True,
    )
    distances = []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            distances.append(strategy.consensus_distance())

    model = Plane()
    trainer = Trainer(model=model, args=args, train_dataset=Points(), eval_dataset=Points())
    share(trainer, strategy, stays=True)
    trainer.add_callback(Look())
    trainer.train()
    trainer.save_model(str(folder / f"saved-by-{strategy.group.rank}"))
    return model, distances, trainer.state.epoch


main(train)
