"""A run on Slurm and four Unix users, at two clusters: what each sees, may do, and is told.

``people.txt`` is the table of sentences by command, state and person; ``python -m tests.cli.test_people``
writes it again.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.config.job_kinds import GUARD
from pipeline.config.schema import TrackingConfig, WandbConfig, WandbMode
from pipeline.run import journal
from pipeline.run.commits import publish
from pipeline.run.control import ByHand, Control, read_control, write_control
from pipeline.run.owner import Owner
from pipeline.run.paths import RunPaths
from pipeline.run.submissions import job_name
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing
from tests.support import ROOT, people, reportrun, tiny
from tests.support.beats import beat, write_beats
from tests.support.every_state import clear, differences, entries
from tests.support.people import GOLD, MATE, OWNER, READER, SILVER, STRANGER, Desk, Person, Typed
from tests.support.tables import sample

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can be four users")

GOLDEN = ROOT / "tests/golden/people.txt"
OURS = Owner(OWNER.name, OWNER.uid, GOLD)
PEOPLE = (OWNER, MATE, READER, STRANGER, replace(OWNER, cluster=SILVER), replace(MATE, cluster=SILVER))
STATES = ("live", "silent", "stopped", "failed", "cancelled", "paused", "complete", "fresh")
"""Silent: live, and Slurm shows people their own jobs alone."""
LOOKING = (
    *("status RUN", "watch RUN", "plan RUN", "ls RUN", "logs RUN", "report RUN --out OUT", "samples RUN"),
    "doctor RUN --no-probe",
)
ACTING = (
    *("submit RUN", "resume RUN", "resume RUN --take-over"),
    *("cancel RUN", "clean RUN --yes", "advance RUN", "fork RUN OUT"),
)
Told = dict[tuple[str, str, str], str]
"""What is said, by command, state and person."""
CELLS = [(line, state, who) for line in (*LOOKING, *ACTING) for state in STATES for who in PEOPLE]
CELLS = [cell for cell in CELLS if cell[:2] != ("fork RUN OUT", "complete")]  # its policy is an empty folder


@dataclass(frozen=True)
class Scene:
    """A folder of the lab with a run in each state, and copies of them as they were."""

    folder: Path
    now: float

    def root(self, state: str) -> Path:
        return self.folder / "lab" / state

    def desk(self, state: str, **more: object) -> Desk:
        names = {"7": "rollout", "8": GUARD} if state in ("live", "silent") else {}
        run_id = id_of(self.root(state))
        jobs = {job: job_name("demo", run_id, 1, kind, 1, 0) for job, kind in names.items()}
        return Desk(self.folder / "desk", self.now, jobs, is_private=state == "silent", **more)

    def type(self, line: str, state: str, who: Person, **more: object) -> Typed:
        out = self.folder / "out" / who.name
        clear(out)
        words = [word.replace("RUN", str(self.root(state))).replace("OUT", str(out)) for word in line.split()]
        return self.desk(state, **more).type(who, *words)

    def tidy(self, state: str) -> None:
        shutil.rmtree(self.root(state))
        subprocess.run(["cp", "-a", self.folder / "kept" / state, self.root(state)], check=True)


_SAID = (
    r".*: (?:running|stopped|unknown|failed|cancelled|paused|complete),|runs as|submitted by|in the queue|"
    r"nothing of|\d+ of \d+ jobs|  what is in|due now|next:"
)
_EXAMINED = r"problem|skipped +writing|\w+ +(?:jobs|jobs of stages|workers|driver):"


def id_of(root: Path) -> str:
    found = re.search(r'"id": "(\w+)"', (root / "run.json").read_text())
    assert found
    return found[1]


def make_scene(folder: Path) -> Scene:
    scene = Scene(folder, time.time())
    folder.chmod(0o755)
    for name in ("lab", "kept", "desk", "out"):
        (folder / name).mkdir()
    (folder / "out").chmod(0o777)
    for state in STATES:
        make_run(scene, state)
        people.give(scene.root(state), OWNER)
        subprocess.run(["cp", "-a", scene.root(state), folder / "kept" / state], check=True)
    os.chown(folder / "lab", OWNER.uid, people.HOUSE)
    (folder / "lab").chmod(0o2750)
    return scene


def make_run(scene: Scene, state: str) -> None:
    tracking = TrackingConfig(wandb=WandbConfig(mode=WandbMode.DISABLED))
    run = reportrun.make_run(scene.root(state), scheduler=reportrun.SLURM, iterations=1, tracking=tracking)
    for name in ("locks", "slurm/workers", "logs"):
        (run.paths.root / name).mkdir(parents=True, exist_ok=True)
    if state != "fresh":
        act = ByHand(8, 8, scene.now - 600) if state == "paused" else None
        is_cancelled = state in ("cancelled", "paused")
        asked = Control(1, is_cancelled, state == "failed", begun=scene.now - 900, paused=act, owner=OURS)
        write_control(run.paths, asked)
        journal.event(run.paths.events, "submitted", job="7", array="none", elements=1, waits_for="")
    is_alive = state in ("live", "silent")
    publish(run.paths, reportrun.record(PREPARE, ended=scene.now - (8 if is_alive else 7200)))
    age = 3 if is_alive else 7000
    write_beats(run.paths, beat("7_0r0", doing=Doing.BUSY, task="1/rollout/0", beat=scene.now - age))
    os.utime(run.paths.slurm / "workers/7_0r0.json", (scene.now - age,) * 2)
    if state == "complete":
        for stage in (Stage.ROLLOUT, Stage.REWARD, Stage.UPDATE):
            publish(run.paths, reportrun.record(Task(1, stage), ended=scene.now - 7100))
        journal.append(run.paths.metrics, reportrun.make_row(1, 1))
        (run.paths.policies / "00001.one").mkdir(parents=True)


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    people.import_all()
    folder = Path(tempfile.mkdtemp(prefix="people-"))  # pytest's own folders are root's alone
    yield make_scene(folder)
    shutil.rmtree(folder)


def gist(scene: Scene, state: str, who: Person, typed: Typed) -> str:
    """What a person is told: of a refusal all, of an answer what is said of the run."""
    lines = typed.err.splitlines() if typed.code == 2 else said_of_the_run(typed.out)
    text = " / ".join(" ".join(lines).split("\n"))
    text = text.replace(str(scene.root(state)), "RUN").replace(str(scene.folder), "FOLDER")
    return re.sub(rf"\b({MATE.name}|{READER.name}|{STRANGER.name})\b(?! on)", "ME", text)


def said_of_the_run(out: str) -> list[str]:
    """Lines on whose it is, what is in the queue and what comes next, with those that continue them; of an
    examination what stands in the way, and what is said of jobs, workers and driver."""
    examined = re.findall(rf"^  (?:{_EXAMINED}).*(?:\n {{11}}.*)*", out, re.MULTILINE)
    timeless = re.sub(r"^\d\d:\d\d:\d\d ", "", out, flags=re.MULTILINE)
    found = re.findall(rf"^(?:{_SAID}).*(?:\n {{6}}\S.*)*", timeless, re.MULTILINE)
    return [" ".join(line.split()) for line in (*examined, *found)]


def is_allowed(line: str, state: str, who: Person) -> bool:
    """Whether somebody may do what a command does to a run."""
    if line in LOOKING or line.startswith("fork") or (state, line[:5]) == ("fresh", "clean"):
        return who.name != STRANGER.name
    if who.name in (READER.name, STRANGER.name):
        return False
    is_owner_at_home = who == OWNER
    return is_owner_at_home or state == "fresh" or "--take-over" in line


def check(scene: Scene, line: str, state: str, who: Person, typed: Typed) -> None:
    """Whatever is typed: nothing of somebody else's is changed, and who is refused is told the way out."""
    place = (line, state, who.title, typed)
    assert "Traceback" not in typed.err, place
    assert typed.code in (0, 1, 2, 3), place
    if who.name != OWNER.name and "--take-over" not in line:
        assert not [act for act in typed.acts if act.startswith("scancel")], place
    if not is_allowed(line, state, who):
        assert typed.code == 2, place
        assert re.search(r"slurm-ppo \w+|chmod|as its owner", typed.err), place
    changed = differences(entries(scene.folder / "kept" / state), entries(scene.root(state)))
    if line in LOOKING or not is_allowed(line, state, who):
        assert not changed, (place, changed)
        assert not typed.acts, place
    elif changed:
        scene.tidy(state)


