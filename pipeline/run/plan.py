"""Plan of a run: its iterations -> stages -> tasks and their inputs. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from pipeline.config.schema import Config
from pipeline.run.tasks import PREPARE, Stage, Task, task_of

_BENCHMARKS_AT_ONCE = 2
"""Benchmarks in a window: the one at hand, and the one behind it."""
_KEPT_ITERATIONS = 8
_KEPT_INPUTS = 1 << 15
"""Tasks whose inputs are kept: more than those of two iterations in all but the largest runs."""


@dataclass(frozen=True)
class Plan:
    """The shape of a run, from which every task and its inputs follow."""

    iterations: int
    num_shards: int
    evaluate_every: int
    """Iterations between evaluations; 0: never."""
    start: int = 0
    """Policy version that the run begins with: 0, the user's model, or in a fork a copy of its parent's."""
    pools: tuple[str, ...] = ()
    """Pools of reward components: each pool has score tasks of its own."""
    benchmark_every: int = 0
    """Iterations between measurements by the user's program; 0: never."""
    staleness: int = 0
    """Updates by which the policy that responses are of is older than the newest one (rollout.staleness)."""
    sync_every: int = 0
    """Updates from one sync of the KL's reference to the next; 0: it stays (algorithm.kl.sync_every)."""
    averages: bool = False
    """Whether updates commit a new reference that is an average (algorithm.kl.sync_weight)."""

    @staticmethod
    def of(config: Config, start: int = 0) -> "Plan":
        every = config.evaluate.every if config.data.has_heldout else 0
        pools, measured = config.reward.pools, config.evaluate.measured_every
        shards, staleness, kl = config.rollout.num_shards, config.rollout.staleness, config.algorithm.kl
        shape = Plan(config.iterations, shards, every, start, pools, measured, staleness)
        return replace(shape, sync_every=kl.sync_interval, averages=kl.averages)

    def policy_of(self, iteration: int) -> int:
        """Return the version of the policy that an iteration's responses are of: the newest one before the
        iteration, or one ``staleness`` updates older, so that these updates need not be awaited. The first
        iterations have the policy that the run begins with."""
        return max(self.start, iteration - 1 - self.staleness)

    def lag_of(self, iteration: int) -> int:
        """Return the number of updates between the policy that an iteration's responses are of and the one
        that learns from them."""
        return iteration - 1 - self.policy_of(iteration)

    def reference_of(self, iteration: int) -> int:
        """Return the version of an iteration's reference: 0, the user's model, or the newest policy at a sync
        that rollouts of the iteration could be of. In a fork of a later policy than that: its first one."""
        return self._synced(self.policy_of(iteration))

    def _synced(self, newest: int) -> int:
        """Return the newest version at a sync, of those up to ``newest``."""
        version = newest // self.sync_every * self.sync_every if self.sync_every else 0
        return version and max(version, self.start)

    def averaged_with(self, iteration: int) -> int | None:
        """Return the version of the reference that the policy of an iteration's update is averaged with; None
        where the update commits no average."""
        is_due = self.averages and iteration % self.sync_every == 0
        return self._synced(iteration - 1) if is_due else None

    def references_of(self, iteration: int) -> tuple[int, ...]:
        """Return the versions of the references that the tasks of an iteration read; none where it is always
        the user's model."""
        averaged = self.averaged_with(iteration)
        found = [self.reference_of(iteration)] if self.sync_every else []
        return tuple(dict.fromkeys(found if averaged is None else [*found, averaged]))

    @property
    def least_kept(self) -> int:
        """Number of the newest versions that all must be there: those that rollouts still read, and the one
        before them, from which the oldest of these can be made again."""
        return self.staleness + 2

    def ahead_of(self, iteration: int) -> tuple[Task, ...]:
        """Return the sharded tasks of the iterations that can go on before the update of ``iteration`` is
        there; none without staleness."""
        last = min(iteration + self.staleness, self.iterations)
        tasks = (task for later in range(iteration + 1, last + 1) for task in self.tasks(later))
        return tuple(task for task in tasks if task.stage.is_sharded)

    def comes_before(self, one: Task, other: Task) -> bool:
        """Whether a task can only be done once another is, in the chain of iterations: what is measured of
        policies keeps nothing waiting."""
        if one.stage in (Stage.EVALUATE, Stage.BENCHMARK):
            return False
        if one.iteration == other.iteration:
            return one.stage.position < other.stage.position
        is_sharded = other.stage.is_sharded
        return one.iteration <= (self.policy_of(other.iteration) if is_sharded else other.iteration)

    def tasks(self, iteration: int) -> tuple[Task, ...]:
        """Return the tasks of one iteration that its row waits for, inputs before what reads them: all but
        its benchmark."""
        return self._known_tasks(iteration)

    @cached_property
    def _known_tasks(self) -> Callable[[int], tuple[Task, ...]]:
        """:meth:`tasks`, with those of the last iterations kept: a pass asks for the same again and again."""
        return lru_cache(maxsize=_KEPT_ITERATIONS)(self._make_tasks)

    def _make_tasks(self, iteration: int) -> tuple[Task, ...]:
        if iteration <= self.start:
            first = (PREPARE,) if iteration == 0 else ()
            return (*first, Task(iteration, Stage.EVALUATE)) if self.evaluates(iteration) else first
        shards = range(self.num_shards)
        stages = [Task(iteration, Stage.ROLLOUT, shard) for shard in shards]
        stages += [Task(iteration, Stage.SCORE, shard, pool) for pool in self.pools for shard in shards]
        stages += [Task(iteration, Stage.REWARD, shard) for shard in shards]
        stages += [Task(iteration, Stage.UPDATE)]
        if self.evaluates(iteration):
            stages += [Task(iteration, Stage.EVALUATE)]
        return tuple(stages)

    @property
    def job_kinds(self) -> tuple[str, ...]:
        """Job kinds of an iteration's tasks but evaluation, inputs before what reads them."""
        scores = (Task(0, Stage.SCORE, pool=pool).job_kind for pool in self.pools)
        return (Stage.ROLLOUT, *scores, Stage.REWARD, Stage.UPDATE)

    def tasks_of_kind(self, job_kind: str) -> int:
        """Return the number of tasks of a job kind in an iteration that has any."""
        return self.num_shards if task_of(0, job_kind).stage.is_sharded else 1

    def upstream(self, job_kind: str) -> tuple[str, ...]:
        """Return the sharded job kinds of which a task of a sharded kind reads its own shard's."""
        task = task_of(self.start + 1, job_kind)
        if not task.stage.is_sharded:
            return ()
        return tuple(source.job_kind for source in self.inputs(task) if source.stage.is_sharded)

    def all_tasks(self) -> Iterator[Task]:
        for iteration in dict.fromkeys((0, *range(self.start, self.iterations + 1))):
            yield from self.tasks(iteration)
            yield from self.benchmark_of(iteration)

    def is_given(self, task: Task) -> bool:
        """Whether its commit came with the run (a fork's first policy and state): no task of the run can
        remake it."""
        return 0 < self.start == task.iteration and task.stage in (Stage.UPDATE, Stage.STATE)

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks whose results ``task`` reads, or that must come before it."""
        return self._known_inputs(task)

    @cached_property
    def _known_inputs(self) -> Callable[[Task], tuple[Task, ...]]:
        """:meth:`inputs`, with those of the last tasks kept."""
        return lru_cache(maxsize=_KEPT_INPUTS)(self._find_inputs)

    def alike_inputs(self, task: Task) -> tuple[tuple[Task, ...], ...]:
        """Return :meth:`inputs`, divided by iteration and job kind."""
        return self._known_alike(task)

    @cached_property
    def _known_alike(self) -> Callable[[Task], tuple[tuple[Task, ...], ...]]:
        """:meth:`alike_inputs`, with those of the last tasks kept."""
        return lru_cache(maxsize=_KEPT_INPUTS)(self._divide_inputs)

    def _divide_inputs(self, task: Task) -> tuple[tuple[Task, ...], ...]:
        found: dict[tuple[int, str], list[Task]] = {}
        for source in self.inputs(task):
            found.setdefault((source.iteration, source.job_kind), []).append(source)
        return tuple(map(tuple, found.values()))

    def _find_inputs(self, task: Task) -> tuple[Task, ...]:
        iteration = task.iteration
        if task.stage is Stage.PREPARE:
            return ()
        if task.stage is Stage.ROLLOUT:
            return unique(PREPARE, policy_maker(self.policy_of(iteration)))
        if task.stage is Stage.SCORE:
            return (PREPARE, Task(iteration, Stage.ROLLOUT, task.shard))
        if task.stage is Stage.REWARD:
            scores = [Task(iteration, Stage.SCORE, task.shard, pool) for pool in self.pools]
            rollout = Task(iteration, Stage.ROLLOUT, task.shard)
            synced = [policy_maker(self.reference_of(iteration))] if self.sync_every else []
            return unique(PREPARE, *synced, rollout, *scores)
        if task.stage is Stage.UPDATE:
            shards = [one for one in self.tasks(iteration) if one.stage.is_sharded]
            before = map(policy_maker, (iteration - 1, *self.references_of(iteration)))
            return unique(PREPARE, *before, *shards)
        earlier = self.earlier(task)
        return unique(PREPARE, policy_maker(iteration), *([earlier] if earlier else ()))

    def earlier(self, task: Task) -> Task | None:
        """Return the evaluation or benchmark that must come before one, so that only the last can be
        outstanding; None for the first, and for other tasks. Nothing of it is read."""
        if task.stage not in (Stage.EVALUATE, Stage.BENCHMARK):
            return None
        previous = _due_before(task.iteration, self.start, self._every(task.stage))
        return None if previous is None else Task(previous, task.stage)

    def must_have_ended(self, task: Task) -> Task | None:
        """Return the task whose attempts must have ended before ``task`` starts, though it is committed: an
        update's attempt writes the trainer's state behind its policy, for the next update to begin with."""
        if task.stage is not Stage.UPDATE or task.iteration <= self.start + 1:
            return None
        return policy_maker(task.iteration - 1)

    def _every(self, stage: Stage) -> int:
        return self.benchmark_every if stage is Stage.BENCHMARK else self.evaluate_every

    def evaluates(self, iteration: int) -> bool:
        return _is_due(iteration, self.start, self.iterations, self.evaluate_every)

    def evaluations(self) -> tuple[int, ...]:
        """Return the iterations whose policies are evaluated, ascending: first, last, and every Nth."""
        return _due(self.start, self.iterations, self.evaluate_every)

    def evaluation_tasks(self) -> tuple[Task, ...]:
        return tuple(Task(iteration, Stage.EVALUATE) for iteration in self.evaluations())

    def benchmarks(self) -> tuple[int, ...]:
        """Return the iterations whose policies the user's program measures, as :meth:`evaluations`."""
        return _due(self.start, self.iterations, self.benchmark_every)

    def benchmark_tasks(self) -> tuple[Task, ...]:
        return tuple(Task(iteration, Stage.BENCHMARK) for iteration in self.benchmarks())

    def benchmark_of(self, iteration: int) -> tuple[Task, ...]:
        """Return the benchmark of an iteration's policy, if there is one."""
        is_due = _is_due(iteration, self.start, self.iterations, self.benchmark_every)
        return (Task(iteration, Stage.BENCHMARK),) if is_due else ()

    def window(
        self, updated: int, evaluated: int, benchmarked: int = 0, is_ahead: bool = False
    ) -> tuple[Task, ...]:
        """Return the tasks that matter now, inputs before what reads them: of the iteration that is learned
        from next, and with staleness those that generate and score responses of iterations after it.

        Args:
            updated: the newest iteration whose update is committed; -1 before prepare is.
            evaluated: how many of :meth:`evaluations` are committed.
            benchmarked: how many of :meth:`benchmarks` are committed.
            is_ahead: whether to include what waits for these: the first iteration beside prepare, and the
                evaluation of the policy that is made now.
        """
        if updated < 0 and not is_ahead:
            return (PREPARE,)
        done = max(updated, self.start)
        tasks = [PREPARE] if updated < 0 else []
        if done < self.iterations:
            tasks += [t for t in self.tasks(done + 1) if t.stage is not Stage.EVALUATE]
            tasks += self.ahead_of(done + 1)
        # Benchmarks may lag far behind, and their queue must not fill that of training.
        measured = self.benchmark_tasks()[benchmarked : benchmarked + _BENCHMARKS_AT_ONCE]
        outstanding = (*self.evaluation_tasks()[evaluated:], *measured)
        return (*tasks, *(t for t in outstanding if t.iteration <= done + is_ahead))


