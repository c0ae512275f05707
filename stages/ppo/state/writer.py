"""Writing of a learner's state behind the commit of its policy, by all ranks at once."""

import contextlib
import gc
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in
from pipeline.run.commits import FileEntry
from pipeline.run.durable import make_folder
from stages import ranks
from stages.context import Context
from stages.logs import log
from stages.models.devices import device
from stages.ppo.state.copying import copies, lacking_room, passing_bytes
from stages.ppo.state.model_files import ModelFiles
from stages.ppo.state.saved_state import File, write_counters, write_slices
from stages.ppo.state.slices import Slice
from stages.ppo.training import Learner
from stages.process.heap import give_back_freed
from stages.training import committed_entries, removed_on_failure

CRITIC = "critic"
"""Folder of a state that holds the critic, as a Hugging Face directory."""


@dataclass(frozen=True)
class StatePart:
    """What this rank writes of one trainer's state."""

    name: str
    slices: Sequence[Slice]
    kinds: Sequence[str]

    def num_bytes(self, of_host: bool = True) -> int:
        """Return the bytes of it; without ``of_host`` those that are not in the host's memory."""
        parts = [one.parts[kind] for one in self.slices for kind in self.kinds]
        return sum(part.nbytes for part in parts if of_host or part.device.type != "cpu")

    def on_host(self) -> "StatePart":
        """Copy it to the host's memory, but for what is there already (update.offload_optimizer)."""
        moved = [
            replace(one, parts={kind: one.parts[kind].cpu() for kind in self.kinds}) for one in self.slices
        ]
        return replace(self, slices=moved)

    def copied(self) -> "StatePart":
        """Copy all of it to the host's memory."""
        found = copies([one.parts[kind] for one in self.slices for kind in self.kinds])
        copied = [replace(one, parts={kind: next(found) for kind in self.kinds}) for one in self.slices]
        return replace(self, slices=copied)


class LearnerState:
    """The state of a learner, as :class:`stages.context.StateWriter`."""

    def __init__(self, context: Context, learner: Learner) -> None:
        self._folder = context.files.state(context.attempt)
        self._context = context
        self._parts = [StatePart(t.name, t.own(), t.kinds) for t in learner.trainers]
        self._counters = {trainer.name: trainer.counters() for trainer in learner.trainers}
        self._critic: ModelFiles | None = learner.critic.model_files() if learner.critic else None
        self._is_copy = False

    def detach(self) -> bool:
        stays = self._context.stays  # the next update wants all of it where it is, and others fit beside it
        if stays or device().type == "cpu":
            return True
        if lacking_room(self._num_bytes(of_host=False)):
            return False
        with ranks.agreed(MemoryError, RuntimeError):  # before they gather
            self._parts = [part.on_host() for part in self._parts]
        if self._critic is not None:
            self._critic = self._critic.on_host()
        ranks.share(None)  # others may still have gathered from this rank
        free_device()
        return True

    def copied(self, is_wanted: bool) -> float | None:
        config = self._context.config
        is_wanted = is_wanted and not has_reference_in(config, ReferenceStage.UPDATE)  # else nothing stays
        if not all(ranks.share(is_wanted)):
            return None
        num_bytes = self._num_bytes()
        lack = lacking_room(num_bytes + passing_bytes()) or self._copy()
        if lack is None:
            return num_bytes
        if ranks.is_first():
            log.info(
                "no room for a copy of the trainer's state, which is written before the next update begins "
                f"({lack}); what helps is more memory, or update.save_every"
            )
        return None

    def _num_bytes(self, of_host: bool = True) -> float:
        """Return the bytes that this rank copies."""
        critic = sum(f.nbytes for f in self._critic.files) / ranks.size() if self._critic else 0
        return critic + sum(part.num_bytes(of_host) for part in self._parts)

    def _copy(self) -> str | None:
        """Copy this rank's part, and let :meth:`write` write the copy. Returns why there is none, on every
        rank."""
        error: Exception | None = None
        critic = self._critic
        give_back_freed()  # what the passes have left, before as much is taken
        try:
            parts = [part.copied() for part in self._parts]
        except (MemoryError, RuntimeError) as problem:
            error = problem
        try:
            ranks.agree(error)  # before they gather
            if critic is not None:
                critic.write_settings(self._folder / CRITIC)  # by the model, which the thread leaves alone
                critic = critic.on_host()
        except (MemoryError, RuntimeError, OSError) as problem:
            return str(problem)
        self._parts, self._critic, self._is_copy = parts, critic, True
        return None

    def write(self, is_wanted: bool) -> tuple[FileEntry, ...]:
        with ranks.in_background() if self._is_copy else contextlib.nullcontext():
            try:
                if ranks.share(is_wanted)[0]:
                    return self._write()
                shutil.rmtree(self._folder, ignore_errors=True)
                return ()
            finally:
                self._parts, self._critic = [], None  # the context has this writer, and this one the context

    def _write(self) -> tuple[FileEntry, ...]:
        with removed_on_failure(self._folder):
            with ranks.agreed(OSError):
                written = self._write_slices()
            if self._critic is not None:
                written += self._write_critic(self._critic)
        return self._all_files(written)

    def _write_critic(self, critic: ModelFiles) -> list[File]:
        folder = self._folder / CRITIC
        return critic.write_weights(folder) if self._is_copy else critic.write(folder)

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
