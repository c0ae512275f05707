"""MLflow as a mirror of the rows: one MLflow run for each generation, in a file store or on a server.

A file store writes the numbers of a row one by one. The number that gives a row its place comes last, so that
a row counts once it is whole; what a kill left of the next is found, and left out when it is logged.
Facts are of mlflow-skinny 3.17.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.metrics.catalogue import describe
from pipeline.run.alone import alone_in
from pipeline.run.directory import Run
from pipeline.run.journal import Row
from pipeline.tracking.client import recorded_config
from pipeline.tracking.destination import Destination
from pipeline.tracking.state import MEASURED_STEP, finite, iteration_of, mirror_id, written_at

_ID = "slurm_ppo.id"
"""Tag that names the run and its generation: MLflow chooses run ids itself."""
_MOST_NUMBERS, _MOST_PARAMS, _LONGEST = 1000, 100, 6000
"""Numbers and parameters that MLflow takes at once, and characters of a parameter."""
_NOT_IN_NAMES, _NO_WORD, _LONGEST_NAME = re.compile(r"[^\w.\- ]"), re.compile(r"^(\.+|$)"), 240
_PATIENCE = 60.0
"""Seconds for which others that make an experiment or a run in a file store are waited for."""


@dataclass(frozen=True)
class OpenedMlflow:
    """One opening of an MLflow run."""

    client: Any
    """The ``mlflow.MlflowClient``."""
    run_id: str
    first_step: int
    names: Set[str]
    """Numbers that the MLflow run had when it was opened."""
    url: str
    """Tracking URI."""

    def log(self, run: Run, row: Row, step: int) -> None:
        """Log a row at its iteration, without the numbers that an opening before had logged of it."""
        from mlflow.entities import Metric

        moment, place = int(written_at(run, row) * 1000), iteration_of(row)
        there = self._logged_at(place) if step == self.first_step else set()
        names = metric_names(row)
        metrics = [
            Metric(names[name], float(row[name]), moment, place)
            for name in _place_last(finite(row))
            if names[name] not in there
        ]
        for at in range(0, len(metrics), _MOST_NUMBERS):
            self.client.log_batch(self.run_id, metrics=metrics[at : at + _MOST_NUMBERS])

    def _logged_at(self, place: int) -> set[str]:
        """Return the numbers that were logged at an iteration."""
        histories = {name: self.client.get_metric_history(self.run_id, name) for name in self.names}
        return {name for name, history in histories.items() if any(one.step == place for one in history)}

    def finish(self, exit_code: int) -> None:
        self.client.set_terminated(self.run_id, "FAILED" if exit_code else "FINISHED")

    def confirmed(self) -> int:
        return _number_of_rows(self.client, self.run_id)


def open_mlflow(run: Run) -> OpenedMlflow:
    """Open the MLflow run of the run's generation, or make it. Parameters are those of the configuration."""
    # File stores are in maintenance: MLflow asks for this word before it writes one.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    uri = tracking_uri(run)
    client = MlflowClient(uri)
    with _one_at_a_time(uri):
        run_id = _find_or_make(client, run)
    client.update_run(run_id, status="RUNNING")
    data = client.get_run(run_id).data
    _log_params(client, run_id, run, data.params)
    return OpenedMlflow(client, run_id, _number_of_rows(client, run_id), set(data.metrics), uri)


def tracking_uri(run: Run) -> str:
    """Return where the run is logged: a server's address, or the address of a folder."""
    uri = run.config.tracking.mlflow.uri or str(run.paths.mlflow)
    return uri if "://" in uri or uri.startswith("file:") else Path(uri).as_uri()


def _find_or_make(client: Any, run: Run) -> str:
    """Return the id of the MLflow run with the run's tag."""
    name, own = run.config.tracking.mlflow.experiment, mirror_id(run, Destination.MLFLOW)
    experiment_id = _experiment_of(client, name)
    if found := client.search_runs([experiment_id], f"tags.`{_ID}` = '{own}'", max_results=1):
        return str(found[0].info.run_id)
    start = int(run.identity.created * 1000)
    made = client.create_run(experiment_id, start, {_ID: own}, run_name=run.identity.name)
    return str(made.info.run_id)


def _experiment_of(client: Any, name: str) -> str:
    """Return the id of the experiment of a name, which is made where there is none."""
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        return str(found.experiment_id)
    try:
        return str(client.create_experiment(name))
    except MlflowException:
        if found := client.get_experiment_by_name(name):  # a server refuses the second of two
            return str(found.experiment_id)
        raise


@contextlib.contextmanager
def _one_at_a_time(uri: str) -> Iterator[None]:
    """Wait for other processes that make something in a file store, which would give two experiments one
    name. Raises TimeoutError."""
    address = urlsplit(uri)
    if address.scheme != "file":
        yield
        return
    folder = Path(unquote(address.path))
    folder.mkdir(parents=True, exist_ok=True)
    with alone_in(folder, _PATIENCE):
        yield


def _number_of_rows(client: Any, run_id: str) -> int:
    """Count the rows by the numbers that come last of each."""
    return sum(len(client.get_metric_history(run_id, name)) for name in ("iteration", MEASURED_STEP))


def _place_last(row: Row) -> list[str]:
    return sorted(row, key=lambda name: name in ("iteration", MEASURED_STEP))


def _log_params(client: Any, run_id: str, run: Run, there: Mapping[str, str]) -> None:
    """Log the parameters that are not there: MLflow refuses to change one."""
    from mlflow.entities import Param

    given = {".".join(_words(key)): value for key, value in _flat(recorded_config(run))}
    params = [Param(key, value[:_LONGEST]) for key, value in given.items() if key not in there]
    for at in range(0, len(params), _MOST_PARAMS):
        client.log_batch(run_id, params=params[at : at + _MOST_PARAMS])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield a nested mapping as dotted keys and text: words as they are, the rest as JSON."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


# --- names -----------------------------------------------------------------------------------------------


def metric_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of a row's numbers as MLflow takes them. Of several that become one, all but the first
    get a number. Pure."""
    found: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(names):
        number, found[name] = 1, (given := metric_name(name))
        while found[name] in taken:
            number += 1
            found[name] = f"{given}_{number}"
        taken.add(found[name])
    return found


def metric_name(name: str) -> str:
    """Return a number's name as MLflow takes it. Pure.

    A file store has a file for each number, in folders by its name, and no file is a folder too: what follows
    the name of another number, as in ``reward/mean/FILE``, is joined by dots.
    """
    words, parts = _words(name), name.split("/")
    above = (count for count in range(1, len(parts)) if describe("/".join(parts[:count])))
    depth = next(above, len(parts) if describe(name) else min(len(parts), 2))
    return "/".join([*words[: depth - 1], ".".join(words[depth - 1 :])])[:_LONGEST_NAME]


def _words(name: str) -> list[str]:
    """Return the parts of a name between slashes, of characters that MLflow takes; none begins with a dot."""
    return [_NO_WORD.sub("_", _NOT_IN_NAMES.sub("_", part)) for part in name.split("/")]