def table(scene: Scene, cells: list[tuple[str, str, Person]]) -> Told:
    """Type each command, and return what is said."""
    found = {}
    for line, state, who in cells:
        typed = scene.type(line, state, who)
        check(scene, line, state, who, typed)
        told = gist(scene, state, who, typed)
        found[line, state, who.title] = f"{typed.code} {told}".strip()
    return found


def written() -> Told:
    """The committed table: for each command and sentence, who is told it of runs in which states."""
    found = {}
    for row in GOLDEN.read_text().splitlines():
        line, cells, told = row.split(" | ", 2)
        for cell in cells.split("; "):
            states, titles = cell.split(": ")
            found |= {(line, s, t): told for s in states.split(", ") for t in titles.split(", ")}
    return found


def rows_of(table: Told) -> Iterator[str]:
    """Yield the lines of the committed table."""
    sentences: dict[tuple[str, str], dict[str, list[str]]] = {}
    for (line, state, title), told in table.items():
        sentences.setdefault((line, told), {}).setdefault(state, []).append(title)
    for (line, told), by_state in sentences.items():
        groups: dict[tuple[str, ...], list[str]] = {}
        for state, titles in by_state.items():
            groups.setdefault(tuple(titles), []).append(state)
        cells = "; ".join(f"{', '.join(states)}: {', '.join(titles)}" for titles, states in groups.items())
        yield f"{line} | {cells} | {told}\n"


