"""Rules about where the time goes. Pure; a rule without its numbers is silent."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from pipeline.config.scheduler import LocalConfig, key_of, resources_of
from pipeline.config.schema import Config
from pipeline.metrics.advice_input import (
    LOOK_BACK,
    MIN_ROWS,
    WINDOW,
    Advice,
    AdviceInput,
    Findings,
    Rule,
    Severity,
    TaskTime,
    percent,
    recent,
    series,
)
from pipeline.run.plan import Plan
from pipeline.run.tasks import Stage
from pipeline.text import duration, number
from slurm.limits import parse_memory

_WORTH_SECONDS = 60.0
"""Seconds of an iteration from which on speed matters: in shorter ones no gain is noticed."""
_LIMITING_SHARE = 0.7


def bottleneck(evidence: AdviceInput) -> Findings:
    """Detect the stage that takes most of each iteration: nothing else is worth making faster."""
    for job_kind in _job_kinds(evidence):
        share, seconds = _share_of_iteration(evidence, job_kind), recent(evidence, f"seconds/{job_kind}")
        if seconds and share is not None and share > _LIMITING_SHARE:
            what = f"{percent(share)} of each iteration, {duration(seconds.middle)}, in {seconds.span}"
            title, names = f"{job_kind} limits the throughput", (seconds.name, "seconds/iteration")
            remedy = _faster(evidence.config, job_kind)
            yield Advice(Severity.NOTE, Rule.BOTTLENECK, title, what, remedy, names)


def _job_kinds(evidence: AdviceInput) -> tuple[str, ...]:
    """Return the job kinds that an iteration waits for, so not evaluation."""
    return Plan.of(evidence.config).job_kinds


def _share_of_iteration(evidence: AdviceInput, job_kind: str) -> float | None:
    """Return its share of the time; None if unknown, or iterations are too short to matter."""
    whole, part = recent(evidence, "seconds/iteration"), recent(evidence, f"seconds/{job_kind}")
    if whole is None or part is None or whole.middle < _WORTH_SECONDS:
        return None
    return part.middle / whole.middle


def _faster(config: Config, job_kind: str) -> str:
    key = key_of(job_kind)
    if job_kind == Stage.UPDATE:
        is_local = isinstance(config.scheduler, LocalConfig)
        ranks = f"{key}.ranks" if is_local else f"{key}.nodes or {key}.ntasks_per_node"
        return f"raise {ranks} or update.tokens_per_micro_batch, set update.remove_padding=true"
    more = f"{key}.array_parallelism and {key}.partition" if config.slurm else "the nodes of the allocation"
    if isinstance(config.scheduler, LocalConfig):
        more = f"{key}.slots and scheduler.slots"
    shards = f"raise rollout.num_shards={config.rollout.num_shards} as far as {more} let them run at once"
    part, is_vllm = _engine(config, job_kind)
    engine = "" if is_vllm else f", set {part}.engine=vllm"
    also = (
        "raise rollout.tokens_per_batch (vllm: rollout.vllm.max_num_seqs)"
        if part == Stage.ROLLOUT
        else "raise reward.tokens_per_batch, or score large models in scheduler.pools"
    )
    return f"{shards}{engine}, {also}"


def _engine(config: Config, job_kind: str) -> tuple[str, bool]:
    """Return the group of the configuration that names a job kind's engine, and whether that is vLLM."""
    if job_kind == Stage.ROLLOUT:
        return "rollout", config.rollout.engine == "vllm"
    return "reward", config.reward.engine == "vllm"


_GAP_SHARE = 0.5


def queue_bound(evidence: AdviceInput) -> Findings:
    """Detect jobs that wait longer than they run; without accounting, iterations that are mostly idle."""
    if not evidence.config.slurm:
        return
    waited, ran = _sums(evidence, "slurm/queue_seconds/"), _sums(evidence, "slurm/run_seconds/")
    if ran and sum(waited.values()) > sum(ran.values()):
        job_kind = max(waited, key=lambda name: waited[name])
        seconds = f"{duration(sum(waited.values()))} waited and {duration(sum(ran.values()))} run"
        what = f"{seconds}, summed over jobs, in the last iterations; most for {job_kind}"
        title = "jobs wait longer in the queue than they run"
        names: tuple[str, ...] = (f"slurm/queue_seconds/{job_kind}", f"slurm/run_seconds/{job_kind}")
        key, others = key_of(job_kind if job_kind in _job_kinds(evidence) else Stage.ROLLOUT), ""
    elif not ran and (gap := _gap(evidence)) > _GAP_SHARE:
        what = f"no stage runs for {percent(gap)} of an iteration (medians of the last {WINDOW})"
        title, names = "the run waits in the queue most of the time", ("seconds/iteration",)
        key, others = key_of(Stage.ROLLOUT), " and of the other stages"
    else:
        return
    given = evidence.config.slurm
    remedy = (
        f"name several partitions in {key}.partition{others}, ask for less time ({key}.time) so that jobs "
        f"fit into gaps, or raise scheduler.linger_max={given.linger_max}, so that jobs stay longer"
    )
    yield Advice(Severity.WARNING, Rule.QUEUE_BOUND, title, what, remedy, names)


