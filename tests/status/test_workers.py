"""What people see of workers: from the files in which they say what they do, to lines and findings."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checks.finding import Verdict
from pipeline.checks.workers import judge_workers
from pipeline.executors.slurm.queue import RunQueue
from pipeline.run.paths import RunPaths
from pipeline.status.slurm import SlurmStatus, running_workers
from pipeline.status.state import Status
from pipeline.status.text import describe, to_json, workers_in_words
from pipeline.watch.run import changes
from pipeline.watch.screen import ScreenState, screen
from pipeline.workers.beats import Beat, BeatReader, Doing, Reason, parse, read_beats
from pipeline.workers.summary import REASONS, spent_by, workers_of
from slurm.states import SlurmState
from tests.support import jobs
from tests.support.beats import beat, write_beats

NOW = 1100.0
pytestmark = pytest.mark.usefixtures("utc")
WAITING = {"doing": Doing.WAITING, "task": "8/rollout/2", "until": 1300.0}
THREE = (beat("47_0r0"), beat("47_1r0"), beat("47_2r0", **WAITING))


# --- reading ---


def test_beats_are_read_as_they_were_written_and_what_is_none_is_left_out(tmp_path):
    paths = RunPaths(tmp_path)
    assert read_beats(paths) == {}
    left = beat("9_0r1", doing=Doing.LEAVING, reason=Reason.FAR, iterations=(1, 7))
    write_beats(paths, *THREE, left)
    folder = paths.slurm / "workers"
    (folder / "48_0r0.json").write_text('{"worker": "48_0')
    (folder / "49_0r0.json").write_text("[]")
    (folder / ".50_0r0.json.77").write_text("{}")
    assert tuple(read_beats(paths).values()) == (left, *THREE), "the oldest array first, by its number"
    assert set(read_beats(paths, lambda worker: worker.endswith("_2r0"))) == {"47_2r0"}


def test_beats_of_other_versions_are_read_as_far_as_they_are_understood():
    said = asdict(beat("1_0r0")) | {"shoe_size": 44, "reason": "bored"}
    found = parse(said)
    assert found is not None
    assert (found.worker, found.reason) == ("1_0r0", None)
    assert parse(said | {"doing": "dancing"}) is None
    assert parse({"worker": "1_0r0"}) is None


@given(st.recursive(st.none() | st.floats() | st.text(max_size=3), lambda v: st.lists(v, max_size=3)))
def test_whatever_a_file_holds_reading_it_breaks_nothing(value):
    for name in asdict(beat("1_0r0")):
        parse(asdict(beat("1_0r0")) | {name: value})
    parse(value)


def test_a_worker_that_left_is_read_once(tmp_path):
    paths = RunPaths(tmp_path)
    gone = beat("1_0r0", doing=Doing.LEAVING)
    write_beats(paths, gone, beat("1_1r0"))
    reader = BeatReader(paths)
    reader.read()
    (paths.slurm / "workers/1_0r0.json").write_text("spoilt")
    assert tuple(reader.read().values()) == (gone, beat("1_1r0"))


# --- counting ---


def test_a_line_says_who_works_who_waits_for_what_and_until_when():
    (found,) = workers_of(THREE, NOW)
    assert workers_in_words(found) == "rollout 3 workers: 2 busy, 1 waiting for policy 7 (leaves 00:21)"


@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("8/rollout/2", "policy 7"),
        ("8/evaluate/0", "policy 8"),
        ("1/rollout/2", "the prompts"),
        ("0/evaluate/0", "the prompts"),
        ("8/score-big/1", "responses of iteration 8"),
        ("8/reward/1", "responses of iteration 8"),
        ("8/update/0", "scores of iteration 8"),
    ],
)
def test_what_a_worker_waits_for_follows_from_its_task(task, words):
    waiting = beat("1_0r0", task.split("/")[1], Doing.WAITING, task=task)
    assert f"1 waiting for {words}" in workers_in_words(workers_of([waiting], NOW)[0])


def test_workers_that_slurm_does_not_run_any_more_have_left_and_silent_ones_are_counted_apart():
    quiet = beat("47_3r0", beat=NOW - 400)
    (found,) = workers_of([*THREE, quiet], NOW, running={"47_0r0", "47_3r0"})
    assert (found.busy, found.waiting, found.silent, found.left) == (1, 0, 1, 2)
    assert found.reasons == {"unsaid": 2}
    assert workers_in_words(found) == "rollout 2 workers: 1 busy, 1 silent for 5 minutes or more"


@given(st.lists(st.sampled_from(list(Doing)), max_size=12), st.floats(0, 2000))
def test_every_worker_is_counted_once(doings, now):
    beats = [beat(f"1_{i}r0", doing=doing) for i, doing in enumerate(doings)]
    for found in workers_of(beats, now):
        assert found.live + found.silent + found.left == len(beats)


def test_time_adds_up_to_the_worker_s_life():
    life = beat("1_0r0", doing=Doing.WAITING, busy_seconds=500.0, waiting_seconds=390.0)
    spent = spent_by(life)
    assert (spent.startup, spent.busy, spent.waiting) == (10.0, 500.0, 490.0)
    assert spent.total == life.beat - life.started
    assert set(REASONS) == set(Reason)


# --- views ---


def status(*beats: Beat, state: str = "running", workers: bool = True) -> Status:
    slurm = SlurmStatus(None, len(beats), 0, (), (), None)
    counts = workers_of(beats, NOW) if workers else ()
    return Status(
        run="/r",
        state=state,
        iterations_done=6,
        iterations=9,
        evaluations_done=0,
        evaluations=0,
        slurm=slurm,
        time=NOW,
        workers=counts,
    )


def test_status_and_watch_show_waiting_apart_from_work():
    line = "rollout 3 workers: 2 busy, 1 waiting for policy 7 (leaves 00:21)"
    look = status(*THREE)
    assert line in describe(look).splitlines()
    assert line in [row.plain.rstrip() for row in screen(look, ScreenState(), 100, 30)]
    assert any(line in said for said in changes(None, look))
    later = status(*(replace(one, beat=NOW, until=one.until and 1400.0) for one in THREE))
    assert not any("worker" in said for said in changes(look, later)), "waiting longer is no news"
    gone = status(*(replace(one, doing=Doing.LEAVING) for one in THREE))
    assert "worker" not in describe(gone)
    found = to_json(look)["workers"]
    assert found[0]["waits_for"] == "policy 7"
    json.dumps(found)


def test_text_and_screen_say_in_80_columns_what_starts_cost_while_it_runs_and_after():
    made = replace(beat("", doing=Doing.LEAVING), reason=Reason.NEEDED, busy_seconds=0.0)
    evicted = [replace(made, worker=f"46_{i}r0") for i in range(9)]
    cost = "9 of 12 starts did no task, 9 evicted; start-up 2 min 0 s, work 3 min 20 s"
    for state in ("running", "complete"):
        look = status(*THREE, *evicted, state=state)
        for lines in (
            describe(look).splitlines(),
            [row.plain for row in screen(look, ScreenState(), 80, 24)],
        ):
            assert max(map(len, lines)) <= 80
            said = " ".join(word for line in lines for word in line.split())
            assert f"rollout: {cost}; change scheduler.rollout.array_parallelism" in said
    assert "did no task" not in describe(status(*THREE))
    (said,) = to_json(status(*THREE, *evicted))["workers"]
    assert (said["without_task"], said["reasons"]["needed"], said["spent"]["startup"]) == (9, 9, 120.0)


def test_a_queue_names_its_workers():
    queue = RunQueue((element(3, restarts=2), element(4, state=SlurmState.PENDING)))
    assert running_workers(queue) == {"47_3r2"}


def element(index: int, state: SlurmState = SlurmState.RUNNING, kind: str = "rollout", **more: object):
    return jobs.element(index, state, kind, **{"array_id": "47", "started": 100.0} | more)


def test_the_doctor_finds_workers_that_say_nothing():
    jobs = [element(0), element(1), element(2), element(9, kind="driver")]
    assert [f.verdict for f in judge_workers(THREE, jobs, NOW)] == [Verdict.OK]
    (hung,) = judge_workers([replace(THREE[0], beat=200.0), *THREE[1:]], jobs, NOW)
    assert hung.verdict is Verdict.PROBLEM
    assert "47_0r0 (rollout) on gpu07 has sent no heartbeat for 15 min" in hung.measured
    assert "scancel 47_0" in hung.advice
    (mute,) = judge_workers(THREE, [*jobs, element(3)], NOW)
    assert mute.verdict is Verdict.WARNING
    assert "job 47_3 on gpu07" in mute.measured
    young = element(3, started=NOW - 60)
    assert [f.verdict for f in judge_workers(THREE, [*jobs, young], NOW)] == [Verdict.OK]