SAMPLED = sample(CELLS, 0.04, lambda cell: f"{cell[0]} {cell[1]} {cell[2].title}")


def test_what_each_person_is_told_is_the_committed_table(scene):
    golden = written()
    for key, told in table(scene, SAMPLED).items():
        assert told == golden[key], key


def test_who_takes_a_run_over_has_it_and_who_had_it_is_refused(scene):
    taken = scene.type("resume RUN --take-over", "live", MATE)
    try:
        assert taken.code == 3, taken
        assert taken.acts[0] == "scancel 7 8"
        assert "sbatch" in taken.acts
        assert "taken over from owner on cluster gold" in taken.err
        assert "jobs of owner cannot be ended from here" in taken.err
        control = read_control(RunPaths(scene.root("live")))
        assert control.owner == Owner(MATE.name, MATE.uid, GOLD)
        assert (control.former, control.cancelled) == ((OURS,), False)
        (event,) = (
            e for e in journal.read(scene.root("live") / "events.jsonl") if e["event"] == "taken_over"
        )
        assert (event["by"]["user"], event["former"]["user"]) == (MATE.name, OWNER.name)
        again = scene.type("submit RUN", "live", OWNER)
        assert again.code == 2
        assert "was submitted by mate, whose jobs are not owner's" in again.err
        assert not again.acts
    finally:
        scene.tidy("live")


def test_a_take_over_by_whom_slurm_takes_no_jobs_from_changes_nothing_and_names_the_way_on(scene):
    done = scene.type("resume RUN --take-over", "stopped", MATE, is_refused=True)
    assert done.code == 2
    assert "not one of yours" in done.err
    assert "--take-over scheduler.account=ACCOUNT" in done.err
    assert not done.acts
    assert not differences(entries(scene.folder / "kept/stopped"), entries(scene.root("stopped")))


@pytest.mark.parametrize("point", ["nowhere@1", "update@9", "rollout@x"])
def test_a_take_over_to_a_point_that_is_none_changes_nothing(scene, point):
    done = scene.type(f"resume RUN --take-over --from {point}", "live", MATE)
    assert done.code == 2
    assert not done.acts
    assert not differences(entries(scene.folder / "kept/live"), entries(scene.root("live")))


def test_an_account_that_is_not_ones_own_names_the_way_on(scene):
    done = scene.type("submit RUN", "fresh", MATE, refuses="Invalid account or account/partition combination")
    scene.tidy("fresh")
    assert done.code == 2
    assert "Invalid account" in done.err
    assert "scheduler.account=ACCOUNT" in done.err


