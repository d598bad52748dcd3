"""Runs at the start of an interpreter that has ``TIDEMARK_ACCELERATE`` set: ``tidemark_accelerate.pth`` imports it.

A job must not fail because of this module, so no exception leaves it.
"""

import sys

try:
    from ._hook import accelerate

    accelerate()
except Exception as error:
    print(f"tidemark: not accelerated: {error!r}", file=sys.stderr)
