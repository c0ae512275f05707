"""The live view, line by line. Pure: a look and what the person chose in, lines out."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rich.text import Text

from pipeline.metrics.advice_input import Severity
from pipeline.metrics.terminal import Column, Row, sparkline
from pipeline.status.lanes import Lane, ShardState
from pipeline.status.state import Status
from pipeline.status.text import About, Sentence, job_details, progress, said, time_or_dash
from pipeline.text import MISSING, clock, duration, number, printable, shortened
from pipeline.watch.event_lines import event_lines

LEAST_WIDTH, LEAST_HEIGHT = 40, 8


class Page(StrEnum):
    """Page that fills the screen."""

    RUN = "run"
    LOG = "log"
    HELP = "help"


@dataclass(frozen=True)
class LogEnd:
    """The end of the log to show for a lane."""

    lane: tuple[int, str]
    """Key of the lane, :attr:`Lane.key`."""
    title: str
    path: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class ScreenState:
    """Choices of the person, and how the reading goes."""

    page: Page = Page.RUN
    selected: tuple[int, str] | None = None
    """Key of the selected lane, :attr:`Lane.key`; None: the first that has something to do."""
    is_paused: bool = False
    log: LogEnd | None = None
    """End of the selected lane's log; None: not read yet."""
    trouble: str | None = None
    """Reason why what is shown is old."""


MARKS = {
    ShardState.DONE: ("■", "green"),
    ShardState.RUNNING: ("▸", "cyan"),
    ShardState.AGAIN: ("↻", "yellow"),
    ShardState.FAILED: ("✗", "bold red"),
    ShardState.WAITING: ("·", ""),
    ShardState.IDLE: ("-", "dim"),
}
"""Sign and style of a shard's state: the shape alone is enough, colours may be off."""

METRICS: tuple[Column, ...] = (
    Column("reward", ("reward/mean",)),
    Column("held-out", ("evaluate/reward",)),
    Column("KL", ("objective/kl",), 2),
    Column("length", ("response_length/mean",), 1),
    Column("entropy", ("policy/entropy",), 3),
    Column("loss", ("policy/loss",), 4),
    Column("s/iter", ("seconds/iteration",), 1),
    Column("clipped %", ("policy/clip_fraction_low", "policy/clip_fraction_high"), 1, scale=100),
    Column("cut %", ("response_length/clip_ratio",), 1, scale=100),
    Column("grad norm", ("policy/grad_norm",), 3),
    Column("expl. var", ("value/explained_variance",), 3),
    Column("tokens/s", ("tokens_per_second/rollout",), 0),
)
"""Metrics, most wanted first: a low screen does without the last."""
SPARK_ROWS = 60
"""Iterations that sparklines show."""

HELP = """\
marks, one for each shard        keys
  ■ done                           up, down   choose a lane
  ▸ running                        r s w u e  the lane of rollout, score,
  ↻ retried                                   reward, update, evaluate
  · waiting in the queue           l          end of its failed or newest log
  ✗ failed, and not retried        p          pause: the screen stays as it is
  - not started                    q          quit; the run goes on
More shards than fit are drawn in    ?        this page
proportion; the counts are exact.

Metrics: the newest value, and the last 60 iterations from low to high.
Nothing that you do here changes the run. Reasons why jobs wait are those of
Slurm, in plain words. More: slurm-ppo status RUN, slurm-ppo logs RUN."""

Lines = list[Text]


def screen(look: Status | None, view: ScreenState, width: int, height: int) -> Lines:
    """Render exactly ``height`` lines of at most ``width`` columns."""
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    if view.page is Page.HELP:
        lines = [Text("slurm-ppo watch", "bold"), Text(), *map(Text, HELP.splitlines())]
    elif view.page is Page.LOG:
        lines = _log_page(view, width, height - 1)
    elif look is None:
        lines = [Text("reading the run directory ...")]
    else:
        lines = _run_page(look, view, width, height - 1)
    return framed(lines, [_footer(view)], width, height)


def framed(lines: Lines, bottom: Lines, width: int, height: int) -> Lines:
    """Return exactly ``height`` lines of at most ``width`` columns, the last of which are ``bottom``."""
    shown = [*_filled(lines, height - len(bottom)), *bottom]
    for line in shown:
        line.truncate(width, overflow="ellipsis")
    return shown


def _filled(lines: Lines, height: int) -> Lines:
    return [*lines[:height], *(Text() for _ in range(height - len(lines)))]


def _footer(view: ScreenState) -> Text:
    keys = {
        Page.RUN: "q quit   l log   up/down lane   p pause   ? help",
        Page.LOG: "l back   up/down other lane   p pause   q quit",
        Page.HELP: "? back   q quit",
    }[view.page]
    paused = [Text(" PAUSED ", "reverse"), Text(" ")] if view.is_paused else []
    return Text.assemble(*paused, (keys, "dim"))


