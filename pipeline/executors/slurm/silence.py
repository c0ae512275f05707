"""Workers that Slurm shows as running and that have not beaten for minutes: looked at twice, by two passes.

All are silent while the file server is away, and each beats soon after it is back: so none is ended at the
first look. It is noted in ``RUN/slurm/silent.json``, and a pass that finds the same beat there later ends the
worker. Clocks of nodes differ: the time between two looks is taken from one clock, or is so long that no
difference between clocks matters.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pipeline.config.conversion import converted
from pipeline.run.durable import replace_durably
from pipeline.run.pass_requests import request_pass_later
from pipeline.run.paths import RunPaths
from slurm.sharedfiles import read_newest, sealed, unsealed

SILENT_SECONDS = 300.0
"""Age of its newest beat at which a worker that Slurm shows as running is taken to be stuck."""
LOOK_AGAIN_SECONDS = 45.0
"""Least seconds between the two looks: each worker beats in them, once the file server is back."""
_ANY_CLOCK_SECONDS = LOOK_AGAIN_SECONDS + SILENT_SECONDS
"""The same between looks from two machines: were their clocks further apart, no beat could be judged."""

_KEPT_SECONDS = 3600.0
"""Seconds, from the first look, in which it is kept for what a worker was cancelled: Slurm may take long to
end it, and passes to judge that."""


@dataclass(frozen=True)
class Silence:
    """A beat that nothing has followed, and when it was first seen so."""

    beat: float
    """Time of the beat, by the clock of its worker."""
    seen: Mapping[str, float] = field(default_factory=dict)
    """Unix times of the first look from each machine, by its own clock."""
    is_cancelled: bool = False
    """Whether a pass has cancelled its worker."""

    def has_lasted(self, host: str, now: float) -> bool:
        """Whether it is time for the second look, by the clock of a machine."""
        own = self.seen.get(host, now)
        others = (then for name, then in self.seen.items() if name != host)
        return now - own >= LOOK_AGAIN_SECONDS or any(now - then >= _ANY_CLOCK_SECONDS for then in others)

    def is_recently_cancelled(self, now: float) -> bool:
        """Whether its worker was cancelled, and how it ended may not be judged yet."""
        return self.is_cancelled and any(now - then < _KEPT_SECONDS for then in self.seen.values())

    def seen_from(self, host: str, now: float) -> "Silence":
        """Add a look. One that is still to come, of a clock that was set back, is made again."""
        then = self.seen.get(host, now)
        return replace(self, seen={**self.seen, host: min(then, now)})


Silences = Mapping[str, Silence]
"""Silences by the workers' elements."""


def silent_twice(
    paths: RunPaths, silent: Mapping[str, float], still_running: Callable[[Sequence[str]], list[str]]
) -> list[str]:
    """Note silent workers, and return the elements to cancel, whose workers another pass has seen as silent;
    else request one. By a clock that is behind all seem silent: one that beats before the second look lives.

    Args:
        silent: times of the newest beats of the workers that are silent now, by element.
        still_running: returns those of some elements that run on with the same workers.
    """
    ended, silences = look_again(silent, read_silences(paths), socket.gethostname(), time.time())
    with contextlib.suppress(OSError):  # then a later pass begins again
        note_silences(paths, silences)
    if still := still_running(ended):
        with contextlib.suppress(OSError):  # then it looks like a person's cancellation
            note_silences(paths, as_cancelled(silences, still))
    if len(ended) < len(silent):
        request_pass_later(paths, LOOK_AGAIN_SECONDS)
    return still


def look_again(
    silent: Mapping[str, float], noted: Silences, host: str, now: float
) -> tuple[list[str], dict[str, Silence]]:
    """Return the elements to end, whose workers were as silent at an earlier look, and all silences to note.
    Pure.

    Args:
        silent: times of the newest beats of the workers that are silent now, by element.
        noted: what earlier passes have noted.
        host: name of this machine.
    """
    before = {name: s for name, s in noted.items() if silent.get(name) == s.beat}
    ended = sorted(name for name, silence in before.items() if silence.has_lasted(host, now))
    others = {name: s for name, s in noted.items() if s.is_recently_cancelled(now)}
    return ended, others | {
        name: before.get(name, Silence(beat)).seen_from(host, now) for name, beat in silent.items()
    }


def as_cancelled(silences: Silences, elements: Collection[str]) -> dict[str, Silence]:
    """Return silences with those of some elements as what they were cancelled for. Pure."""
    return {name: replace(s, is_cancelled=s.is_cancelled or name in elements) for name, s in silences.items()}


def read_silences(paths: RunPaths) -> dict[str, Silence]:
    """Return what earlier passes have noted; a spoilt file holds nothing: they are looked at again."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = unsealed(read_newest(_file(paths)))
        return {name: converted(Silence, silence) for name, silence in content["silent"].items()}
    return {}


def note_silences(paths: RunPaths, silences: Silences) -> None:
    content = {name: asdict(silence) for name, silence in silences.items()}
    replace_durably(_file(paths), sealed({"silent": content}))


def _file(paths: RunPaths) -> Path:
    return paths.slurm / "silent.json"
