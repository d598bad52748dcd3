"""Lightning's Trainer: saves every step, keeps the last two and a link to the last, resumes from that.

lightning_trainer.py RUN STEPS       see steps.py; `last.ckpt` is a symbolic link
lightning_trainer.py RUN STEPS copy  `last.ckpt` is a second file, written over each time

Lightning writes a file below $TMPDIR and moves it to where it belongs: a rename where that is the same file system,
otherwise a copy under the final name.
"""

import sys
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from steps import loss_of, new_training, pause, tell
from tensors import say

KEPT = 2
COPY = sys.argv[3:] == ["copy"]


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.adam = new_training()

    def configure_optimizers(self):
        schedule = torch.optim.lr_scheduler.LinearLR(self.adam, total_iters=50)
        return {"optimizer": self.adam, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self):
        # Batches are a function of the step: what goes through here is only counted.
        return DataLoader(range(100_000))

    def training_step(self, batch, index):
        step = self.global_step + 1
        # Lightning keeps no random states.
        torch.manual_seed(step)
        return loss_of(self.net, step)

    def on_train_start(self):
        tell("RESUMED", self.global_step)
        if self.global_step:
            self.hashes()

    def hashes(self):
        state = {"model": self.net.state_dict(), "optimizer": self.optimizers().state_dict()}
        say(f"step-{self.global_step}", {**state, "scheduler": self.lr_schedulers().state_dict()})


class Told(ModelCheckpoint):
    """Lightning's own saving with words before and after it."""

    def on_train_batch_end(self, trainer, module, *rest):
        step = trainer.global_step
        module.hashes()
        pause()
        tell("SAVING", step)
        super().on_train_batch_end(trainer, module, *rest)
        tell("SAVED", step)


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    warnings.filterwarnings("ignore")
    saves = Told(
        dirpath=run,
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=KEPT,
        every_n_train_steps=1,
        save_last=True if COPY else "link",
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Training(), ckpt_path="last")
    print("DONE", flush=True)


main()
