"""Disk that a run still needs: from what its last iteration took, or before the first from its models."""

from dataclasses import dataclass

from pipeline.preflight.disk_need import FILES_OF_PACKED, Footprint, files_of, imagine, states_kept
from pipeline.run.commits import Record
from pipeline.run.directory import Run
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.records import Records, find_frontier
from pipeline.run.states import versions_with_state
from pipeline.run.tasks import Stage


@dataclass(frozen=True)
class Estimate:
    """Disk space that a run will still use, net of what it will remove."""

    state: Footprint
    """Policy and trainer's state of one iteration."""
    shards: Footprint
    """Everything else of one iteration."""
    iterations_left: int
    states_more: int
    """Largest number of states at once, less those that are there now."""
    is_measured: bool
    """Whether it is from an iteration that is done, not from the size of the models."""
    iterations_packed: int = 0
    """Number of ``iterations_left`` that will be packed; see ``update.keep_shards_last``."""

    @property
    def needed(self) -> Footprint:
        spared = Footprint(0, min(0, FILES_OF_PACKED - self.shards.files)).times(self.iterations_packed)
        shards = self.shards.times(self.iterations_left).plus(spared)
        return self.state.times(self.states_more).plus(shards)


def estimate(run: Run, exists: bool) -> Estimate:
    """Estimate for a run on disk, or for one that would be made."""
    done = max(find_frontier(run.plan, run.paths).updated, run.plan.start) if exists else run.plan.start
    left = run.plan.iterations - done
    update = run.config.update
    kept_now = done - run.plan.start if update.keep_last is None else min(done, update.keep_last)
    most = states_kept(run.plan.iterations - run.plan.start, update.keep_last, update.keep_every)
    measured = measure(run, done) if done > run.plan.start else None
    state, shards = measured or imagine(run.config)
    more = max(0, most - kept_now) if left else 0
    return Estimate(state, shards, left, more, measured is not None, packed_of(left, update.keep_shards_last))


def packed_of(left: int, keep_shards_last: int | None) -> int:
    """Count how many of the iterations that are left will be packed. Pure."""
    # The newest is written before the oldest of those that stay is packed.
    return 0 if keep_shards_last is None else max(0, left - keep_shards_last - 1)


def measure(run: Run, iteration: int) -> tuple[Footprint, Footprint] | None:
    """Measure state and shards of an iteration that is done, by its commit records."""
    records = Records(run.paths)
    tasks = run.plan.tasks(iteration)
    newest_state = state_of(next(versions_with_state(run.paths), iteration))
    records.refresh([*tasks, newest_state])
    found = [record for task in tasks if (record := records.readable(task))]
    update = next((record for record in found if record.task == policy_maker(iteration)), None)
    if update is None:
        return None
    others = sum(footprint(record).num_bytes for record in found if record.task.stage is not Stage.UPDATE)
    state = records.readable(newest_state)
    whole = footprint(update).plus(footprint(state)) if state else footprint(update)
    return whole, Footprint(others, files_of(sum(task.stage.is_sharded for task in tasks)))


def footprint(record: Record) -> Footprint:
    return Footprint(sum(entry.bytes for entry in record.outputs), len(record.outputs))
