"""Input of advice, and the statistics it rests on: medians of windows, never single points. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from pipeline.config.schema import Config
from pipeline.workers.summary import WorkersOf

WINDOW = 5
"""Rows that "now" is the median of: one odd iteration, or two, do not move it."""
MIN_ROWS = 5
"""Fewest rows of a run that gets advice: the first iterations are unlike all others (empty caches, a critic
that knows nothing)."""
TREND_ROWS = 40
"""Rows in which trends are looked for; older ones are of a run that has changed since."""
LOOK_BACK = 100
"""Most rows that any rule reads: advice on a long run costs no more, and the journal's end is enough."""
_MIN_EVALUATIONS = 4
_IGNORED_ABOVE = 1e15
"""Limit from which numbers are ignored: no valid metric is as large, so they are corrupt."""

Row = Mapping[str, float]


class Severity(StrEnum):
    """Importance of a finding, least first."""

    NOTE = "note"
    """Room for improvement; costs only time or money."""
    WARNING = "warning"
    """Probable harm to the result, or much waste."""
    PROBLEM = "problem"
    """Training that teaches nothing more, or something wrong; look before it goes on."""


class Rule(StrEnum):
    """Kinds of findings. docs/howto/read_a_run.md has a row for each."""

    REWARD_HACKING = "reward-hacking"
    REWARD_FALLING = "reward-falling"
    KL_JUMP = "kl-jump"
    AWAY_FROM_TEACHER = "away-from-teacher"
    LENGTH_EXPLOSION = "length-explosion"
    LENGTH_COLLAPSE = "length-collapse"
    ENTROPY_COLLAPSE = "entropy-collapse"
    CONSTANT_REWARD = "constant-reward"
    CONSTANT_COMPONENT = "constant-component"
    FLAT_GROUPS = "flat-groups"
    CLIPPING = "clipping"
    NOTHING_MOVES = "nothing-moves"
    STOPPED_EARLY = "stopped-early"
    FIRST_RATIO = "first-ratio"
    SKIPPED_STEPS = "skipped-steps"
    LOSS_SCALE = "loss-scale"
    GRADIENT_EXPLOSION = "gradient-explosion"
    BLIND_CRITIC = "blind-critic"
    TRUNCATION = "truncation"
    UNSCORED = "unscored"
    ENGINE_MISMATCH = "engine-mismatch"
    STALE_RESPONSES = "stale-responses"
    BOTTLENECK = "bottleneck"
    QUEUE_BOUND = "queue-bound"
    START_UP = "start-up"
    IDLE_WORKERS = "idle-workers"
    EMPTY_STARTS = "empty-starts"
    MANY_STARTS = "many-starts"
    WASTED = "wasted"
    SLOW_NODE = "slow-node"
    STRAGGLERS = "stragglers"
    PADDING = "padding"
    MEMORY = "memory"
    STATE_WRITES = "state-writes"


@dataclass(frozen=True)
class Advice:
    """One finding: what was seen, and what to do."""

    severity: Severity
    rule: Rule
    title: str
    """A few words, for one line."""
    what: str
    """The numbers, and the iterations that they are from."""
    remedy: str
    """Changes to make; names keys of the configuration."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that it rests on."""


Findings = Iterator[Advice]


@dataclass(frozen=True)
class TaskTime:
    """Duration and node of one attempt at a task."""

    iteration: int
    job_kind: str
    """:attr:`pipeline.run.tasks.Task.job_kind`."""
    shard: int
    node: str
    seconds: float
    is_committed: bool = True
    """Whether the attempt is the one that made the task done."""


