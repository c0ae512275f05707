"""Looking at a run while it goes on: what is shown, on a terminal and without one, and nothing changes."""

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.executors.slurm.queue import RunQueue, look_at_queue
from pipeline.metrics.advice_input import Advice, Rule, Severity
from pipeline.run.directory import load_run
from pipeline.run.lease import EXPIRY_SECONDS, hold
from pipeline.run.place import settle
from pipeline.status.lanes import Lane, ShardState, StageProgress
from pipeline.status.slurm import DriverJob, SlurmStatus
from pipeline.status.snapshot import StatusReader
from pipeline.status.state import Status
from pipeline.status.whose import Whose
from pipeline.sweep.manifest import locks_of
from pipeline.text import printable
from pipeline.watch.event_lines import event_lines
from pipeline.watch.run import Readers, changes, pressed
from pipeline.watch.screen import LogEnd, Page, ScreenState, chosen, marks_of, screen, to_ascii
from pipeline.watch.terminal import split_keys
from slurm.states import SlurmState
from tests.support import ROOT, light, tiny
from tests.support.copying import snapshot
from tests.support.sweeps import make_sweep
from tests.support.toyslurm import Element
from tests.support.toyworld import Luck, World, make_world

GOLDEN = ROOT / "tests/golden"
NOON = 1_700_049_600.0
pytestmark = pytest.mark.usefixtures("utc")


# --- a run on Slurm, imagined ---

DONE, RUN, AGAIN, WAIT, FAIL, IDLE = (
    ShardState.DONE,
    ShardState.RUNNING,
    ShardState.AGAIN,
    ShardState.WAITING,
    ShardState.FAILED,
    ShardState.IDLE,
)


def lane(iteration: int, stage: str, *shards: ShardState, **more: object) -> Lane:
    progress = StageProgress(
        iteration=iteration,
        stage=stage,
        total=len(shards),
        done=shards.count(DONE),
        running=shards.count(RUN) + shards.count(AGAIN),
        waiting=shards.count(WAIT),
        failed=shards.count(FAIL),
        reason=None,
        queue_seconds=None,
        run_seconds=None,
        attempts=len(shards),
        resubmitted=0,
        jobs=(),
        nodes=(),
    )
    return Lane(replace(progress, **more), shards)


def row(iteration: int) -> dict[str, float]:
    return {
        "iteration": iteration,
        "reward/mean": -0.4 + 0.05 * iteration,
        "objective/kl": 0.3 * iteration,
        "response_length/mean": 120.0 + iteration % 7,
        "response_length/clip_ratio": 0.02,
        "policy/entropy": 2.0 - 0.02 * iteration,
        "policy/loss": -0.01,
        "policy/clip_fraction_low": 0.04,
        "policy/clip_fraction_high": 0.05,
        "seconds/iteration": 900.0,
        "seconds/elapsed": 1000.0 * iteration,
        "seconds/remaining": 900.0 * (100 - iteration),
        **({"evaluate/reward": 0.04 * iteration} if iteration % 10 == 0 else {}),
    }


