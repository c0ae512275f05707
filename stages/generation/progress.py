"""Partial results of a task: responses saved by one attempt, taken over by the next. Whole ones only: of a
conversation of several turns all or nothing.

A save is made like a commit, data before record, but under names of the attempt's own: it does not make the
task done, and no reader has to trust it. One that does not verify, or has other inputs, is left out.

Each save holds all that the attempt has, also what it took over, under a new name; its record then replaces
the one of the save before, whose data are removed last. So whenever the process ends, the record that is
there names data that are whole.
"""

import json
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
from xxhash import xxh3_128_hexdigest

from pipeline.run.commits import CorruptData, Record, StaleData
from pipeline.run.durable import from_json, read_shared, replace_durably
from pipeline.run.paths import RunPaths
from pipeline.run.schemas import ROUTED_EXPERTS, VERSION_KEY, FinishReason, conform, version_of
from pipeline.run.seeds import derive_seed
from pipeline.run.shards import read_shard, write_shard
from pipeline.run.tasks import Task
from stages.context import Context
from stages.engines.base import Request, Sampling
from stages.files.routes import Routes, routes_column, routes_in
from stages.generation.chat import messages_json, messages_of
from stages.generation.episodes import Episode
from stages.logs import log
from stages.models.passes import PassedTokens, count_pass, counted_passes

SAVE_SECONDS = 300.0
"""Seconds between saves, and so the most work that is lost when a process is killed without a warning, not
counting the current batch."""