# --- the run ---


def _run_page(look: Status, view: ScreenState, width: int, height: int) -> Lines:
    """Render the header, then lanes, metrics and events, which share the height; findings come last."""
    words = said(look)
    head, findings = _header(words, look, view, width), _findings(words)
    room = height - len(head) - len(findings)
    metrics = _metrics(look, width)
    lanes = _lanes(look, view, width, max(3, room - 1 - min(len(metrics), 3) - 1 - 2))
    room -= len(lanes) + 1
    metrics = metrics[: max(2, room - 1 - 3)] if metrics else []
    room -= len(metrics) + 2
    blocks = [head, lanes, metrics, _latest(look, width, room)]
    lines = [line for block in blocks if block for line in (Text(), *block)][1:]
    return [*_filled(lines, height - len(findings)), *findings]


_STATE_STYLES = {"running": "green", "complete": "green", "failed": "bold red", "unknown": "yellow"}


_HEADER = {
    *(About.QUEUE, About.FINISH, About.DRIVERS, About.OWNER, About.TRAINER),
    *(About.PAUSE, About.HELD, About.BUDGET, About.WORKERS, About.STARTS),
}
_WARNINGS = (About.SILENCE, About.AWAITED, About.TROUBLE, About.WAY_ON)


def _header(words: Sequence[Sentence], look: Status, view: ScreenState, width: int) -> Lines:
    """Render the run and its state, how far it is, and what keeps it; short phrases share a line."""
    right = Text.assemble((look.state, _STATE_STYLES.get(look.state, "bold")), f"  {clock(look.time)}")
    room = width - len(right) - 2
    path = look.run if len(look.run) <= room else f"…{look.run[1 - room :]}"
    lines = [progress(look)]
    for line in (line for one in words if one.about in _HEADER for line in _folded(one.text, width)):
        if len(lines[-1]) + 2 + len(line) <= width:
            lines[-1] += f"; {line}"
        else:
            lines.append(line)
    troubles = [*([view.trouble] if view.trouble else []), *(w.text for w in words if w.about in _WARNINGS)]
    warnings = (Text(line, "yellow") for text in troubles for line in _folded(text, width))
    first = Text.assemble((path, "bold"), " " * (room + 2 - len(path)), right)
    return [first, *map(Text, lines), *warnings]


def _folded(text: str, width: int, indent: str = "", lines: int = 2) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, max_lines=lines, placeholder=" …")


def _findings(words: Sequence[Sentence]) -> Lines:
    shown = [one.text for one in words if one.about is About.ADVICE]
    return [Text(text, "bold red" if text.startswith(Severity.PROBLEM) else "yellow") for text in shown]


def _latest(look: Status, width: int, room: int) -> Lines:
    """Render the last events; a failure on several lines where they fit, for its reason comes last."""
    lines: Lines = []
    for one in reversed(event_lines(look.events[-500:], look.rows[-30:], look.created, look.iterations)):
        if len(lines) >= room:
            break
        folded = _folded(str(one), width, " " * 9, lines=3)
        is_folded = one.is_bad and len(lines) + len(folded) <= room
        message = folded if is_folded else [str(one)]
        lines = [*(Text(line, "red" if one.is_bad else "") for line in message), *lines]
    return lines


# --- lanes ---

_COLUMNS = (("done", 11), ("run", 6), ("wait", 6), ("fail", 6), ("waited", 13), ("ran", 13))
_NAME = 13
_NARROW, _WIDE = 66, 100


def chosen(look: Status | None, view: ScreenState) -> Lane | None:
    """Find the selected lane; where that is gone its stage's next; else the first with something to do."""
    if look is None or not look.lanes:
        return None
    stage = view.selected[1] if view.selected else None
    same = [lane for lane in look.lanes if lane.key == view.selected]
    similar = [lane for lane in look.lanes if lane.progress.stage == stage]
    busy = [lane for lane in look.lanes if lane.progress.done < lane.progress.total]
    return next(iter([*same, *similar, *busy, *look.lanes]))


def _lanes(look: Status, view: ScreenState, width: int, height: int) -> Lines:
    """Render a title, and as many lanes as fit around the selected one."""
    if not look.lanes:
        return []
    selected = chosen(look, view)
    blocks = [_lane(lane, lane is selected, width) for lane in look.lanes]
    title = _row(" ", "iter stage", Text("shards"), [name for name, _ in _columns(width)], width)
    title.stylize("bold")
    first = 0
    index = look.lanes.index(selected) if selected else 0
    while first < index and sum(map(len, blocks[first : index + 1])) > height - 1:
        first += 1
    lines = [line for block in blocks[first:] for line in block]
    return [title, *lines[: max(1, height - 1)]]