EVENTS = (
    {
        "time": NOON - 400,
        "event": "submitted",
        "job": "36",
        "array": "slurm-ppo.r1.rollout.iter24.abc.1.0",
        "elements": 64,
    },
    {
        "time": NOON - 90,
        "event": "failed",
        "task": "24/rollout/5",
        "attempt": 1,
        "kind": "lost",
        "message": "boom",
        "job": "36_5",
        "node": "gpu07",
    },
    {
        "time": NOON - 60,
        "event": "submitted",
        "job": "41",
        "array": "slurm-ppo.r1.rollout.iter24.abc.2.0",
        "elements": 1,
    },
)
LANES = (
    lane(
        24,
        "rollout",
        *[DONE] * 40,
        *[RUN] * 12,
        AGAIN,
        *[WAIT] * 10,
        FAIL,
        reason="the QOS's limit of GPUs is reached",
        jobs=("36", "41"),
        nodes=("gpu01", "gpu07"),
        queue_seconds=610.0,
        run_seconds=385.0,
        resubmitted=1,
        attempts=65,
    ),
    lane(24, "score-judge", *[WAIT] * 8, jobs=("37",)),
    lane(24, "reward", *[WAIT] * 64, reason="other jobs have a higher priority", jobs=("38",)),
    lane(24, "update", WAIT, jobs=("39",)),
    lane(25, "rollout", *[WAIT] * 64, jobs=("42",)),
    lane(25, "update", IDLE),
    lane(20, "evaluate", RUN, jobs=("31",), nodes=("gpu02",), run_seconds=65.0),
)
LOOK = Status(
    time=NOON,
    run="/scratch/someone/experiments/slurm-ppo/runs/a-long-name-of-a-run/with-a-part-more/r1",
    state="running",
    created=NOON - 24_000.0,
    iterations_done=23,
    iterations=100,
    evaluations_done=3,
    evaluations=11,
    lanes=LANES,
    rows=tuple(map(row, range(1, 24))),
    events=EVENTS,
    finish=NOON + 70_000,
    advice=(Advice(Severity.WARNING, Rule.CLIPPING, "too many tokens are clipped", "40 %", "lower it"),),
    answered=NOON - 3,
    slurm=SlurmStatus(
        unanswered=None,
        jobs_running=14,
        jobs_waiting=137,
        stages=tuple(lane.progress for lane in LANES),
        drivers=(DriverJob("46", False, "x", is_timed=False), DriverJob("40", False, "y")),
        finish=NOON + 70_000,
    ),
)


def text_of(look: Status | None, view: ScreenState, width: int, height: int) -> str:
    return "\n".join(line.plain.rstrip() for line in screen(look, view, width, height)) + "\n"


