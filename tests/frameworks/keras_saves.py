"""Keras on torch, an epoch a step: `ModelCheckpoint` saves a `.keras` file at each, or `BackupAndRestore` its two files over and over.

keras_saves.py RUN STEPS           see steps.py; resumes from the highest `epoch-N.keras`
keras_saves.py RUN STEPS backup    resumes as BackupAndRestore does
"""

import os
import sys

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy
import torch

from steps import latest, pause, tell
from tensors import say

WIDTH, LAYERS, BATCH = 256, 4, 4


def build():
    keras.utils.set_random_seed(1)
    # Without dropout: Keras keeps the state of its random numbers, and takes torch's.
    layers = [keras.layers.Dense(WIDTH, activation="gelu") for _ in range(LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile(optimizer="adam", loss="mse")
    return model


def hashes(model, step):
    # A loaded model gives its variables other names.
    variables = {"model": model.variables, "optimizer": model.optimizer.variables}
    values = {whose: [torch.from_numpy(keras.ops.convert_to_numpy(one)) for one in own] for whose, own in variables.items()}
    say(f"step-{step}", values)


class Before(keras.callbacks.Callback):
    """Stands before the callback that saves."""

    def on_epoch_end(self, epoch, logs=None):
        hashes(self.model, epoch + 1)
        pause()
        tell("SAVING", epoch + 1)


class After(keras.callbacks.Callback):
    """Stands behind it: what it restores is there when training begins."""

    def on_train_begin(self, logs=None):
        step = self.model._initial_epoch
        if step:
            hashes(self.model, step)
        tell("RESUMED", step)

    def on_epoch_end(self, epoch, logs=None):
        tell("SAVED", epoch + 1)


def main():
    run, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    step = latest(run, r"epoch-(\d+)\.keras")
    model = keras.saving.load_model(os.path.join(run, f"epoch-{step}.keras")) if step else build()
    if sys.argv[3:] == ["backup"]:
        saves = keras.callbacks.BackupAndRestore(os.path.join(run, "backup"), delete_checkpoint=False)
    else:
        saves = keras.callbacks.ModelCheckpoint(os.path.join(run, "epoch-{epoch}.keras"))
    model._initial_epoch = step
    x = numpy.random.default_rng(1).normal(size=(BATCH, WIDTH)).astype("float32")
    callbacks = [Before(), saves, After()]
    model.fit(
        x, x[::-1].copy(), batch_size=BATCH, shuffle=False, initial_epoch=step, epochs=steps, callbacks=callbacks, verbose=0
    )
    print("DONE", flush=True)


main()
