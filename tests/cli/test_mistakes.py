"""What people mistype, mistake and paste: each ends in one line that says what, where and the way out."""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.app import main
from tests.support import tiny
from tests.support.tables import sample

LONGEST = 300
FEW = ["model.policy=p", "data.prompts=d", "reward=model", "reward.components.rm.path=r"]
"""Settings of which keys and types can be judged, and nothing else: composing them takes less."""
FAR = "'reward.components.far={kind: remote, url: \"http://127.0.0.1:9/score\"}'"

# In words: RUN a complete run, RUM its name mistyped, SWEEP a sweep whose manifest is spoilt, SWEPE its name
# mistyped, FILE and FOLDER things that are no runs, LOOP a link to itself, NEW a place where nothing is,
# SETTINGS all that a run needs, FEW what can be composed.
MISTAKES: list[tuple[str, str]] = [
    # run directories
    ("status RUM", "did you mean"),
    ("plan RUM", "did you mean"),
    ("run RUM", "give the directory of a run, or settings as KEY=VALUE"),
    ("submit RUM", "is not a run directory: nothing is there"),
    ("validate RUN", "settings are wanted here"),
    ("run RUN", "slurm-ppo resume"),
    ("config NEW", "is not a run directory: nothing is there"),
    ("config FEW --history", "give a run directory"),
    ("resume RUN bla", "or settings as KEY=VALUE"),
    ("resume RUN sed=0", "did you mean 'seed'"),
    ("resume RUN scheduler.max_attempts=0", "scheduler.max_attempts"),
    ("resume RUN update.learning_rate=2e-3", "cannot change while the run goes on"),
    ("submit RUN scheduler.rollout.slots=3", "scheduler=local has no queue"),
    ("notify FOLDER", "holds no run"),
    ("status FILE", "it is a file"),
    ("resume FOLDER", "it holds no run.json"),
    ("logs /dev/null", "is not a run directory"),
    ("cancel /proc", "is not a run directory"),
    ("report ''", "is not a run directory"),
    ("watch '\n'", "is not a run directory"),
    ("status ';rm -rf x'", "is not a run directory"),
    ("status $'\\x1b[31mred'", "is not a run directory"),
    (f"status {'x' * 300}", "choose a shorter name"),
    (f"status {'a/' * 3000}b", "choose a shorter name"),
    ("advance RUN", "scheduler=local has no queue"),
    ("sync NEW", "is not a run directory"),
    ("advance NEW", "slurm-ppo run"),
    ("clean LOOP", "LOOP"),
    ("status LOOP", "LOOP"),
    ("doctor NEW", "is not a run directory"),
    ("report RUN RUM", "did you mean"),
    ("resume SWEEP", "is a sweep, and one run is wanted"),
    ("samples RUM", "did you mean"),
    ("samples RUN@99", "99"),
    ("samples RUN@x", "@x: write RUN, RUN@ITERATION or RUN@best"),
    # many runs; tests/sweep/test_grid.py has a table of what is wrong with their words
    ("sweep RUN", "slurm-ppo resume"),
    ("sweep NEW", "is not a sweep: nothing is there; give the folder of a sweep, or settings as KEY=A,B"),
    ("sweep SWEPE", "did you mean"),
    ("sweep FOLDER", "holds no sweep"),
    ("sweep SWEEP", "its runs are whole"),
    ("sweep SWEEP seed=1,2", "to extend it give its settings again"),
    ("sweep SWEEP --seeds 3", "--seeds goes with settings"),
    ("cancel SWEEP", "its runs are whole"),
    ("sweep FEW", "nothing to sweep: give a key several values"),
    ("sweep FEW seed=1,2 seed=3", "give all its values in one word"),
    ("sweep FEW seed=1,,2", "KEY=A,B"),
    ("sweep FEW update.learning_rat=1,2", "did you mean 'learning_rate'"),
    ("sweep FEW seed=range(3,3)", "a range's end is not part of it"),
    ("sweep FEW seed=range(0,4,0)", "write seed=range(FROM,TO,STEP)"),
    ("sweep FEW update.learning_rate=range(0.1,0.5,0)", "=range(FROM,TO,STEP)"),
    ("sweep FEW seed=interval(0,4)", "write seed=range(FROM,TO,STEP)"),
    ("sweep FEW seed=1,2 --drop x", "slurm-ppo sweep DIR --drop NAME"),
    ("sweep SETTINGS seed=1,x", "seed:"),
    ("sweep SETTINGS algorithm=ppo,pppo", "did you mean 'ppo'"),
    ("sweep SETTINGS seed=1,2 run_dir=RUN", "holds a run, so a sweep cannot begin there"),
    ("sweep SETTINGS seed=1,2 run_dir=RUN/inner", "lies inside the directory of another run"),
    ("sweep SETTINGS seed=1,2 run_dir=FOLDER", "holds other files"),
    ("sweep SETTINGS seed=1,2 run_dir=FILE", "is not a folder"),
    ("sweep SETTINGS seed=1,2 scheduler.gpus=[0,1] --at-once 3", "there are 2 (scheduler.gpus=0,1)"),
    ("sweep SETTINGS seed=1,2 scheduler=slurm --at-once 2", "on Slurm the queue decides"),
    ("ls NEW", "no such folder"),
    ("ls FILE", "a file; give a run directory, or a folder that holds runs"),
    ("clean NEW", "no such folder; give a run directory, or a folder that holds runs"),
    ("clean FOLDER", "holds no runs"),
    ("clean RUN", "standard input is not a terminal to ask on; to remove without asking: --yes"),
    ("clean RUN --only policies", "--only policies: no such kind; legal: superseded, states"),
    # settings; tests/config/test_config.py has a table of what is wrong with values
    ("config FEW sed=1", "did you mean 'seed'"),
    ("config FEW seed", "KEY=VALUE"),
    ("config FEW =1", "KEY=VALUE"),
    ("config FEW ''", "KEY=VALUE"),
    ("config FEW 'a b=1'", "KEY=VALUE"),
    ("config FEW update=[1", "KEY=VALUE"),
    ("config FEW name={a:", "KEY=VALUE"),
    ("config FEW seed={a:1}", "seed"),
    ("config FEW iterations=1e3", "iterations:"),
    ("config SETTINGS model.context_length=1", "take 2"),
    ("config FEW notify.on=[sometimes]", "notify.on"),
    ("config FEW 'name=ü'", "KEY=VALUE"),
    ("config FEW $'name=a\\nb'", "name"),
    ("config FEW seed.deeper=1", "holds one value and no keys"),
    (f"config FEW seed={'9' * 5000}", "seed"),
    (f"config FEW name={'x' * 5000}", "name"),
    (f"config FEW seed={'[' * 3000}{']' * 3000}", "KEY=VALUE"),
    (f"config FEW {'k' * 2000}=1", "unknown key"),
    ("config FEW reward.components.second.weight=2", "has no kind"),
    ("config FEW reward.components.rm=3", "reward.components.rm"),
    ("config FEW scheduler=slurm scheduler.update.options=5", "scheduler.update.options"),
    ("config FEW 'name=${nothing}'", "nothing"),
    ("config FEW 'name=${oc.env:NOT_THERE_AT_ALL}'", "NOT_THERE_AT_ALL"),
    ("config FEW --config-dir NEW", "no such directory"),
    ("config FEW --config-dir FILE", "no such directory"),
    ("config FEW --config-dir RUN", "its folder iterations has the name of a key that is not a group"),
    ("config FEW --config-dir BROKEN experiment=broken", "broken"),
    ("config FEW --config-dir BROKEN experiment=listed", "listed"),
    ("config FEW --config-dir BROKEN experiment=unknown", "unknown"),
    ("config", "model.policy: must be given"),
    ("run reward=rule", "must be given"),
    # files that settings name
    ("validate SETTINGS model.policy=NEW", "model.policy="),
    ("validate SETTINGS model.policy=FILE", "model.policy="),
    ("validate SETTINGS model.policy=''", "model.policy"),
    ("validate SETTINGS data.prompts=NEW", "data.prompts="),
    ("validate SETTINGS data.prompts=FOLDER", "name a .jsonl"),
    ("validate SETTINGS data.prompts=/dev/null", "name a .jsonl"),
    ("validate SETTINGS data.prompts=FILE", "name a .jsonl"),
    ("validate SETTINGS data.prompt_column=question", "question"),
    ("validate SETTINGS data.columns=[nothing]", "data.columns may name: 'id', 'prompt'"),
    ("validate SETTINGS run_dir=RUN", "already holds a run"),
    ("run SETTINGS run_dir=RUN", "choose run_dir=... or name=..."),
    ("run SETTINGS run_dir=FILE", "FILE"),
    ("run SETTINGS run_dir=FILE/run", "is a file, not a directory"),
    ("validate SETTINGS run_dir=/dev/null", "run_dir=/dev/null: /dev/null is a device, not a directory"),
    ("validate SETTINGS run_dir=/proc/x", "run_dir=/proc/x: /proc takes no new directory"),
    (f"validate SETTINGS reward.components={{}} {FAR}", ".far.url=http://127.0.0.1:9/score: nothing answers"),
    ("validate SETTINGS run_dir=RUN/inner", "lies inside the directory of another run"),
    ("plan SETTINGS run_dir=RUN/inner", "lies inside the directory of another run"),
    ("submit --dry-run SETTINGS scheduler=slurm run_dir=RUN/in", "lies inside the directory of another run"),
    ("run SETTINGS run_dir=RUN/policy/deep/inner", "lies inside the directory of another run"),
    ("run SETTINGS run_dir=/proc/x", "/proc/x"),
    ("validate SETTINGS 'tracking.wandb.tags=[\"\"]'", "tracking.wandb.tags"),
    (f"validate SETTINGS tracking.wandb.tags=[{'t' * 65}]", "at most 64 characters"),
    (f"validate SETTINGS tracking.wandb.group={'g' * 129}", "at most 128 characters"),
    ("run SETTINGS run_dir=FOLDER", "holds other files"),
    # commands' own arguments
    ("submit --dry-run SETTINGS", "scheduler=local has no queue"),
    ("submit SETTINGS", "scheduler=local has no queue"),
    ("submit --dry-run RUN", "scheduler=local has no queue"),
    ("resume RUN --from bake", "bake"),
    ("resume RUN --from rollout@x", "rollout@x"),
    ("resume RUN --from rollout@99", "99"),
    ("resume RUN --from rollout@-1", "-1"),
    ("resume RUN --from ''", "stage"),
    ("logs RUN bake", "bake"),
    ("logs RUN rollout@99", "99"),
    ("logs RUN rollout@x", "x"),
    ("status RUN --cost", "costs come from Slurm's accounting"),
    ("export RUN@99 NEW", "99"),
    ("export RUN@x NEW", "x"),
    ("export RUM NEW", "did you mean"),
    ("export RUN FOLDER", "FOLDER"),
    ("export RUN FILE", "FILE"),
    ("export RUN /proc/x", "/proc/x"),
    ("export RUN NEW --adapter", "adapter"),
    ("fork RUN@99 NEW", "99"),
    ("fork RUN@1 RUN", "RUN"),
    ("fork RUN@1 FILE", "FILE"),
    ("fork RUN@1 RUN/inner iterations=4", "lies inside the directory of another run"),
    ("fork RUN@1 NEW iterations=0", "iterations:"),
    ("fork RUN@1 NEW iterations=1", "iterations"),
    ("fork RUN@1 NEW sed=0", "did you mean 'seed'"),
    ("fork RUN@1 NEW bla", "KEY=VALUE"),
    ("report RUN --out /proc/x.html", "/proc/x.html"),
    ("report RUN --out NEW/a/b.html", "does not exist"),
    ("report RUN --out FOLDER", "FOLDER"),
    ("cancel RUN", "Ctrl-C"),
    ("sync RUN", "W&B"),
    ("devcluster up /proc/x", "choose another folder"),
    ("devcluster up FILE", "is not an empty folder"),
    ("devcluster up FOLDER", "is not an empty folder"),
    ("devcluster up NEW --host update9=twin", "no node 'update9'; the nodes are rollout0"),
    ("devcluster up NEW --host update0", "NODE=NAME"),
    ("devcluster up NEW --clock update0=soon", "NODE=SECONDS"),
    ("devcluster kill rollout0 NEW", "no development cluster"),
    ("devcluster revive rollout0 FILE", "no development cluster"),
    ("devcluster down NEW", "no development cluster"),
    ("devcluster status FILE", "no development cluster"),
    ("devcluster env /dev/null", "no development cluster"),
    ("devcluster status SPOILT", "is not what slurm-ppo devcluster wrote"),
]