def compare(name: str, text: str) -> None:
    """With the recorded text; to record anew: UPDATE_GOLDEN=1."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (60, 18)])
def test_what_a_run_on_slurm_looks_like(width, height):
    text = text_of(LOOK, ScreenState(), width, height)
    compare(f"watch_{width}.txt", text)
    assert len(text.splitlines()) == height
    assert max(map(len, text.splitlines())) <= width


def test_a_terminal_that_knows_ascii_only():
    lines = [to_ascii(line).plain.rstrip() for line in screen(LOOK, ScreenState(), 80, 24)]
    compare("watch_ascii.txt", "\n".join(lines) + "\n")
    assert "\n".join(lines).isascii()


def test_without_colours_the_shapes_are_enough():
    """Each state has a sign of its own, also in ASCII."""
    signs = [marks_of([state], 1).plain for state in ShardState]
    ascii_signs = [to_ascii(marks_of([state], 1)).plain for state in ShardState]
    assert len(set(signs)) == len(set(ascii_signs)) == len(ShardState)


def test_the_other_pages():
    compare("watch_help.txt", text_of(LOOK, ScreenState(Page.HELP), 80, 24))
    log = LogEnd(
        (24, "rollout"),
        "rollout@24 5",
        "/scratch/" + "folder/" * 14 + "shard-00005.log",
        ("\x1b[31mred\x1b[0m", "a\tb"),
    )
    text = text_of(LOOK, ScreenState(Page.LOG, log=log), 80, 24)
    assert log.path in text.replace("\n", ""), "the path can be copied whole"
    assert "\nred\na       b\n" in text
    assert "\x1b" not in text
    assert "reading the log" in text_of(LOOK, ScreenState(Page.LOG), 80, 24)
    assert "reading the run directory" in text_of(None, ScreenState(), 80, 24)


def test_slurm_that_does_not_answer_is_shown_with_what_is_known():
    silent = replace(LOOK.slurm, unanswered="squeue failed:\n timed out")
    look = replace(LOOK, state="unknown", slurm=silent, answered=NOON - 125)
    said = "Slurm does not answer (last 11:57:55), so this is from files alone: squeue"
    text = text_of(look, ScreenState(), 80, 24)
    assert said in text
    assert "40/64" in text
    asking = replace(LOOK, state="unknown", slurm=replace(LOOK.slurm, jobs_running=0, jobs_waiting=0))
    assert "asking Slurm" in text_of(asking, ScreenState(), 80, 24)


def test_a_run_of_somebody_else_says_whose_it_is_and_nothing_of_a_queue_that_is_hidden():
    ada = Whose("ada", "gold", "ben", "gold", is_hidden=True, last_commit=NOON - 8, last_word=NOON - 3)
    hidden = replace(LOOK.slurm, jobs_running=0, jobs_waiting=0, drivers=(), whose=ada)
    look = replace(LOOK, slurm=hidden, answered=NOON)
    text = text_of(look, ScreenState(), 80, 30)
    assert "runs as ada on cluster gold; last commit 8 s ago, last heartbeat 3 s ago" in text
    assert "in the queue" not in text
    assert "no driver job" not in text
    said = "12:00:00 runs as ada on cluster gold; last commit 8 s ago, last heartbeat 3 s"
    assert [line for line in changes(None, look) if line.startswith(said)]
    assert not changes(look, look)


def test_a_pause_and_a_file_system_that_hangs_are_said():
    text = text_of(
        LOOK, ScreenState(is_paused=True, trouble="the file system has not answered for 20 s"), 80, 24
    )
    assert text.splitlines()[-1].startswith(" PAUSED  q quit")
    assert "the file system has not answered for 20 s" in text


states = st.lists(st.sampled_from(list(ShardState)), min_size=1, max_size=300)


@given(states, st.integers(6, 120))
def test_no_state_is_lost_when_marks_are_compressed(shards, width):
    marks = marks_of(shards, width).plain
    assert len(marks) == min(len(shards), width)
    shown = {state for state in ShardState if marks_of([state], 1).plain in marks}
    assert shown == set(shards)


lanes = st.builds(
    lambda i, stage, shards, reason, tries: lane(
        i, stage, *shards, reason=reason, resubmitted=tries, jobs=("1",), queue_seconds=5e5, run_seconds=1e6
    ),
    st.integers(0, 99_999),
    st.sampled_from(["rollout", "score-a_pool_of_a_long_name", "update"]),
    states,
    st.sampled_from([None, "waiting for free resources", "other jobs have a higher priority"]),
    st.integers(0, 9),
)


@settings(max_examples=60)
@given(
    st.lists(lanes, max_size=12),
    st.integers(1, 200),
    st.integers(1, 60),
    st.integers(0, 23),
    st.sampled_from(Page),
    st.booleans(),
)
def test_every_size_is_filled_and_never_exceeded(lanes, width, height, rows, page, is_local):
    look = replace(LOOK, lanes=tuple(lanes), rows=LOOK.rows[:rows], slurm=None if is_local else LOOK.slurm)
    lines = screen(look, ScreenState(page, selected=lanes[-1].key if lanes else None), width, height)
    assert len(lines) == max(height, 8)
    assert max(line.cell_len for line in lines) <= max(width, 40)
    if page is Page.RUN and lanes and height >= 16:
        assert any(line.plain.startswith(">") for line in lines)


def test_numbers_that_are_missing_or_broken_are_no_error():
    rows = ({"iteration": 1}, {"iteration": 2, "reward/mean": float("nan")}, {"reward/mean": float("inf")})
    assert "reward" in text_of(replace(LOOK, rows=rows), ScreenState(), 80, 24)
    assert changes(replace(LOOK, rows=()), replace(LOOK, rows=rows)) == []


# --- keys ---


def test_keys_choose_lanes_and_pages():
    view = ScreenState()
    assert chosen(LOOK, view).key == (24, "rollout")
    view = pressed(view, LOOK, "\x1b[B")
    assert view.selected == (24, "score-judge")
    assert pressed(view, LOOK, "k").selected == (24, "rollout")
    assert pressed(view, LOOK, "u").selected == (24, "update")
    assert pressed(pressed(view, LOOK, "u"), LOOK, "u").selected == (25, "update")
    assert pressed(view, LOOK, "e").selected == (20, "evaluate")
    assert pressed(view, LOOK, "x") == view
    assert pressed(view, LOOK, "?").page is Page.HELP
    log = pressed(view, LOOK, "l")
    assert (log.page, log.selected) == (Page.LOG, (24, "score-judge"))
    assert pressed(log, LOOK, "l").page is Page.RUN
    assert pressed(log, LOOK, "\x1b").page is Page.RUN
    assert pressed(view, None, "l") == view


def test_the_chosen_stage_is_followed_into_the_next_iteration():
    gone = ScreenState(selected=(23, "update"))
    assert chosen(LOOK, gone).key == (24, "update")


def test_arrow_keys_come_as_one():
    assert split_keys("q\x1b[A\x1bOBl\x1b") == ["q", "\x1b[A", "\x1bOB", "l", "\x1b"]
    assert split_keys("\x1b[1;5A?") == ["\x1b[1;5A", "?"]


# --- what happened, and lines without a terminal ---


def test_events_are_told_in_words_and_shards_that_did_alike_together():
    launched = [
        {"time": NOON, "event": "launched", "task": f"2/reward/{i}", "attempt": "1-ab"} for i in (0, 1)
    ]
    more = [
        *launched,
        {"time": NOON, "event": "launched", "task": "2/reward/1", "attempt": "2-cd"},
        {
            "time": NOON,
            "event": "submitted",
            "job": "9",
            "array": "slurm-ppo.r.driver.iter3.abc.1.0",
            "elements": 1,
        },
        {"time": NOON, "event": "of_a_later_version", "colour": "blue"},
        {"time": NOON, "event": "failed", "task": "nonsense"},
    ]
    told = [str(one) for one in event_lines([*EVENTS, *more], [row(23)], NOON - 23_200.0, 100)]
    assert told == [
        "11:53:20 submitted iteration 24 rollout: job 36, 64 elements",
        "11:56:40 iteration 23/100  reward +0.750  KL 6.900  length 122.0  900.0 s, 19 h 15 min left",
        "11:58:30 iteration 24 rollout shard 5, attempt 1 (job 36_5 on gpu07) failed: boom",
        "11:59:00 submitted iteration 24 rollout: job 41, 1 element",
        "12:00:00 launched iteration 2 reward: 2 tasks",
        "12:00:00 launched iteration 2 reward, attempt 2",
        "12:00:00 driver job 9 submitted",
        "12:00:00 of a later version colour=blue",
        "12:00:00 failed task=nonsense",
    ]


def test_what_others_wrote_cannot_move_the_cursor():
    assert printable("a\x1b[2Jb\nc\x1b]0;title\x07d\r") == "ab cd"
    assert printable("\x1b]52;c;c2VjcmV0\x1b\\x\x1bPq#0\x1b\\y\u009d52;c;YQ==\u009cz\x1b]0;open") == "xyz"


def test_lines_say_what_changed_and_nothing_twice():
    first = changes(None, LOOK)
    assert first[0] == f"12:00:00 {LOOK.run}: running, 23/100 iterations, 3/11 evaluations"
    assert first[1] == "12:00:00 warning: too many tokens are clipped (clipping): 40 %"
    assert first[2].endswith(
        "rollout: 40/64 done, 13 running, 10 waiting, 1 failed (the QOS's limit of GPUs is reached)"
    )
    assert changes(LOOK, replace(LOOK, time=NOON + 9)) == []
    failed = {**EVENTS[1], "time": NOON + 1, "task": "24/rollout/6"}
    silent = replace(LOOK.slurm, unanswered="timed out")
    later = replace(
        LOOK, slurm=silent, rows=(*LOOK.rows, row(24)), events=(*EVENTS, failed), iterations_done=24
    )
    said = changes(LOOK, later)
    assert said[0].startswith("12:00:00 Slurm does not answer (last 11:59:57), so ")
    assert sum("iteration 24/100  reward" in line for line in said) == 1
    assert sum("shard 6, attempt 1" in line for line in said) == 1
    assert len(said) == 3
    assert changes(later, replace(later, slurm=LOOK.slurm)) == ["12:00:00 Slurm answers again"]
    assert changes(LOOK, replace(LOOK, state="failed")) == [first[0].replace("running", "failed")]


# --- looking at a run on a Slurm of a few rules ---


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("pipeline.executors.slurm.passes._AGAIN_SECONDS", 0.0)
    world = make_world(tmp_path / "run", monkeypatch, 11, Luck())
    assert world.run.plan.num_shards > 1
    world.submit()
    return world


def of_stage(world: World, stage: str) -> list[Element]:
    return [e for e in world.slurm.elements() if f".{stage}." in str(e) and not e.has_ended]


def prepare(world: World) -> None:
    """Have the prompts prepared, and a pass made."""
    (element,) = of_stage(world, "prepare")
    world.start(element)
    world.step(element)
    world.step(element)
    world.advance("a pass")


def test_a_look_shows_each_shard_as_it_goes_on_and_changes_nothing(world):
    looker, run = StatusReader(world.run), world.run
    prepare(world)
    rollouts = of_stage(world, "rollout")
    first, second = rollouts[:2]
    world.start(first)
    world.step(first)
    before = snapshot(run.paths.root)
    look = looker.read(look_at_queue(run, max_age=0.0), time.time())
    lanes = {lane.key: lane.shards for lane in look.lanes}
    assert look.state == "running"
    assert lanes[1, "rollout"] == (RUN, *[WAIT] * (len(rollouts) - 1))
    assert set(lanes[1, "update"]) == {IDLE}
    assert look.slurm.drivers
    assert snapshot(run.paths.root) == before
    world.step(first)
    world.start(second)
    world.step(second)
    world.slurm.end(second, SlurmState.FAILED, 1)
    world.workers.pop(second)
    world.advance("a pass")
    world.step(first)  # which has nothing else to do
    look = looker.read(look_at_queue(run, max_age=0.0), time.time())
    lanes = {lane.key: lane.shards for lane in look.lanes}
    assert lanes[1, "rollout"][:2] == (DONE, AGAIN)
    assert any("attempt 1" in one.text for one in event_lines(look.events, look.rows, 0, 1))


def test_a_run_without_an_answer_of_slurm_is_unknown_and_goes_on_to_be_looked_at(world):
    looker = StatusReader(world.run)
    assert looker.read(None).state == "unknown"
    known = look_at_queue(world.run, max_age=0.0)
    silent = looker.read(RunQueue(known.elements, "timed out"), NOON)
    assert silent.state == "unknown"
    assert not silent.has_ended
    assert any(WAIT in lane.shards for lane in silent.lanes)


def test_a_commit_that_is_taken_back_is_seen_to_be_gone(world):
    looker = StatusReader(world.run)
    prepare(world)
    rollout = of_stage(world, "rollout")[0]
    world.start(rollout)
    world.step(rollout)
    world.step(rollout)
    assert DONE in looker.read(look_at_queue(world.run, max_age=0.0)).lanes[0].shards
    record = world.record(world.task(rollout))
    (world.run.paths.root / record.outputs[0].path).write_text("spoilt")
    world.advance("somebody")
    assert DONE not in looker.read(look_at_queue(world.run, max_age=0.0)).lanes[0].shards


def until(holds: Callable[[], object], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


@contextlib.contextmanager
def at_work(reading: Readers) -> Iterator[Readers]:
    reading.start()
    yield reading
    reading.stop()


def test_slurm_that_hangs_holds_up_neither_the_looks_nor_the_end(world):
    hangs = threading.Event()

    def ask(run: object) -> RunQueue:
        hangs.wait(20)
        return RunQueue(unanswered="timed out")

    with at_work(Readers(world.run, 0.05, ask)) as reading:
        until(lambda: reading.seen.look)
        first = reading.seen.look
        until(lambda: reading.seen.look is not first)
        assert reading.seen.look.state == "unknown"
        hangs.set()
        until(lambda: reading.seen.look.slurm.unanswered == "timed out")
        assert not reading.seen.is_settled


def test_a_run_has_ended_when_slurm_says_so_twice(world):
    answers: list[RunQueue] = []

    def ask(run: object) -> RunQueue:
        answers.append(RunQueue())
        return answers[-1]

    with at_work(Readers(world.run, 0.05, ask)) as reading:
        until(lambda: reading.seen.is_settled)
    assert len(answers) >= 2
    assert reading.seen.look.state == "stopped"


def test_a_folder_that_cannot_be_read_for_now_is_said_and_read_again(world):
    """If it has ever shown the run: else the view ends with the reason."""
    metrics, reading = world.run.paths.metrics, Readers(world.run, 0.05)
    reading.look()
    metrics.unlink()
    metrics.mkdir()
    reading.look()
    assert reading.seen.trouble.startswith("cannot read the run now")
    assert reading.seen.look, "what was seen last stays"
    with at_work(Readers(world.run, 0.05, lambda run: RunQueue())) as another:
        until(lambda: another.error)
    with pytest.raises(OSError, match="a folder, where a file belongs"):
        another.check()
    metrics.rmdir()
    reading.look()
    assert reading.seen.trouble is None


# --- the command, on real runs of this machine ---


class Terminal:
    """A process on a terminal of its own."""

    def __init__(self, *arguments: object, environment: dict[str, str], width: int, height: int) -> None:
        self.descriptor, slave = pty.openpty()
        self.resize(width, height)
        self.settings = termios.tcgetattr(slave)
        command = [sys.executable, "-m", "pipeline", *map(str, arguments)]
        given = environment | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=given, cwd=ROOT, start_new_session=True
        )
        self.slave = slave
        self.output = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self.descriptor, keys.encode())

    def read(self) -> None:
        while select.select([self.descriptor], [], [], 0.02)[0]:
            self.output += os.read(self.descriptor, 1 << 16).decode()

    @property
    def frame(self) -> list[str]:
        """The lines of the newest whole screen."""
        frames = re.split(r"\x1b\[H", self.output)
        text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", frames[-1])
        return [line.rstrip() for line in text.replace("\r", "").split("\n")]

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + seconds
        while text not in "\n".join(self.frame):
            self.read()
            assert self.process.poll() is None, self.output
            assert time.monotonic() < end, "\n".join(self.frame)

    def wait(self) -> int:
        end = time.monotonic() + 30
        while self.process.poll() is None and time.monotonic() < end:
            self.read()
        self.read()
        return self.process.wait(1)

    def is_clean(self) -> bool:
        """Screen, cursor and settings are as they were."""
        left, shown = self.output.rfind("\x1b[?1049l"), self.output.rfind("\x1b[?25h")
        entered, hidden = self.output.rfind("\x1b[?1049h"), self.output.rfind("\x1b[?25l")
        return left > entered >= 0 and shown > hidden and termios.tcgetattr(self.slave) == self.settings


@pytest.fixture
def running(inputs: Path, tmp_path: Path, environment: dict[str, str]) -> Iterator[Path]:
    """A run of this machine with more iterations than anybody will look at."""
    run_dir = tmp_path / "run"
    overrides = tiny.overrides(inputs, run_dir, "iterations=500")
    command = [sys.executable, "-m", "pipeline", "run", *overrides]
    slowly = environment | {light.SECONDS: "0.2"}
    process = subprocess.Popen(command, env=slowly, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    until((run_dir / "events.jsonl").exists, 60)
    yield run_dir
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)


def test_a_person_looks_at_a_run_presses_keys_and_resizes(running, environment, tmp_path):
    """And somebody else reads lines, until the run is interrupted."""
    lines = tmp_path / "lines.txt"
    with lines.open("w") as file:
        command = [sys.executable, "-m", "pipeline", "watch", str(running), "--interval", "1"]
        plain = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    terminal = Terminal("watch", running, environment=environment, width=80, height=24)
    terminal.wait_for("running")
    terminal.wait_for("iteration 1/500  reward", 120)
    assert max(map(len, terminal.frame)) <= 80
    terminal.press("?")
    terminal.wait_for("retried")
    terminal.press("?u")
    terminal.wait_for("q quit")
    terminal.press("l")
    terminal.wait_for("mini-batch 1: policy loss")
    assert "-update/attempt-1/shard-00000.log" in "".join(terminal.frame), "its path can be copied whole"
    terminal.press("lp")
    terminal.wait_for("PAUSED")
    terminal.press("p")
    terminal.resize(120, 40)
    terminal.wait_for("waited")
    assert 80 < max(map(len, terminal.frame)) <= 120
    assert "\x1b[3" not in terminal.output, "NO_COLOR is respected"
    terminal.press("q")
    assert terminal.wait() == 3
    assert terminal.is_clean()
    assert "it goes on without this view" in terminal.output.rpartition("\x1b[?1049l")[2]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        again = Terminal("watch", running, environment=environment, width=80, height=24)
        again.wait_for("running")
        again.process.send_signal(number)
        assert again.wait() == 3
        assert again.is_clean()
        assert "Traceback" not in again.output
    stop_driver(running)
    assert plain.wait(60) == 3
    text = lines.read_text()
    assert "\x1b" not in text
    assert re.search(r"^\d\d:\d\d:\d\d .*iteration \d+ rollout: ", text, re.MULTILINE)
    assert text.splitlines()[-1] == f"next: slurm-ppo resume {running}"


def stop_driver(run_dir: Path) -> None:
    """As its owner would with Ctrl-C."""
    newest = max((run_dir / "locks").glob("[0-9]*.json"))
    os.kill(json.loads(newest.read_text())["pid"], signal.SIGTERM)


def test_a_complete_run_is_told_at_once_and_left_alone(complete_run, slurm_ppo):
    before = snapshot(complete_run)
    done = slurm_ppo("watch", complete_run)
    assert done.returncode == 0, done.stderr
    assert f"{complete_run}: complete, 2/2 iterations" in done.stdout
    assert done.stdout.splitlines()[-1] == f"next: slurm-ppo report {complete_run}"
    assert snapshot(complete_run) == before


def test_a_run_that_nobody_drives_ends_the_view_with_the_way_on(copied_run, slurm_ppo):
    (copied_run / "iterations/00002/update/shard-00000.json").unlink()
    done = slurm_ppo("watch", copied_run, "--interval", "1")
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == f"next: slurm-ppo resume {copied_run}"


def test_a_lease_that_is_spoilt_is_named_while_the_view_waits_for_its_end(copied_run, slurm_ppo):
    """It may be of a driver at work, until it is two minutes old: here in five seconds."""
    folder = copied_run
    settle(load_run(folder))  # a copy's lease is nobody's
    (folder / "iterations/00002/update/shard-00000.json").unlink()
    (lease,) = (folder / "locks").glob("0*.json")
    lease.write_text(lease.read_text()[:40])
    nearly = time.time() - EXPIRY_SECONDS + 5
    os.utime(lease, (nearly, nearly))
    done = slurm_ppo("watch", folder, "--interval", "1", timeout=60)
    assert done.returncode == 3
    (said,) = [line for line in done.stdout.splitlines() if "waiting: " in line]
    assert f"the lease {lease} cannot be read" in said
    assert "takes it over in" in said


def test_a_person_looks_at_a_sweep_moves_through_its_runs_and_quits(environment, tmp_path):
    """Its command is at work; twelve lines are too few for all runs."""
    root = tmp_path / "lr"
    make_sweep(root, ["1e-6", "3e-6"], 4, begun=6)
    with hold(locks_of(root)):
        terminal = Terminal("watch", root, environment=environment, width=80, height=12)
        terminal.wait_for("q quit   up/down other runs   1-")
        assert "running, a sweep of 8 runs: 3 complete, 3 incomplete, 2 not begun" in terminal.frame
        assert max(map(len, terminal.frame)) <= 80
        terminal.press("\x1b[B" * 7)
        terminal.wait_for("-8 of 8")
        assert any(line.startswith("learning_rate_3e-6-seed_3  not begun") for line in terminal.frame)
        terminal.press("q")
        assert terminal.wait() == 3
    assert terminal.is_clean()
    assert "it goes on without this view" in terminal.output
