"""What a training job may ask of the Tidemark mount that it saves into, and a faster way into it.

``accelerate()``, or ``TIDEMARK_ACCELERATE=1`` in the environment, makes ``torch.save`` and safetensors' ``save_file`` to a path on a
mount copy with several threads. Without either, nothing of torch is touched.

``status``, ``wait`` and ``checkpoints`` read what the mount says. They need neither torch nor the native half.
"""

from ._control import Checkpoint, Copies, NotAMount, Status, checkpoints, status, wait
from ._hook import accelerate

__all__ = ["Checkpoint", "Copies", "NotAMount", "Status", "accelerate", "checkpoints", "status", "wait"]
