"""When the next inputs of workers are expected, and how long coming back takes: from what was measured."""

from pipeline.config.job_kinds import DRIVER
from pipeline.config.scheduler import SlurmConfig, resources_of
from pipeline.orchestrate.staffing import Estimate
from pipeline.run.directory import Run
from pipeline.run.tasks import PREPARE, Stage


def read_estimates(run: Run, config: SlurmConfig, now: float) -> dict[str, Estimate]:
    """Return an estimate for each job kind whose workers start early."""
    kinds = (PREPARE.job_kind, *run.plan.job_kinds, str(Stage.EVALUATE))
    early = [kind for kind in kinds if kind != DRIVER and resources_of(config, kind).start_early]
    return {str(kind): Estimate() for kind in early}