def _columns(width: int) -> tuple[tuple[str, int], ...]:
    return _COLUMNS[: 6 if width >= _WIDE else 4 if width >= _NARROW else 1]


def _row(pointer: str, name: str, marks: Text, cells: Sequence[str], width: int) -> Text:
    right = "".join(cell.rjust(size) for cell, (_, size) in zip(cells, _columns(width), strict=False))
    marks.pad_right(width - 2 - _NAME - len(right) - len(marks))
    return Text.assemble((pointer, "bold"), shortened(name, _NAME).ljust(_NAME + 1), marks, right)


def _lane(lane: Lane, is_selected: bool, width: int) -> Lines:
    progress = lane.progress
    room = width - 2 - _NAME - sum(size for _, size in _columns(width)) - 1
    counts = (progress.running, progress.waiting, progress.failed)
    cells = [f"{progress.done}/{progress.total}", *(str(count or MISSING) for count in counts)]
    cells += [time_or_dash(progress.queue_seconds), time_or_dash(progress.run_seconds)]
    name = f"{progress.iteration:4d} {progress.stage}"
    row = _row(">" if is_selected else " ", name, marks_of(lane.shards, room), cells, width)
    return [row, *(Text(f"      {said}", "dim") for said in _details(lane, is_selected, width))]


def _details(lane: Lane, is_selected: bool, width: int) -> list[str]:
    """Describe the selected lane in full; of others say why they wait."""
    progress = lane.progress
    if not is_selected:
        reason = progress.reason if progress.waiting else None
        if reason and progress.helps:
            return _folded(f"{reason} ({progress.helps})", width - 6)
        return [reason] if reason else []
    parts = job_details(progress, len(f"{progress.iteration:4d} {progress.stage}") > _NAME)
    if width < _WIDE:
        times = (("waited", progress.queue_seconds), ("ran", progress.run_seconds))
        parts += [f"{word} {duration(seconds)}" for word, seconds in times if seconds]
    return _folded("; ".join(parts), width - 6)


def marks_of(shards: Sequence[ShardState], width: int) -> Text:
    """Draw a mark for each shard; more than fit in proportion, sorted by state, no state left out."""
    if len(shards) > width:
        counts = Counter(sorted(shards, key=list(ShardState).index))
        sizes = Counter({state: max(1, count * width // len(shards)) for state, count in counts.items()})
        sizes[max(counts, key=lambda state: counts[state])] += width - sizes.total()
        shards = list(sizes.elements())
    return Text.assemble(*(MARKS[state] for state in shards))


# --- metrics ---

_CELL = 38


def _metrics(look: Status, width: int) -> Lines:
    """Render name, newest value and sparkline, in as many columns as fit, read along the rows."""
    rows = look.rows[-SPARK_ROWS:]
    shown = [column for column in METRICS if any(column.value(row) is not None for row in rows)]
    per_line = max(1, width // _CELL)
    size = width // per_line
    cells = [_metric(column, rows, size) for column in shown]
    return [Text().join(cells[i : i + per_line]) for i in range(0, len(cells), per_line)]


def _metric(column: Column, rows: Sequence[Row], width: int) -> Text:
    known = [value for row in rows if (value := column.value(row)) is not None]
    head = f"{column.title:<10}{number(known[-1], column.digits):>9}  "
    return Text.assemble(head, (sparkline(known, width - 23).ljust(width - len(head)), "cyan"))


# --- a log ---


def _log_page(view: ScreenState, width: int, height: int) -> Lines:
    """Render title, path in full, so that it can be copied, and as many last lines as fit."""
    if view.log is None:
        return [Text("reading the log ...")]
    path = [Text(part, "dim") for part in _broken(view.log.path, width)]
    head = [Text(view.log.title, "bold"), *path, Text()]
    room = max(1, height - len(head))
    ends = [Text(part) for line in view.log.lines[-room:] for part in _broken(printable(line), width)]
    return [*head, *ends[-room:]]


def _broken(text: str, width: int) -> list[str]:
    """Break a text anywhere, so that nothing is added or lost."""
    return [text[i : i + width] for i in range(0, len(text), width)] or [""]


_ASCII = str.maketrans("■▸↻·✗…▁▂▃▄▅▆▇█±●─", "#>~.x~_.-=+*%@+o-")


def to_ascii(line: Text) -> Text:
    """Translate a line for terminals that show nothing but ASCII."""
    plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return Text(plain, spans=list(line.spans), style=line.style)
