"""When the functions of torch and safetensors are replaced: now, or when a program imports them.

Owns the import hook. Does not own what the replacements do.
"""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

log = logging.getLogger("tidemark")

# A module, and the one of ours whose ``patch`` and ``unpatch`` know it.
_PATCHED_BY = {"torch.serialization": "tidemark._torch", "safetensors.torch": "tidemark._safetensors"}


def accelerate(on: bool = True) -> None:
    """Makes saves into a Tidemark mount fast, in this process, from now on; ``on=False`` ends that.

    Call it at any time, also before torch is imported. What cannot be accelerated is saved by the original function. The logger
    ``tidemark`` says why, once for each reason, at level DEBUG.
    """
    if on and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    elif not on and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in _PATCHED_BY:
        module = sys.modules.get(name)
        if module is not None and not _is_being_imported(module):
            _apply(module, on)


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def _apply(module: ModuleType, on: bool = True) -> None:
    """Replaces, or puts back, what is replaced in a module. A module of another shape stays as it is."""
    try:
        ours = importlib.import_module(_PATCHED_BY[module.__name__])
        (ours.patch if on else ours.unpatch)(module)
    except Exception as error:
        log.debug("%s stays as it is: %r", module.__name__, error)


class _Finder:
    """Finds the modules of ``_PATCHED_BY`` as the other finders do, and looks at them once they have run."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _PATCHED_BY:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """The module's own loader, and then the replacement."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # Programs that ask for a module's source find its own loader.
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _apply(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


_finder = _Finder()
