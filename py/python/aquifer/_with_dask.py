"""What Dask is told about arrays: how they are named and how they are sent.

Dask has ways of its own for subclasses of NumPy's arrays: it names one by a hash of all elements, and sends these. So it is told, when
the first array is made, or, if it is imported later, right after that.
"""

from __future__ import annotations

import pickle
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["tell_dask"]

_NAMES = "dask.tokenize"
_SENDS = "distributed.protocol.serialize"

# Modules of Dask that were told.
_told: list[ModuleType] = []


def tell_dask(kind: type[Any]) -> None:
    """Registers `kind`, the class of arrays, with what is imported of Dask, and looks out for the rest."""
    for name in (_NAMES, _SENDS):
        module: Any = sys.modules.get(name)
        # One whose import is under way in another thread, or has failed, may lack it.
        if module is None or module in _told:
            continue
        if name == _NAMES and hasattr(module, "normalize_token"):
            module.normalize_token.register(kind, _named)
            _told.append(module)
        elif name == _SENDS and hasattr(module, "dask_deserialize"):
            from ._remote_array import RemoteArray

            module.dask_serialize.register(RemoteArray, _sent)
            module.dask_deserialize.register(RemoteArray, _received)
            _told.append(module)
    if len(_told) < 2 and not any(isinstance(finder, _Lookout) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Lookout(kind))


def _named(array: Any) -> Any:
    # Its class has the method of its own kind.
    return array.__dask_tokenize__()


def _sent(array: Any) -> tuple[dict[str, Any], list[bytes]]:
    return {}, [pickle.dumps(array)]


def _received(header: dict[str, Any], frames: list[bytes]) -> Any:
    return pickle.loads(frames[0])


class _Lookout:
    """Imports nothing: sees to it that Dask is told when its module has been executed."""

    def __init__(self, kind: type[Any]) -> None:
        self.kind = kind
        # The threads that ask the other finders: of two of this class each would ask the other for ever.
        self.asking: set[int] = set()

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        thread = threading.get_ident()
        if name not in (_NAMES, _SENDS) or thread in self.asking:
            return None
        self.asking.add(thread)
        try:
            others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
            found = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self.asking.remove(thread)
        if spec is None:
            return None
        loader: Any = spec.loader
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return spec

        def execute_and_tell(module: ModuleType) -> None:
            execute(module)
            tell_dask(self.kind)

        # Of this import alone: finders make a loader for each module.
        loader.exec_module = execute_and_tell
        return spec
