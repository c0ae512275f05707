"""What a driver noticed stays in the run's report, with when, though newer iterations no longer show it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pipeline.metrics.advice_input import Rule
from pipeline.metrics.noticed import read_noticed
from pipeline.orchestrate.driver import Driver
from pipeline.report.data import read_report
from pipeline.report.page import page
from pipeline.run import journal
from pipeline.run.directory import Run
from pipeline.watch.event_lines import event_lines
from tests.support.reportrun import make_row, make_run


@pytest.fixture
def run(tmp_path) -> Run:
    return make_run(tmp_path / "run")


@dataclass
class Rows:
    """A run's books, of which rows are all: the newest comes with each pass."""

    all_rows: list[dict[str, float]]
    rows: list[dict[str, float]] = field(default_factory=list)

    def open(self) -> None: ...

    def write_rows(self, *ignored: object) -> Iterator[dict[str, float]]:
        self.rows.append(self.all_rows[len(self.rows)])
        yield self.rows[-1]

    def nothing(self, *ignored: object) -> tuple:
        return ()

    note_benchmarks = tidy = wanted = nothing


class Heard:
    """A person who looks on."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def row(self, row: object) -> None: ...

    def note(self, text: str) -> None:
        self.said.append(text)


def drive(run: Run, rows: list[dict[str, float]]) -> list[str]:
    """Have a driver write the rows, one by one. Returns what it says."""
    heard = Heard()
    driver = Driver(run, SimpleNamespace(saving=()), heard, Rows(rows))
    for row in rows:
        driver.publish([])
        journal.append(run.paths.metrics, row)
    return heard.said


def jumping_at(first: int, count: int) -> list[dict[str, float]]:
    """Rows with nothing to notice but the KL of an iteration."""
    calm = {"response_length/clip_ratio": 0.0, "finish_reason/length": 0.0}
    return [
        make_row(i) | calm | {"objective/kl_per_token": 0.05 if i < first else 0.9}
        for i in range(1, count + 1)
    ]


def test_what_run_warned_of_stays_in_the_report_with_when(run):
    said = drive(run, jumping_at(7, 20))
    assert [line.partition(":")[0] for line in said] == ["warning"], said
    data = read_report(run)
    assert all(found.rule is not Rule.KL_JUMP for found in data.advice), "the newest rows do not show it"
    (noticed,) = data.noticed
    assert (noticed.iteration, noticed.advice.rule) == (8, Rule.KL_JUMP)
    text = page(data)
    section = text[text.index('<section id="findings">') : text.index('<section id="curves">')]
    for part in ("<td>8</td>", "(kl-jump)", noticed.advice.what, "UTC</td>", "<td>no</td>"):
        assert part in section
    assert "Nothing was noticed" not in text
    (line,) = event_lines(journal.read_events(run.paths.events)[-1:], (), 0.0, 20)
    assert str(line).endswith("warning at iteration 8: the policy runs away from the reference (kl-jump)")


def test_what_was_noticed_in_iterations_that_a_run_went_back_behind_is_gone(run):
    drive(run, jumping_at(7, 20))
    tasks = ["9/reward/0", "10/update/0", "9/update/0"]
    journal.event(run.paths.events, "went_back", tasks=tasks, moved_to="aside")
    assert [one.iteration for one in read_noticed(run.paths)] == [8]
    journal.event(run.paths.events, "went_back", tasks=["8/update/0"], moved_to="aside")
    assert read_noticed(run.paths) == []
    journal.event(run.paths.events, "noticed", iteration=3, rule="of a later version")
    assert read_noticed(run.paths) == []
