"""Plan of a run: its iterations -> stages -> tasks and their inputs. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from pipeline.config.schema import Config
from pipeline.run.tasks import PREPARE, Stage, Task


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

    @staticmethod
    def of(config: Config, start: int = 0) -> "Plan":
        every = config.evaluate.every if config.data.heldout else 0
        return Plan(config.iterations, config.rollout.num_shards, every, start, config.reward.pools)

    def tasks(self, iteration: int) -> tuple[Task, ...]:
        """Return the tasks of one iteration, inputs before what reads them."""
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

    def all_tasks(self) -> Iterator[Task]:
        for iteration in dict.fromkeys((0, *range(self.start, self.iterations + 1))):
            yield from self.tasks(iteration)

    def is_given(self, task: Task) -> bool:
        """Whether its commit came with the run (a fork's first policy and state): no task of the run can
        remake it."""
        return 0 < self.start == task.iteration and task.stage in (Stage.UPDATE, Stage.STATE)

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks whose results ``task`` reads, or that must come before it."""
        iteration = task.iteration
        if task.stage is Stage.PREPARE:
            return ()
        if task.stage is Stage.ROLLOUT:
            return unique(PREPARE, policy_maker(iteration - 1))
        if task.stage is Stage.SCORE:
            return (PREPARE, Task(iteration, Stage.ROLLOUT, task.shard))
        if task.stage is Stage.REWARD:
            scores = (Task(iteration, Stage.SCORE, task.shard, pool) for pool in self.pools)
            return (PREPARE, Task(iteration, Stage.ROLLOUT, task.shard), *scores)
        if task.stage is Stage.UPDATE:
            return _inputs_of_update(self, iteration)
        # One evaluation after the other, so that only the last can be outstanding.
        previous = self.evaluation_before(iteration)
        earlier = () if previous is None else (Task(previous, Stage.EVALUATE),)
        return unique(PREPARE, policy_maker(iteration), *earlier)

    def must_have_ended(self, task: Task) -> Task | None:
        """Return the task whose attempts must have ended before ``task`` starts, though it is committed: an
        update's attempt writes the trainer's state behind its policy, for the next update to begin with."""
        if task.stage is not Stage.UPDATE or task.iteration <= self.start + 1:
            return None
        return policy_maker(task.iteration - 1)

    def evaluates(self, iteration: int) -> bool:
        if not self.evaluate_every or iteration < self.start:
            return False
        is_due = iteration % self.evaluate_every == 0
        return is_due or iteration in (self.start, self.iterations)

    def evaluations(self) -> tuple[int, ...]:
        """Return the iterations whose policies are evaluated, ascending: first, last, and every Nth."""
        if not self.evaluate_every:
            return ()
        after = (self.start // self.evaluate_every + 1) * self.evaluate_every
        due = range(after, self.iterations + 1, self.evaluate_every)
        return tuple(sorted({self.start, *due, self.iterations}))

    def evaluation_before(self, iteration: int) -> int | None:
        if iteration <= self.start:
            return None
        return max(self.start, (iteration - 1) // self.evaluate_every * self.evaluate_every)

    def evaluation_tasks(self) -> tuple[Task, ...]:
        return tuple(Task(iteration, Stage.EVALUATE) for iteration in self.evaluations())

    def window(self, updated: int, evaluated: int, lookahead: int = 0) -> tuple[Task, ...]:
        """Return the tasks that matter now, inputs before what reads them.

        Args:
            updated: the newest iteration whose update is committed; -1 before prepare is.
            evaluated: how many of :meth:`evaluations` are committed.
            lookahead: iterations to include although their inputs are not there yet; 0 where nothing is
                submitted in advance.
        """
        if updated < 0 and not lookahead:
            return (PREPARE,)
        done = max(updated, self.start)
        newest = min(done + lookahead, self.iterations)
        tasks = [PREPARE] if updated < 0 else []
        for iteration in range(done + 1, max(newest, min(done + 1, self.iterations)) + 1):
            tasks += [t for t in self.tasks(iteration) if t.stage is not Stage.EVALUATE]
        return (*tasks, *(t for t in self.evaluation_tasks()[evaluated:] if t.iteration <= newest))


@lru_cache(maxsize=8)
def _inputs_of_update(plan: Plan, iteration: int) -> tuple[Task, ...]:
    """Return an update's inputs; cached, since they are thousands and a pass asks several times for them."""
    shards = [task for task in plan.tasks(iteration) if task.stage.is_sharded]
    return unique(PREPARE, policy_maker(iteration - 1), *shards)


def policy_maker(version: int) -> Task:
    """Return the task that commits policy ``version``; version 0, the user's model, is checked by prepare."""
    return Task(version, Stage.UPDATE) if version > 0 else PREPARE


def state_of(version: int) -> Task:
    """Return the task under which the trainer's state of a version is committed (:attr:`Stage.STATE`)."""
    return Task(version, Stage.STATE)


def unique(*tasks: Task) -> tuple[Task, ...]:
    return tuple(dict.fromkeys(tasks))