def _sums(evidence: AdviceInput, prefix: str) -> dict[str, float]:
    """Sum numbers over the last rows, by what follows ``prefix`` in their names."""
    rows = evidence.trained[-WINDOW:] if len(evidence.trained) >= MIN_ROWS else []
    names = {name for row in rows for name in row if name.startswith(prefix)}
    sums = {name.removeprefix(prefix): sum(series(rows, name).values) for name in sorted(names)}
    return {name: total for name, total in sums.items() if total > 0}


def _gap(evidence: AdviceInput) -> float:
    """Return the share of an iteration that is in no stage; stages that overlap only make it smaller."""
    shares = [_share_of_iteration(evidence, job_kind) for job_kind in _job_kinds(evidence)]
    known = [share for share in shares if share is not None]
    return 1 - sum(known) if known and len(known) == len(shares) else 0.0


_START_UP_SHARE = 0.5
_START_UP_SECONDS = 30.0


def start_up(evidence: AdviceInput) -> Findings:
    """Detect tasks that load models for longer than they use them."""
    for job_kind in _job_kinds(evidence):
        compute, total = recent(evidence, f"seconds/compute/{job_kind}"), _task_seconds(evidence, job_kind)
        if compute is None or total is None or total <= 0:
            continue
        lost, tasks = total - compute.middle, _num_tasks(evidence, job_kind)
        if lost / total > _START_UP_SHARE and lost / tasks > _START_UP_SECONDS:
            what = (
                f"{percent(lost / total)} of the {duration(total)} that tasks take in an iteration is not "
                f"compute, {duration(lost / tasks)} in each task ({compute.span})"
            )
            title, names = f"{job_kind} mostly starts up", (f"seconds/{job_kind}", compute.name)
            remedy = _fewer_starts(evidence.config, job_kind)
            yield Advice(Severity.WARNING, Rule.START_UP, title, what, remedy, names)


_IDLE_SHARE = 0.3


def idle_workers(evidence: AdviceInput) -> Findings:
    """Detect workers that hold what they were given, and wait for much of the time."""
    if not evidence.config.slurm:
        return
    for job_kind in (*_job_kinds(evidence), Stage.EVALUATE):
        found = recent(evidence, f"slurm/worker_idle_share/{job_kind}")
        if found and found.middle > _IDLE_SHARE:
            key = key_of(job_kind)
            what = f"{percent(found.middle)} of the time that they hold their resources, in {found.span}"
            remedy = (
                "have stages or runs share a partition, where workers make room for jobs that need their "
                f"place; or lower {key}.linger: with 0 they exit at once, and each task pays for a start. "
                "Where the GPUs would be idle anyway, leave it"
            )
            title = f"workers of {job_kind} wait for much of their time"
            yield Advice(Severity.NOTE, Rule.IDLE_WORKERS, title, what, remedy, (found.name,))


def _fewer_starts(config: Config, job_kind: str) -> str:
    more = "raise data.prompts_per_iteration, put models and environment on a fast disk"
    if job_kind == Stage.UPDATE:
        return more
    more += f", or lower rollout.num_shards={config.rollout.num_shards}"
    part, is_vllm = _engine(config, job_kind)
    sooner = f"{part}.vllm.enforce_eager=true or {part}.vllm.keep_compiled=true start sooner"
    return f"{more}; {sooner}" if is_vllm else more


