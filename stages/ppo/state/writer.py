"""Writing of a learner's state behind the commit of its policy, by all ranks at once."""

import contextlib
import gc
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.memory import free_bytes
from pipeline.run.commits import FileEntry
from pipeline.run.durable import make_folder
from stages import ranks
from stages.context import Context
from stages.models.devices import device
from stages.ppo.state.model_files import ModelFiles
from stages.ppo.state.saved_state import File, write_counters, write_slices
from stages.ppo.state.slices import Slice
from stages.ppo.training import Learner
from stages.training import committed_entries, removed_on_failure

CRITIC = "critic"
"""Folder of a state that holds the critic, as a Hugging Face directory."""
_SPARE = 1.1
"""What copying takes of the host's memory, relative to what is copied."""


@dataclass(frozen=True)
class StatePart:
    """What this rank writes of one trainer's state."""

    name: str
    slices: Sequence[Slice]
    kinds: Sequence[str]

    @property
    def nbytes(self) -> int:
        """Bytes that copying it to the host's memory takes there."""
        parts = [one.parts[kind] for one in self.slices for kind in self.kinds]
        return sum(part.nbytes for part in parts if part.device.type != "cpu")

    def on_host(self) -> "StatePart":
        """Copy it to the host's memory, but for what is there already (update.offload_optimizer).

        The memory is pageable: each is copied to once, and page-locking takes longer than it saves then.
        """
        copies = [
            replace(one, parts={kind: one.parts[kind].cpu() for kind in self.kinds}) for one in self.slices
        ]
        return replace(self, slices=copies)


class LearnerState:
    """The state of a learner, as :class:`stages.context.StateWriter`."""

    def __init__(self, context: Context, learner: Learner) -> None:
        self._folder = context.files.state(context.attempt)
        self._context = context
        self._parts = [StatePart(t.name, t.own(), t.kinds) for t in learner.trainers]
        self._counters = {trainer.name: trainer.counters() for trainer in learner.trainers}
        self._critic: ModelFiles | None = learner.critic.model_files() if learner.critic else None

    def detach(self) -> bool:
        stays = self._context.stays  # the next update wants all of it where it is, and others fit beside it
        if stays or device().type == "cpu":
            return True
        if not self._has_room():
            return False
        error: Exception | None = None
        try:
            self._parts = [part.on_host() for part in self._parts]
        except (MemoryError, RuntimeError) as problem:
            error = problem
        ranks.agree(error)  # before they gather
        if self._critic is not None:
            self._critic = self._critic.on_host()
        ranks.share(None)  # others may still have gathered from this rank
        free_device()
        return True

    def _has_room(self) -> bool:
        """Whether every rank has room for a copy of its part, in a host that it shares with others."""
        critic = sum(f.nbytes for f in self._critic.files) / ranks.size() if self._critic else 0
        needed = _SPARE * (sum(part.nbytes for part in self._parts) + critic)
        by_rank = ranks.share((socket.gethostname(), needed, free_bytes()))
        by_host: dict[str, list[tuple[float, float]]] = {}
        for host, bytes_needed, room in by_rank:
            by_host.setdefault(host, []).append((bytes_needed, room))
        return all(sum(n for n, _ in pairs) <= min(r for _, r in pairs) for pairs in by_host.values())

    def write(self, is_wanted: bool) -> tuple[FileEntry, ...]:
        if not ranks.share(is_wanted)[0]:
            return ()
        error: Exception | None = None
        written: list[File] = []
        try:
            written = self._write_slices()
        except OSError as problem:
            error = problem
        with removed_on_failure(self._folder):
            ranks.agree(error)
            if self._critic is not None:
                written += self._critic.write(self._folder / CRITIC)
        return self._all_files(written)

    def _write_slices(self) -> list[File]:
        """Write this rank's part of every trainer."""
        make_folder(self._folder, self._context.paths.root)
        return [
            file
            for part in self._parts
            for file in write_slices(self._folder, part.name, ranks.rank(), part.slices, part.kinds)
        ]

    def _all_files(self, written: Iterable[File]) -> tuple[FileEntry, ...]:
        """Return all ranks' files on the first rank, which writes the small ones; nothing on the others.

        Only the first rank removes what was written if this fails: another one that loses it here cannot know
        whether it has all that it needs, and commits it.
        """
        if not ranks.is_first():
            ranks.share(list(written))
            return ()
        with removed_on_failure(self._folder):
            by_rank = ranks.share(list(written))
            write_counters(self._folder, self._counters)
            return committed_entries(
                self._context, self._folder, [file for files in by_rank for file in files]
            )


def free_device() -> None:
    """Give the memory of all tensors on the GPU back. Nothing on it can be used any more."""
    for found in gc.get_objects():
        # by its type, as isinstance asks the object, and a proxy of what is gone raises ReferenceError
        if issubclass(type(found), torch.Tensor) and found.is_cuda:
            with contextlib.suppress(RuntimeError):  # memory that is not torch's own stays
                found.untyped_storage().resize_(0)
    gc.collect()
    torch.cuda.empty_cache()