@pytest.mark.parametrize("name", ["events.jsonl", "slurm", "logs/guard/guard.log"])
def test_one_file_that_may_not_be_written_changes_nothing_and_leaves_no_guards(scene, name):
    path = scene.root("stopped") / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    os.chown(path.parent, OWNER.uid, people.LAB)
    os.chown(path, MATE.uid, people.LAB)
    path.chmod(0o2755 if path.is_dir() else 0o644)
    before = entries(scene.root("stopped"))
    try:
        done = scene.type("submit RUN", "stopped", OWNER)
        assert done.code == 2
        mode = f"{path.stat().st_mode & 0o7777:o}"
        assert f"owner may not write {path} (mate's, mode {mode}); ask mate to run: chmod" in done.err
        assert not done.acts
        assert not differences(before, entries(scene.root("stopped")))
    finally:
        scene.tidy("stopped")


@pytest.mark.parametrize(
    ("state", "who", "shown"),
    [("live", MATE, "running"), ("stopped", replace(MATE, cluster=SILVER), "unknown")],
)
def test_a_list_says_whose_a_run_is_and_whether_it_was_heard_of(scene, state, who, shown):
    listed = scene.type("ls RUN", state, who).out.splitlines()[1]
    assert listed.split()[1] == shown
    assert listed.endswith("of owner on cluster gold")
    assert "of owner" not in scene.type("ls RUN", state, OWNER).out


def test_a_reader_has_a_run_examined(scene):
    done = scene.type("doctor RUN --no-probe", "live", READER)
    assert "you may read" in done.out
    assert re.search(
        r"ok +jobs: runs as owner on cluster gold; last commit 8 s ago", " ".join(done.out.split())
    )
    assert not re.search(r"problem +(writing|jobs|workers|commits at hand|driver|requests):", done.out), (
        done.out
    )


NOT_TRIED = sample(
    [
        (MATE, "the run was submitted by owner, whose jobs are not mate's to end or replace"),
        (READER, "the run was submitted by owner, whose jobs are not reader's to end or replace"),
        (
            replace(OWNER, cluster=SILVER),
            "the run was submitted to cluster gold, and this machine asks silver",
        ),
    ],
    1 / 3,
)
"""Who does not try the jobs of a run, and why."""


@pytest.mark.parametrize(("who", "why"), NOT_TRIED, ids=[who.title for who, _ in NOT_TRIED])
def test_jobs_of_a_run_are_tried_by_its_owner_alone(scene, who, why):
    """On another cluster its partitions are not there, and a colleague's account may not be the owner's."""
    done = scene.type("doctor RUN", "live", who)
    out = " ".join(done.out.split())
    assert f"skipped jobs of stages: {why}" in out
    assert f"skipped compute nodes: {why}" in out
    assert not done.acts
    assert "no such partition" not in out


def test_who_examines_anothers_run_is_told_who_can_mend_it(scene):
    (scene.root("complete") / "metrics.jsonl").write_text("")
    try:
        out = " ".join(scene.type("doctor RUN --no-probe", "complete", MATE).out.split())
        resume = f"slurm-ppo resume {scene.root('complete')}"
        assert f"or: ask owner for {resume}, or take the run over: {resume} --take-over" in out
    finally:
        scene.tidy("complete")


def test_every_file_of_a_run_is_the_groups_to_write_where_umask_and_folder_say_so(inputs, environment):
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, 0, people.LAB)
        Path(folder).chmod(0o2775)
        words = tiny.overrides(inputs, Path(folder) / "run", "iterations=1")
        command = ["sh", "-c", 'umask 002; exec "$@"', "sh", sys.executable, "-m", "pipeline", "run", *words]
        subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True)
        for path in (path for path in Path(folder).rglob("*") if not path.is_symlink()):
            state = path.lstat()
            assert state.st_gid == people.LAB, path
            wanted = 0o2775 if path.is_dir() else 0o664
            assert state.st_mode & 0o7777 == wanted, (path, oct(state.st_mode))


def write() -> None:
    people.import_all()
    with tempfile.TemporaryDirectory(prefix="people-") as folder:
        scene = make_scene(Path(folder))
        GOLDEN.write_text("".join(rows_of(table(scene, CELLS))))


if __name__ == "__main__":
    sys.exit(write())
