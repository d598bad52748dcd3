"""Hugging Face's Trainer on two ranks with save_total_limit: saves every step, removes the oldest by directory mtime.

hf_trainer.py RUN STEPS    see steps.py; resumes from what `get_last_checkpoint` finds, as Hugging Face's examples do
"""

import os
import sys

import torch
import torch.distributed as dist
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from tensors import say
from steps import tell

VOCABULARY, LENGTH, WIDTH = 2000, 32, 256
# Two are kept, so that the one before a torn one is still there.
KEPT = 2


class Tokens(Dataset):
    """Each item is a function of its number."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return self.items

    def __getitem__(self, number):
        tokens = torch.randint(VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": tokens, "labels": tokens}


class Told(Trainer):
    """Trainer with words before and after its own save."""

    def _save_checkpoint(self, model, trial):
        step = self.state.global_step
        hashes(self, step)
        tell("SAVING", step)
        super()._save_checkpoint(model, trial)
        tell("SAVED", step)


class TellResumed(TrainerCallback):
    """Everything is loaded when training begins, but for the random states, which are at the first step."""

    trainer = None

    def on_train_begin(self, args, state, control, **kwargs):
        tell("RESUMED", state.global_step)
        if state.global_step:
            hashes(self.trainer, state.global_step)


def hashes(trainer, step):
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    say(
        f"step-{step}",
        {
            "model": model.state_dict(),
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
        },
    )


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    set_seed(1)
    arguments = TrainingArguments(
        output_dir=run,
        max_steps=steps,
        per_device_train_batch_size=2,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=KEPT,
        # The schedule does not depend on the number of steps, which a resumed run may raise.
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=50,
        use_cpu=True,
        ddp_backend="gloo",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    # GPT-2 with its usual dropout, which draws from the random states that a checkpoint keeps of each rank.
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=WIDTH, n_layer=3, n_head=4, use_cache=False)
    )
    told = TellResumed()
    trainer = Told(model=model, args=arguments, train_dataset=Tokens(100_000), callbacks=[told])
    told.trainer = trainer
    last = get_last_checkpoint(run) if os.path.isdir(run) else None
    trainer.train(resume_from_checkpoint=last)
    print("DONE", flush=True)
    dist.barrier()
    dist.destroy_process_group()


main()
