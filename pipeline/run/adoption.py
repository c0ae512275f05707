"""Commits of another run that a run begins with: its files linked, under records of its own."""

import os
import socket
import time
from dataclasses import replace

from pipeline.run.commits import FileEntry, Record, publish
from pipeline.run.copies import link_verified
from pipeline.run.directory import Run
from pipeline.run.paths import RunPaths
from pipeline.run.tasks import task_key

ATTEMPT = "fork"
"""Attempt id under which a fork has the files it begins with."""


def adopt(source: Run, record: Record, paths: RunPaths) -> None:
    """Commit what another run committed, over hard links to its files. Raises RunError where they are damaged
    or gone."""
    outputs = tuple(_linked(source.paths, record, entry, paths) for entry in record.outputs)
    publish(paths, _adopted(source, record, outputs))


def _linked(source: RunPaths, record: Record, entry: FileEntry, paths: RunPaths) -> FileEntry:
    """Link one file of a commit under the adopting run's own name. Returns its entry for the record."""
    path = entry.path.replace(f".{record.attempt}", f".{ATTEMPT}")
    link_verified(source, record, entry, paths.root / path)
    return replace(entry, path=path)


def _adopted(source: Run, record: Record, outputs: tuple[FileEntry, ...]) -> Record:
    """Return the record of an adopted commit. Its lineage ends at the other run."""
    now = time.time()
    return replace(
        record,
        attempt=ATTEMPT,
        outputs=outputs,
        inputs={f"run:{source.identity.id}/{task_key(record.task)}": record.fingerprint},
        started=now,
        ended=now,
        host=socket.gethostname(),
        pid=os.getpid(),
        job_id=os.environ.get("SLURM_JOB_ID", ""),
        metrics={},
    )
