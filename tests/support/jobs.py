"""Jobs of a run on Slurm as the queue, accounting and the run itself know them, written by hand."""

from pipeline.run.submissions import State, Submission
from slurm.query import Element
from slurm.states import SlurmState


def name_of(job_kind: str, iteration: int = 1, number: int = 1) -> str:
    return f"slurm-ppo.run.{job_kind}.iter{iteration}.abc.{number}.0"


def element(
    index: int = 0, state: SlurmState = SlurmState.RUNNING, job_kind: str = "rollout", **more: object
) -> Element:
    """An element of array 7 on a node of GPUs; of what is not given nothing is known."""
    given = {"array_id": "7", "name": name_of(job_kind), "node": "gpu07", "partition": "gpu"}
    return Element(index=index, state=state, **given | more)


def submission(
    job_kind: str = "rollout", iteration: int = 1, number: int = 1, job: str = "7", **more: object
) -> Submission:
    """One array, of four elements, that a run has noted."""
    given: dict = {"iteration": iteration, "job_kind": job_kind, "number": number, "invocation": 1}
    given |= {"name": name_of(job_kind, iteration, number), "chunk": 0, "chunk_size": 1000, "created": 5.0}
    given |= {"module": "stages", "arguments": (), "max_restarts": 20, "state": State(job)}
    return Submission(**given | {"elements": {str(index): () for index in range(4)}} | more)