PARTIAL = pa.schema(
    [
        pa.field("request", pa.int32(), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("log_probs", pa.list_(pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("num_turns", pa.int32(), nullable=False),
        pa.field("messages", pa.string()),
    ],
    metadata={VERSION_KEY: b"partial/2"},
)
"""One row per finished response: the index of its request, and the episode; messages as JSON.
``routed_experts`` follows, where the engine gives it."""


@dataclass(frozen=True)
class PartialKey:
    """The origin of a task's responses. Those of another origin are of no use to it."""

    task: Task
    inputs: Mapping[str, str]
    """Lineage, and under ``requests`` a hash of the requests, the sampling and the batch plan."""
    policy_version: int
    seed: int

    @staticmethod
    def of(record: Record) -> "PartialKey":
        return PartialKey(record.task, record.inputs, record.policy_version, record.seed)


def origin_of(
    context: Context,
    version: int,
    requests: Sequence[Request],
    sampling: Sampling,
    plan: Sequence[Sequence[int]],
) -> PartialKey:
    """Return the origin of responses of policy ``version``. Every input must have been read before: the
    lineage so far counts."""
    # The prompts' tokens are not hashed: the lineage names the file that they are in.
    asked = [(len(r.prompt_tokens), r.max_new_tokens, r.seed, r.greedy) for r in requests]
    text = json.dumps([asked, asdict(sampling), [list(group) for group in plan]])
    task = context.task
    seed = derive_seed(context.config.seed, task.iteration, task.stage, task.shard)
    return PartialKey(task, context.lineage | {"requests": xxh3_128_hexdigest(text.encode())}, version, seed)


@dataclass(frozen=True)
class Saved:
    """The content of one save."""

    responses: Mapping[int, Episode]
    """Episodes by the index of their request."""
    compute_seconds: float = 0.0
    """Seconds of model compute, those of the attempts that it continues included."""
    passed: PassedTokens = field(default_factory=PassedTokens)
    """What went through the model, in these attempts too."""


def merge(saves: Iterable[Saved]) -> Saved:
    """Return the union of all saves; where several have a response, the first one's.

    Attempts continue each other, so the longest time is that of the whole, and so are the largest counts.
    """
    responses: dict[int, Episode] = {}
    seconds, passed = 0.0, PassedTokens()
    for save in saves:
        responses = {**save.responses, **responses}
        seconds = max(seconds, save.compute_seconds)
        passed = max(passed, save.passed, key=attrgetter("positions"))
    return Saved(responses, seconds, passed)


def load(context: Context, origin: PartialKey) -> Saved:
    """Return what earlier attempts saved of ``origin``. The log names saves that cannot be used, and why."""
    saves = []
    for path in context.files.partial_records():
        try:
            saves.append(_read(context.paths, path, origin))
        except (OSError, CorruptData, StaleData, KeyError, TypeError, ValueError) as error:
            log.warning(f"{context.paths.relative(path)} is not used: {error}")
    return merge(saves)


def _read(paths: RunPaths, path: Path, origin: PartialKey) -> Saved:
    """Read one save. Raises what reading and verifying raise, and StaleData when it is of another origin."""
    record = Record.from_json(from_json(read_shared(path)))
    if (found := PartialKey.of(record)) != origin:
        differing = [name for name, value in asdict(origin).items() if asdict(found)[name] != value]
        raise StaleData(record.task, f"this attempt differs in {', '.join(differing)}")
    table = read_shard(paths, record, PARTIAL)
    return Saved(from_table(table), record.metrics["compute_seconds"], PassedTokens.of(record.metrics))


def to_table(responses: Mapping[int, Episode]) -> pa.Table:
    """Return a table with a row per response, sorted by index."""
    rows = sorted(responses.items())
    names = [field.name for field in fields(Episode)]
    columns: dict[str, Any] = {name: [getattr(episode, name) for _, episode in rows] for name in names}
    columns["request"] = [index for index, _ in rows]
    columns["messages"] = list(map(messages_json, columns["messages"]))
    extra = None
    if any(routes is not None for routes in columns["routes"]):
        extra = pa.table({ROUTED_EXPERTS: routes_column(columns["routes"])})
    return conform(columns, PARTIAL, extra)


def from_table(table: pa.Table) -> dict[int, Episode]:
    """Return the episodes of a table; inverse of :func:`to_table`, but for float32 log-probabilities."""
    found: dict[int, Episode] = {}
    routes: list[Routes | None] = [None] * table.num_rows
    if ROUTED_EXPERTS in table.column_names:
        routes = [*routes_in(table[ROUTED_EXPERTS])]
    for row, routed in zip(table.select(PARTIAL.names).to_pylist(), routes, strict=True):
        row["finish_reason"] = FinishReason(row["finish_reason"])
        row["messages"] = messages_of(row["messages"])
        index = row.pop("request")
        found[index] = Episode(**row, routes=routed)
    return found


class Progress:
    """The responses of one task by the index of their request: found, added, saved from time to time."""

    def __init__(
        self, context: Context, origin: PartialKey, total: int, save_every: float = SAVE_SECONDS
    ) -> None:
        """Take over what earlier attempts saved, with the compute time it took.

        Args:
            total: how many responses the task has.
            save_every: seconds from one save to the next; 0 saves whenever something was added.
        """
        found = load(context, origin)
        self.responses = dict(found.responses)
        self.num_found = len(found.responses)
        self.total = total
        self._context = context
        self._origin = origin
        self._save_every = save_every
        self._num_saved = self.num_found
        self._latest: Path | None = None
        self._started = time.time()
        self._saved_at = time.monotonic()
        context.compute_seconds += found.compute_seconds
        count_pass(found.passed.tokens, found.passed.positions)
        if found.responses:
            log.info(f"{context.task} continues from {self.num_found} of {total} responses")

    @property
    def is_complete(self) -> bool:
        return len(self.responses) == self.total

    def add(self, finished: Mapping[int, Episode]) -> None:
        """Take in responses, and save if that is due. Raises OSError when it cannot."""
        self.responses.update(finished)
        if time.monotonic() - self._saved_at >= self._save_every:
            self.save()

    def save(self) -> None:
        """Make everything durable, unless nothing was added since. Raises OSError when the disk is full."""
        if len(self.responses) == self._num_saved:
            return
        files, attempt = self._context.files, self._context.attempt
        before = self._latest
        # Random, not numbered: a scheduler that starts an attempt again gives it the same name.
        self._latest = files.partial(attempt, os.urandom(4).hex())
        entry = write_shard(self._context.paths, self._latest, to_table(self.responses))
        record = Record(
            outputs=(entry,),
            attempt=attempt,
            **vars(self._origin),
            rows=len(self.responses),
            schema=version_of(PARTIAL),
            started=self._started,
            ended=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            job_id=os.environ.get("SLURM_JOB_ID", ""),
            metrics={"compute_seconds": self._context.compute_seconds, **counted_passes().metrics()},
        )
        replace_durably(files.partial_record(attempt), json.dumps(record.to_json(), indent=1) + "\n")
        if before is not None:
            before.unlink(missing_ok=True)
        self._num_saved = record.rows
        self._saved_at = time.monotonic()