@dataclass(frozen=True)
class AdviceInput:
    """All data that rules may read."""

    rows: Sequence[Row]
    """Rows of metrics.jsonl, ascending. Any number may be absent or not finite."""
    config: Config
    attempts: Sequence[TaskTime] = ()
    """Attempts of the newest iterations, or of all; without them rules about nodes and shards are silent."""
    workers: Sequence[WorkersOf] = ()
    """Workers by job kind; without them rules about starts are silent."""

    @property
    def trained(self) -> Sequence[Row]:
        """Newest rows of training iterations: a row that only evaluates the first policy is left out."""
        newest = self.rows[-LOOK_BACK:]
        return [row for row in newest if any(n != "iteration" and not n.startswith("evaluate/") for n in row)]


@dataclass(frozen=True)
class Series:
    """The finite values of one number, with their iterations."""

    name: str
    iterations: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice) -> "Series":
        return Series(self.name, self.iterations[part], self.values[part])

    def between(self, first: int, last: int) -> "Series":
        """Return the values of these iterations, both ends included."""
        kept = [(i, v) for i, v in zip(self.iterations, self.values, strict=True) if first <= i <= last]
        return Series(self.name, tuple(i for i, _ in kept), tuple(v for _, v in kept))

    @property
    def middle(self) -> float:
        return median(self.values)

    @property
    def span(self) -> str:
        """Iterations covered, in words."""
        first, last = self.iterations[0], self.iterations[-1]
        return f"iteration {first}" if first == last else f"iterations {first}-{last}"


def series(rows: Sequence[Row], name: str) -> Series:
    """Collect the values of ``name`` that are finite and not implausibly large."""
    found = [row for row in rows if _is_finite(row.get("iteration")) and _is_finite(row.get(name))]
    return Series(
        name, tuple(int(row["iteration"]) for row in found), tuple(float(row[name]) for row in found)
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < _IGNORED_ABOVE


def recent(evidence: AdviceInput, name: str, count: int = WINDOW) -> Series | None:
    """Return the last ``count`` values, or None where too few are recent to say anything."""
    rows = evidence.trained[-2 * count :]
    found = series(rows, name)[-count:]
    return found if len(evidence.trained) >= MIN_ROWS and len(found) >= min(count, 3) else None


def matching(evidence: AdviceInput, pattern: str) -> list[tuple[str, str]]:
    """Find (name, first group) of the numbers in recent rows that match a regular expression, in order."""
    names = dict.fromkeys(name for row in evidence.trained[-WINDOW:] for name in row)
    return [(name, found[1]) for name in names if (found := re.fullmatch(pattern, name))]


@dataclass(frozen=True)
class Trend:
    """The earlier and the later half of a series."""

    earlier: Series
    later: Series
    step: float
    """Median distance between successive values: the change that chance alone makes."""

    @property
    def change(self) -> float:
        return self.later.middle - self.earlier.middle

    def rises(self, at_least: float = 0.0) -> bool:
        """Whether it rises by more than twice what chance does, and by more than ``at_least``."""
        return self.change > max(2 * self.step, at_least, _smallest(self))

    def falls(self, at_least: float = 0.0) -> bool:
        return -self.change > max(2 * self.step, at_least, _smallest(self))


def _smallest(trend: Trend) -> float:
    """Return the largest change that may be rounding."""
    return 1e-9 * max(1.0, abs(trend.earlier.middle), abs(trend.later.middle))


def trend_of(found: Series, least: int = 2 * WINDOW) -> Trend | None:
    """Split a series into halves; None for fewer than ``least`` values.

    White noise of standard deviation s has a median step of about s, and the medians of two halves of ten
    differ by 0.6 s: twice the step is then three times that.
    """
    if len(found) < max(least, 2):
        return None
    steps = [abs(b - a) for a, b in zip(found.values, found.values[1:], strict=False)]
    half = len(found) // 2
    return Trend(found[:half], found[half:], median(steps))


def evaluation_trend(rows: Sequence[Row], name: str = "evaluate/reward") -> Trend | None:
    """Return the trend of the last six evaluations; they are rare, so four are enough."""
    return trend_of(series(rows, name)[-6:], _MIN_EVALUATIONS)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"