def _task_seconds(evidence: AdviceInput, job_kind: str) -> float | None:
    """Return the seconds of all tasks of an iteration: from attempts, accounting, or the only task's time."""
    totals: dict[int, float] = {}
    for attempt in evidence.attempts:
        if attempt.job_kind == job_kind and attempt.is_committed:
            totals[attempt.iteration] = totals.get(attempt.iteration, 0.0) + attempt.seconds
    if totals:
        return median([totals[iteration] for iteration in sorted(totals)[-WINDOW:]])
    found = recent(evidence, f"slurm/run_seconds/{job_kind}")
    if found is None and _num_tasks(evidence, job_kind) == 1:
        found = recent(evidence, f"seconds/{job_kind}")
    return found.middle if found else None


def _num_tasks(evidence: AdviceInput, job_kind: str) -> int:
    return 1 if job_kind == Stage.UPDATE else evidence.config.rollout.num_shards


_WASTED_MUCH, _WASTED_MOST = 0.15, 0.4


def wasted(evidence: AdviceInput) -> Findings:
    """Detect much time in attempts without a result: failures, preemptions, time limits."""
    found = recent(evidence, "slurm/wasted_share")
    share = found.middle if found else _wasted_by_attempts(evidence)
    if share <= _WASTED_MUCH:
        return
    severity = Severity.PROBLEM if share > _WASTED_MOST else Severity.WARNING
    what = f"{percent(share)} of the hours went to attempts without a result"
    what += f", {found.span}" if found else ""
    remedy = (
        "see why: slurm-ppo logs RUN --failed. For time limits raise the stage's time, such as "
        "scheduler.rollout.time, or rollout.num_shards; for memory its mem, such as scheduler.update.mem; "
        "leave bad nodes out, such as with scheduler.rollout.exclude"
        if evidence.config.slurm
        else "see why: slurm-ppo logs RUN --failed; for time limits raise scheduler.time_limit"
    )
    title = "much of the compute leads to nothing"
    yield Advice(severity, Rule.WASTED, title, what, remedy, ("slurm/wasted_share",))


def _wasted_by_attempts(evidence: AdviceInput) -> float:
    attempts = evidence.attempts
    total = sum(a.seconds for a in attempts)
    if len({a.iteration for a in attempts}) < MIN_ROWS or total <= 0:
        return 0.0
    return sum(a.seconds for a in attempts if not a.is_committed) / total


_SLOW_FACTOR, _SLOW_ITERATIONS, _LEAST_SECONDS = 1.4, 3, 5.0
"""Thresholds. Shards differ in time as responses do in length, so a node's median over iterations counts."""


def slow_node(evidence: AdviceInput) -> Findings:
    """Detect a node whose tasks take longer than the same tasks elsewhere, time and again."""
    ratios: dict[tuple[str, str], dict[int, float]] = {}
    for (iteration, job_kind), tasks in _arrays(evidence):
        for node in sorted({task.node for task in tasks}):
            ratio = _slowness(node, tasks)
            if ratio is not None:
                ratios.setdefault((job_kind, node), {})[iteration] = ratio
    for (job_kind, node), found in ratios.items():
        if len(found) >= _SLOW_ITERATIONS and median(found.values()) > _SLOW_FACTOR:
            what = (
                f"its {job_kind} tasks take {median(found.values()):.1f} times as long as those elsewhere "
                f"(median of {len(found)} iterations, {min(found)} to {max(found)})"
            )
            remedy = f"set {key_of(job_kind)}.exclude={node}, and report it to the administrators"
            title, names = f"node {node} is slow", (f"seconds/{job_kind}",)
            yield Advice(Severity.WARNING, Rule.SLOW_NODE, title, what, remedy, names)


def _arrays(evidence: AdviceInput) -> Iterator[tuple[tuple[int, str], Sequence[TaskTime]]]:
    """Yield committed attempts of the newest iterations, by array; only arrays of several shards count."""
    newest = max((a.iteration for a in evidence.attempts), default=0)
    arrays: dict[tuple[int, str], list[TaskTime]] = {}
    for attempt in evidence.attempts:
        if attempt.is_committed and attempt.iteration > newest - LOOK_BACK:
            arrays.setdefault((attempt.iteration, attempt.job_kind), []).append(attempt)
    return ((key, tasks) for key, tasks in sorted(arrays.items()) if len(tasks) > 1)


def _slowness(node: str, tasks: Sequence[TaskTime]) -> float | None:
    """Return the node's median time over the others'; None without others, or where theirs is too short."""
    own = [task.seconds for task in tasks if task.node == node]
    others = [task.seconds for task in tasks if task.node != node]
    if not node or not own or not others or median(others) < _LEAST_SECONDS:
        return None
    return median(own) / median(others)


