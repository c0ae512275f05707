"""How long a worker's task may take, and the end of one that takes longer, with its process."""

import contextlib
import json
import os
import signal
from dataclasses import dataclass

from pipeline.config.scheduler import ResourcesConfig
from pipeline.decide import estimates, staying
from pipeline.run.durable import link_once, make_folder
from pipeline.run.failures import FailureKind
from pipeline.run.paths import RunPaths
from pipeline.workers.beats import Doing, LiveWorkers, Reason
from pipeline.workers.claims import Claim
from pipeline.workers.outside import WorkerHost
from stages.workers.pulse import Pulse


@dataclass
class TaskLimit:
    """The limit of one worker's tasks."""

    paths: RunPaths
    settings: ResourcesConfig
    """Resources of the stage."""
    outside: WorkerHost
    pulse: Pulse
    crew: LiveWorkers

    def seconds(self, median: float | None, is_fresh: bool) -> float | None:
        """Return the seconds that the next task may take; None: as long as the worker may run.

        Args:
            median: seconds that a task takes; None if unknown.
            is_fresh: whether it begins with loading.
        """
        known = estimates.startup(self.crew.beats.values(), self.pulse.beat.job_kind) if is_fresh else None
        return staying.task_limit(self.settings.task_seconds, median, known.median if known else None)

    def or_own(self, limit: float | None) -> float | None:
        """Return a limit; where the settings have no time of a task, that of its own last ones."""
        if limit is not None:
            return limit
        own = self.pulse.beat
        return staying.task_limit(None, estimates.task_seconds([own], own.job_kind))

    def begin(self, limit: float | None, claim: Claim) -> None:
        """From now on, end the task when it has taken too long; one that can save is warned before."""
        if limit is None:
            return
        warning = min(float(self.settings.signal), limit / 2) if claim.task.stage.generates else 0.0

        def end() -> None:
            self.end_process(limit, claim)

        def warn() -> None:
            self.pulse.set_alarm(warning, end)
            os.kill(os.getpid(), signal.SIGUSR2)

        self.pulse.set_alarm(limit - warning, warn if warning else end)

    def end_process(self, limit: float, claim: Claim) -> None:
        """End the process: a task in native code cannot be stopped in another way."""
        from stages.attempts.failures import exit_code  # with numpy, which the task has loaded by now

        told = {"kind": FailureKind.TIMEOUT, "message": f"it took more than {limit:g} s", "suspect": None}
        path = self.paths.task(claim.task).failure(claim.number)
        with contextlib.suppress(OSError):
            make_folder(path.parent, self.paths.root)
            link_once(path, json.dumps(told) + "\n")
        self.pulse.say(doing=Doing.LEAVING, reason=Reason.FAILED)
        self.outside.failed(False)
        os._exit(exit_code(FailureKind.TIMEOUT))