def _is_due(iteration: int, first: int, last: int, every: int) -> bool:
    """Whether something is due at ``iteration``: at ``first``, ``last`` and each multiple of ``every``.

    Args:
        every: 0 for never.
    """
    if not every or iteration < first:
        return False
    return iteration % every == 0 or iteration in (first, last)


def _due(first: int, last: int, every: int) -> tuple[int, ...]:
    """Return the versions at which :func:`_is_due` holds, ascending."""
    if not every:
        return ()
    return tuple(sorted({first, *range((first // every + 1) * every, last + 1, every), last}))


def _due_before(iteration: int, first: int, every: int) -> int | None:
    """Return the version before ``iteration`` at which :func:`_is_due` holds; None if there is none."""
    return None if iteration <= first else max(first, (iteration - 1) // every * every)


def policy_maker(version: int) -> Task:
    """Return the task that commits policy ``version``; version 0, the user's model, is checked by prepare."""
    return Task(version, Stage.UPDATE) if version > 0 else PREPARE


def state_of(version: int) -> Task:
    """Return the task under which the trainer's state of a version is committed (:attr:`Stage.STATE`)."""
    return Task(version, Stage.STATE)


def unique(*tasks: Task) -> tuple[Task, ...]:
    return tuple(dict.fromkeys(tasks))