_STRAGGLER_FACTOR, _FEW_SHARDS = 2.0, 4


def stragglers(evidence: AdviceInput) -> Findings:
    """Detect a last shard that takes twice as long as most, and that everybody waits for."""
    longest: dict[str, list[tuple[float, float]]] = {}
    for (_, job_kind), tasks in _arrays(evidence):
        seconds = [task.seconds for task in tasks]
        if len(seconds) >= _FEW_SHARDS and median(seconds) >= _LEAST_SECONDS:
            longest.setdefault(job_kind, []).append((max(seconds), median(seconds)))
    for job_kind, found in longest.items():
        last = found[-WINDOW:]
        slowest, usual = (median(values) for values in zip(*last, strict=True))
        if len(last) >= 3 and slowest > _STRAGGLER_FACTOR * usual and slowest > _WORTH_SECONDS:
            what = f"{duration(slowest)} against a median of {duration(usual)} (last {len(last)} iterations)"
            remedy = (
                "cut the longest responses (rollout.max_new_tokens); where nodes differ in speed, make "
                "shards smaller (rollout.num_shards)"
            )
            title, names = f"the slowest {job_kind} shard holds up the rest", (f"seconds/{job_kind}",)
            yield Advice(Severity.NOTE, Rule.STRAGGLERS, title, what, remedy, names)


_PADDING_SHARE, _UPDATE_SHARE = 0.5, 0.3


def padding(evidence: AdviceInput) -> Findings:
    """Detect an update that computes more padding than tokens, and takes long."""
    found, share = recent(evidence, "policy/padding_efficiency"), _share_of_iteration(evidence, Stage.UPDATE)
    if found and share is not None and found.middle < _PADDING_SHARE and share > _UPDATE_SHARE:
        what = f"{percent(1 - found.middle)} of what micro-batches hold is padding, in {found.span}"
        remedy = (
            "set update.remove_padding=true (best with update.attention=flash_attention_2), or lower "
            "update.tokens_per_micro_batch"
        )
        title = "the update mostly computes padding"
        yield Advice(Severity.NOTE, Rule.PADDING, title, what, remedy, (found.name,))


_NEAR_LIMIT = 0.9


def memory(evidence: AdviceInput) -> Findings:
    """Detect tasks that nearly use the memory their jobs asked for."""
    config = evidence.config.slurm
    if config is None:
        return
    for job_kind in _job_kinds(evidence):
        given, found = resources_of(config, job_kind), recent(evidence, f"memory_gib/{job_kind}")
        if given.mem is None or found is None:
            continue
        used, limit = found.middle * given.ntasks_per_node, parse_memory(given.mem) / 1024
        if used > _NEAR_LIMIT * limit:
            what = f"{number(used)} GiB of {number(limit)} in {found.span}"
            remedy = f"raise {key_of(job_kind)}.mem={given.mem}"
            title = f"{job_kind} tasks are about to run out of memory"
            yield Advice(Severity.WARNING, Rule.MEMORY, title, what, remedy, (found.name,))


_HELD_UP_SHARE = 0.05


def state_writes(evidence: AdviceInput) -> Findings:
    """Detect updates that wait until the trainer's state of the one before is written."""
    found, whole = recent(evidence, "seconds/state/held_up"), recent(evidence, "seconds/iteration")
    if found is None or whole is None or whole.middle < _WORTH_SECONDS:
        return
    if (share := found.middle / whole.middle) > _HELD_UP_SHARE:
        given = evidence.config.update.save_every
        every = given * math.ceil(share / _HELD_UP_SHARE)
        what = f"{duration(found.middle)} before an update, {percent(share)} of an iteration, in {found.span}"
        remedy = (
            f"set update.save_every={every} (it is {given}): after a killed trainer up to {every - 1} "
            f"iterations are then learned again. Where the update's log has no room for a copy of the state, "
            f"more memory helps ({key_of(Stage.UPDATE)}.mem): a copy is written while an update computes"
        )
        title = "updates wait for the trainer's state to be written"
        yield Advice(Severity.NOTE, Rule.STATE_WRITES, title, what, remedy, (found.name,))


SPEED_RULES: tuple[Callable[[AdviceInput], Findings], ...] = (
    bottleneck,
    queue_bound,
    start_up,
    idle_workers,
    wasted,
    slow_node,
    stragglers,
    padding,
    memory,
    state_writes,
)