@pytest.fixture(scope="module")
def place(complete_run, inputs, tmp_path_factory) -> Callable[[str], list[str]]:
    """Makes the words of a command line of a row."""
    folder = tmp_path_factory.mktemp("mistakes")
    shutil.copytree(complete_run, folder / "run", symlinks=True)
    (folder / "file").write_text("this is no run\n")
    (folder / "folder").mkdir()
    (folder / "folder" / "other").write_text("someone else's")
    (folder / "looped").symlink_to("looped")
    (folder / "rates").mkdir()
    (folder / "rates" / "sweep.json").write_text("{}")
    (folder / "spoilt").mkdir()
    (folder / "spoilt" / "cluster.json").write_text('{"identity": 5}')
    (folder / "broken" / "experiment").mkdir(parents=True)
    (folder / "broken" / "experiment" / "broken.yaml").write_text("a: [1\nb: }")
    (folder / "broken" / "experiment" / "listed.yaml").write_text("# @package _global_\n- 1\n")
    (folder / "broken" / "experiment" / "unknown.yaml").write_text("# @package _global_\nsedd: 1\n")
    names = {
        "RUN": folder / "run",
        "RUM": folder / "rum",
        "SWEEP": folder / "rates",
        "SWEPE": folder / "rate",
        "FILE": folder / "file",
        "FOLDER": folder / "folder",
        "LOOP": folder / "looped",
        "NEW": folder / "new-thing",
        "SPOILT": folder / "spoilt",
        "BROKEN": folder / "broken",
    }

    def words(line: str) -> list[str]:
        found = []
        for word in shlex.split(line.replace("$'", "'")):
            word = word.encode().decode("unicode_escape") if "\\" in word else word
            if word == "FEW":
                found += FEW
                continue
            if word == "SETTINGS":
                found += tiny.overrides(inputs, folder / "made")
                continue
            for name, path in names.items():
                word = word.replace(name, str(path))
            found.append(word)
        return found

    return words


