"""Bytes of tensors that a process holds at once, whoever made them."""

import gc
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Between its beginning and :meth:`stop`, the most bytes of tensors made since then that lived at once,
    as seen whenever torch makes one of some size. For a process of its own: what lives at the beginning is
    never looked at again, nor collected: going through all that torch imports takes half a second."""

    def __init__(self, noted: int) -> None:
        """Look whenever a tensor of at least ``noted`` bytes is made."""
        super().__init__()
        self.largest = 0
        self._noted = noted
        self._is_over = False

    def __enter__(self) -> "Live":
        gc.collect()
        gc.freeze()  # what is there already is not counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stop()

    def stop(self) -> None:
        if not self._is_over:
            self._look()
            self._is_over = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        made = [one for one in tree_leaves(found) if type(one) is Tensor and not one.is_meta]
        if not self._is_over and any(one.nbytes >= self._noted for one in made):
            self._look(*made)
        return found

    def _look(self, *made: Tensor) -> None:
        # isinstance would make lazy modules import things.
        tensors = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
        storages = [one.untyped_storage() for one in (*tensors, *made) if not one.is_meta]
        held = {storage.data_ptr(): storage.nbytes() for storage in storages}
        self.largest = max(self.largest, sum(held.values()))
