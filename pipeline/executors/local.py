"""A run on one machine, or in one allocation: the loop that drives it, and ends with its workers."""

import contextlib
import signal
import time
from dataclasses import replace

from pipeline.executors.process_workers import ProcessWorkers
from pipeline.executors.processes import Processes
from pipeline.orchestrate.driver import Driver, Outcome, Pass, Watcher, tell_of_pass
from pipeline.orchestrate.jobs import Jobs
from pipeline.orchestrate.publish import Publisher
from pipeline.orchestrate.tidying import Tidying
from pipeline.process import interruptible
from pipeline.run import journal
from pipeline.run.control import begin_invocation, read_control, write_control
from pipeline.run.directory import Run
from pipeline.run.lease import HEARTBEAT_SECONDS, Lease, hold
from pipeline.run.place import settle
from pipeline.tracking.tracker import enabled, open_trackers

_LONG_PASS_SECONDS, _REST_FACTOR = 0.1, 4


def drive(
    run: Run, processes: Processes, watcher: Watcher, held: Lease | None = None, patience: float = 0.0
) -> Pass:
    """Make passes on this machine until the run is complete, cannot go on, or is interrupted.

    Args:
        held: the lease, if the caller has it.
        patience: seconds to wait for a driver that holds it.

    Raises:
        LeaseHeld: another driver advances the run.
    """
    leased = contextlib.nullcontext(held) if held else hold(run.paths.locks, patience)
    # SIGUSR2: what sbatch --signal=B:USR2@SECONDS sends before the time limit
    with leased as lease, interruptible(signal.SIGUSR2):
        journal.event(run.paths.events, "driver_started", host=lease.holder.host, pid=lease.holder.pid)
        run = settle(run)
        trackers = open_trackers(run, enabled(run), watcher.note)
        publisher = Publisher(run, trackers, tidying=Tidying(is_beside=True))
        workers = ProcessWorkers(run, processes, begin_invocation(run.paths).invocation, lease.number)
        driver = Driver(run, Jobs(run, workers, watcher.note), watcher, publisher)
        done = Pass(Outcome.FAILED)
        try:
            done = _loop(driver, workers, lease)
        except KeyboardInterrupt:
            done = Pass(Outcome.INTERRUPTED)
        finally:
            workers.close()
            with driver.never_in_the_way():
                publisher.close(done.outcome is Outcome.COMPLETE)
                for text in publisher.tidying.said():
                    watcher.note(text)
            journal.event(run.paths.events, "driver_ended", outcome=done.outcome)
        return done


def _loop(driver: Driver, workers: ProcessWorkers, lease: Lease) -> Pass:
    """Make passes until the run has ended. Returns the last."""
    since, processes = None, workers.processes
    while True:
        lease.beat()
        began = time.thread_time(), time.monotonic() - processes.starting_seconds
        actions = driver.one_pass()
        done = driver.result_of(actions)
        if done.outcome is None:
            tell_of_pass(driver.run, done, lease.holder.acquired, driver.watcher.note)
        # A pass looks at every shard of the iteration: with thousands, not one pass per ended job. On this
        # machine's disks it takes what it computes, and a GPU may wait for the next one: what it waited for a
        # core is no part of that. Nor is starting workers: the first waits for the fork server's imports.
        waited = time.monotonic() - processes.starting_seconds - began[1]
        seconds = waited if workers.is_network else time.thread_time() - began[0]
        if seconds > _LONG_PASS_SECONDS:
            time.sleep(min(_REST_FACTOR * seconds, HEARTBEAT_SECONDS))
        if done.outcome is Outcome.FAILED:
            _let_states_finish(workers, lease)
            return done
        if driver.is_complete and driver.has_whole_chain():
            if not driver.writes_state:
                return done
            processes.wait(HEARTBEAT_SECONDS)
        elif driver.lacks_rows_only:
            since = since or time.monotonic()
            driver.wait_for_rows(since)
        elif done.outcome is None and not actions.needs_another_pass:
            processes.wait(HEARTBEAT_SECONDS)


def _let_states_finish(workers: ProcessWorkers, lease: Lease) -> None:
    """End all workers, but for those that only write what their committed result left to save: they take no
    further task."""
    paths, processes = workers.run.paths, workers.processes
    write_control(paths, replace(read_control(paths), has_failed=True))
    processes.cancel(but=workers.committed_ones())
    while processes.living:
        lease.beat()
        processes.wait(HEARTBEAT_SECONDS)
        processes.collect_ended()