def in_this_process(words, monkeypatch, capsys) -> subprocess.CompletedProcess[str]:
    """A command that only composes: what parses overrides need not learn its grammar again."""
    monkeypatch.setattr(sys, "argv", ["slurm-ppo", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    return subprocess.CompletedProcess(words, ended.value.code, said.out, said.err)


CHANGING = ("run", "submit", "resume", "cancel", "clean", "fork")
TRIED = sample(MISTAKES, 1 / 3)


@pytest.mark.parametrize(("line", "said"), TRIED, ids=[line[:60] for line, _ in TRIED])
def test_a_mistake_is_one_line_with_the_way_out(line, said, place, slurm_ppo, monkeypatch, capsys):
    before = files_of(place)
    if line.startswith(("config FEW", "sweep FEW")):
        done = in_this_process(place(line), monkeypatch, capsys)
    else:
        done = slurm_ppo(*place(line), timeout=60)
    expected = place(said)[0] if said.isupper() and said in ("FILE", "FOLDER", "LOOP", "RUN") else said
    assert "Traceback" not in done.stderr
    assert done.returncode == 2, (done.stdout, done.stderr)
    told = [text for text in done.stderr.splitlines() if text.startswith("error: ")]
    assert told == [text for text in done.stderr.splitlines() if not text.startswith("auto: ")]
    assert all(len(text) <= LONGEST and text.isprintable() for text in told)
    assert any(expected in text for text in told)
    assert files_of(place) == before
    if line.split()[0] in CHANGING:
        assert told[-1].endswith("; nothing was changed")


def files_of(place: Callable[[str], list[str]]) -> dict[str, int]:
    """Files and folders that the commands may reach, and when each was written; without leases."""
    found = Path(place("FOLDER")[0]).parent.rglob("*")
    return {str(path): path.lstat().st_mtime_ns for path in found if "locks" not in path.parts}


def test_nothing_was_made_by_any_of_them(place, slurm_ppo):
    folder = Path(place("FOLDER")[0])
    before = sorted(folder.parent.rglob("*"))
    assert slurm_ppo(*place("run SETTINGS iterations=0")).returncode == 2
    assert sorted(folder.parent.rglob("*")) == before
    assert not (folder.parent / "made").exists()


@pytest.mark.parametrize("line", ['{"time": "never", "event": "failed"}', '{"event": 5}', "[1]", "\x00{"])
def test_a_line_of_the_journal_that_says_nothing_is_passed_over(line, place, slurm_ppo, tmp_path):
    """A bit that flips in events.jsonl: what people see of the run goes on without that line."""
    run = Path(shutil.copytree(place("RUN")[0], tmp_path / "run", symlinks=True))
    with (run / "events.jsonl").open("a") as file:
        file.write(line + "\n")
    for command in ("status", "logs"):
        done = slurm_ppo(command, run)
        assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
