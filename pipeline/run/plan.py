"""What a run consists of: iterations -> stages -> tasks and their inputs. Pure."""

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
    """0: never."""
    start: int = 0
    """Policy version that the run begins with: 0, the user's model, or of a fork a copy of its parent's."""
    pools: tuple[str, ...] = ()
    """Of the reward's components: each has score tasks of its own."""

    @staticmethod
    def of(config: Config, start: int = 0) -> "Plan":
        every = config.evaluate.every if config.data.heldout else 0
        return Plan(config.iterations, config.rollout.num_shards, every, start, config.reward.pools)

    def tasks(self, iteration: int) -> tuple[Task, ...]:
        """Tasks of one iteration, inputs before what reads them."""
        if iteration <= self.start:
            first = (PREPARE,) if iteration == 0 else ()
            return (*first, Task(iteration, Stage.EVALUATE)) if self.evaluates(iteration) else first
        shards = range(self.num_shards)
        stages = [Task(iteration, Stage.ROLLOUT, shard) for shard in shards]
        stages += [task for pool in self.pools for task in self._scores(iteration, pool)]
        stages += [Task(iteration, Stage.REWARD, shard) for shard in shards]
        stages += [Task(iteration, Stage.UPDATE)]
        if self.evaluates(iteration):
            stages += [Task(iteration, Stage.EVALUATE)]
        return tuple(stages)

    def _scores(self, iteration: int, pool: str) -> list[Task]:
        return [Task(iteration, Stage.SCORE, shard, pool) for shard in range(self.num_shards)]

    @property
    def purposes(self) -> tuple[str, ...]:
        """Those of an iteration's tasks, inputs before what reads them; evaluation stands aside."""
        scores = (Task(0, Stage.SCORE, pool=pool).purpose for pool in self.pools)
        return (Stage.ROLLOUT, *scores, Stage.REWARD, Stage.UPDATE)

    def all_tasks(self) -> Iterator[Task]:
        for iteration in dict.fromkeys((0, *range(self.start, self.iterations + 1))):
            yield from self.tasks(iteration)

    def is_given(self, task: Task) -> bool:
        """Whether its commit came with the run, so that no task of the run can make it again."""
        return 0 < self.start == task.iteration and task.stage is Stage.UPDATE

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """Tasks whose results ``task`` reads, or that must come before it."""
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

    def evaluates(self, iteration: int) -> bool:
        if not self.evaluate_every or iteration < self.start:
            return False
        is_due = iteration % self.evaluate_every == 0
        return is_due or iteration in (self.start, self.iterations)

    def evaluations(self) -> tuple[int, ...]:
        """Iterations whose policies are evaluated, ascending: the first and last policy, and every Nth."""
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

    def window(self, updated: int, evaluated: int, horizon: int = 0) -> tuple[Task, ...]:
        """The tasks that matter now, inputs before what reads them.

        Args:
            updated: the newest iteration whose update is committed; -1 before prepare is.
            evaluated: how many of :meth:`evaluations` are committed.
            horizon: iterations to look at although their inputs are not there yet; 0 where nothing is
                submitted in advance.
        """
        if updated < 0 and not horizon:
            return (PREPARE,)
        done = max(updated, self.start)
        newest = min(done + horizon, self.iterations)
        tasks = [PREPARE] if updated < 0 else []
        for iteration in range(done + 1, max(newest, min(done + 1, self.iterations)) + 1):
            tasks += [t for t in self.tasks(iteration) if t.stage is not Stage.EVALUATE]
        return (*tasks, *(t for t in self.evaluation_tasks()[evaluated:] if t.iteration <= newest))


@lru_cache(maxsize=8)
def _inputs_of_update(plan: Plan, iteration: int) -> tuple[Task, ...]:
    """Kept, for a pass asks several times for these, and they are thousands."""
    shards = [task for task in plan.tasks(iteration) if task.stage.is_sharded]
    return unique(PREPARE, policy_maker(iteration - 1), *shards)


def policy_maker(version: int) -> Task:
    """The task that commits policy ``version``; version 0, the user's model, is checked by prepare."""
    return Task(version, Stage.UPDATE) if version > 0 else PREPARE


def unique(*tasks: Task) -> tuple[Task, ...]:
    return tuple(dict.fromkeys(tasks))
