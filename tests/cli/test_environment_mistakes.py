"""What people mistake about environments and ``try``: each ends in one line, and nothing is left of it."""

import contextlib
import importlib.util
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.mistaken_environments import write_modules
from tests.support.tables import sample
from tests.support.waiting import eventually

LONGEST = 300
LIMIT = 60
HAS_GYM = importlib.util.find_spec("reasoning_gym") is not None
DIGITS = "9" * 400

# In words: TASKS a run of the environment mistaken:Sums, but for keys that the row sets, E. and S. the keys
# of environments and of that one, FILE, FOLDER, RUN and NEW a file, a folder, a run and nothing, GGUF and
# QUANT a file of GGUF and a folder with one, BARE a model without tokenizer.
MISTAKES: list[tuple[str, str]] = [
    # keys and values
    ("validate TASKS E.sise=3", "(did you mean 'size'?)"),
    ("validate TASKS S.sorce=a:b", "unknown key 'sorce'"),
    ("validate TASKS E.components={}", "data.environment.components"),
    ("validate TASKS E.components.sums=mistaken:Sums", "data.environment.components.sums"),
    ("validate TASKS data.environment=3", "data.environment"),
    ("validate TASKS S.weight=-1", "S.weight"),
    ("validate TASKS S.weight=0", "S.weight"),
    ("validate TASKS S.weight=.nan", "S.weight"),
    ("validate TASKS S.weight=.inf", "S.weight"),
    ("validate TASKS S.weight=heavy", "S.weight"),
    ("validate TASKS S.weight=1e308", "S.weight"),
    ("validate TASKS S.weight=5e-324", "S.weight"),
    ("validate TASKS E.components.b={source:mistaken:Sums,weight:1e-6}", "of data.environment.size=24 tasks"),
    ("validate TASKS E.size=0", "E.size"),
    ("validate TASKS E.size=-3", "E.size"),
    ("validate TASKS E.size=2.5", "E.size"),
    ("validate TASKS E.size=many", "E.size"),
    (f"validate TASKS E.size={DIGITS}", "E.size"),
    ("try TASKS E.size=1000000000000", "E.size"),
    ("validate TASKS E.size=3", "fewer than data.prompts_per_iteration=8"),
    ("validate TASKS E.heldout_size=0 evaluate.every=1", "E.heldout_size"),
    (f"validate TASKS E.heldout_size={DIGITS} evaluate.every=1", "E.heldout_size"),
    ("validate TASKS E.seed=-1", "E.seed"),
    ("validate TASKS E.seed=9223372036854775808", "E.seed"),
    ("validate TASKS E.heldout_seed=1.5", "E.heldout_seed"),
    ("validate TASKS E.time_limit=0", "E.time_limit"),
    ("validate TASKS E.import_limit=.nan", "E.import_limit"),
    ("validate TASKS S.arguments=[1]", "S.arguments"),
    ("validate TASKS S.arguments.2x=1", "S.arguments"),
    ("validate TASKS S.arguments.smallest=1", "unexpected keyword argument 'smallest'"),
    ("validate TASKS data.prompts=FILE", "data.environment makes the prompts"),
    ("validate TASKS data.limit=3", "is for prompt files"),
    # names
    ("validate TASKS 'E.components.two words.source=mistaken:Sums'", "KEY=VALUE"),
    ("validate TASKS E.components.zähler.source=mistaken:Sums", "KEY=VALUE"),
    ("validate TASKS $'E.components={\"a\\nb\": {source: mistaken:Sums}}'", "data.environment.components"),
    ("validate TASKS E.components={-a:{source:mistaken:Sums}}", "data.environment.components"),
    ("validate TASKS S.source=no-name", "name of an environment"),
    ("validate TASKS S.source=null", "S.source"),
    ("validate TASKS S.source=mistaken", "no installed package has an environment of this name"),
    ("validate TASKS S.source=exact_match", "no installed package has an environment of this name"),
    ("validate TASKS S.source=reasoning_gim", "did you mean 'reasoning_gym'"),
    (
        "validate TASKS reward.components.environment.function=reasoning_gym",
        "no installed package has a rule",
    ),
    ("validate TASKS S.source=FOLDER/mistaken.py:Sums", "S.source"),
    ("validate TASKS S.source=nowhere:Sums", "no module 'nowhere'"),
    ("validate TASKS S.source=mistaken:Missing", "has no 'Missing'"),
    ("validate TASKS S.source=mistaken:number", "is not a function"),
    # imports
    ("validate TASKS S.source=needing:Sums", "no module 'nowhere_at_all'"),
    ("validate TASKS S.source=raising:Sums", "raised RuntimeError: first line second line at "),
    ("validate TASKS S.source=leaving:Sums", "raised SystemExit: 5 at "),
    ("validate TASKS S.source=ending:Sums", "its import ended the process"),
    ("run TASKS S.source=hanging:Sums E.import_limit=1", "its import took longer than 1 s, at "),
    ("validate TASKS S.source=unfinished:Sums", "SyntaxError"),
    ("validate TASKS S.source=latin:Sums", "utf-8"),
    # what a source returns
    *(
        (
            f"validate TASKS S.source=mistaken:returns S.arguments.what={what}",
            f"returned {kind} without a method",
        )
        for what, kind in (
            ("none", "NoneType"),
            ("bytes", "bytes"),
            ("text", "str"),
            ("generator", "generator"),
            ("number", "float"),
        )
    ),
    ("validate TASKS S.source=mistaken:returns S.arguments.what=class", "as it is made, it raised TypeError"),
    ("validate TASKS S.source=mistaken:hanging E.time_limit=1", "no answer within 1 s (time_limit)"),
    ("validate TASKS S.source=mistaken:leaving", "it ended its process (exit code 3)"),
    ("try TASKS S.source=mistaken:Raising", "it raised RuntimeError: first line second"),
    ("validate TASKS S.source=mistaken:mute", "raised Mute: an exception without a text"),
    # tasks
    *(
        (f"{command} TASKS S.source=mistaken:Tasks S.arguments.what='{what}'", said)
        for command, what, said in (
            ("validate", "none", "raised TypeError: 'NoneType' object is not iterable"),
            ("validate", "number", "raised TypeError: 'int' object is not iterable"),
            ("validate", "text", "its task 0 is 'a' instead of a dictionary with a prompt"),
            ("validate", "nothing", "it makes 0 tasks, and 24 are its share"),
            ("validate", "of none", "its task 0 is None instead of a dictionary with a prompt"),
            ("run", "bytes", "its task 0 has as prompt b'\\xff\\xfe' instead of text"),
            ("validate", "numbers", "its task 0 has as prompt 3 instead of text"),
            ("validate", "surrogate", "that JSON text cannot give back as they are"),
            ("try", "no number", "its task 0 has metadata that JSON text cannot give back"),
            ("validate", "same", "most are duplicate_id"),
            ("validate", "empty", "most are"),
            ("validate", "reserved", "its task 0 has the unknown key 'prompt_id'"),
            ("validate", "messages", "most are"),
        )
    ),
    (
        "validate TASKS S.source=mistaken:Tasks S.arguments.what=hanging E.time_limit=1",
        "its task 0 gave no answer",
    ),
    (
        "validate TASKS S.source=mistaken:Tasks S.arguments.what=seedless evaluate.every=1",
        "data.environment.heldout_size=200: 20 of 20 rows (100%) cannot be used, most are duplicate_id",
    ),
    # scores
    *(
        (f"validate TASKS S.source=mistaken:Scores S.arguments.what='{what}'", said)
        for what, said in (
            ("no number", "returned nan instead of a finite number"),
            ("text", "returned '1.0' instead of a finite number"),
            ("bytes", "returned b'1' instead of a finite number"),
            ("huge", "returned 1e+300 instead of a number up to"),
            ("list", "returned [1.0, 2.0] instead of a finite number"),
            ("generator", "returned <generator object"),
            ("raising", "raised TypeError: 'int' object is not subscriptable"),
            ("leaving", "ended its process (exit code 3)"),
        )
    ),
    (
        "validate TASKS S.source=mistaken:Scores S.arguments.what=hanging "
        "reward.components.environment.time_limit=1",
        "gave no answer within 1 s (time_limit)",
    ),
    # other settings that an environment needs
    (
        "validate TASKS rollout.multi_turn.scheduler=environment",
        "no environment of the run has a method step",
    ),
    ("validate TASKS S.source=mistaken:Conversing", "set rollout.multi_turn.scheduler=environment"),
    ("validate TASKS S.source=mistaken:Comparing", "rows_per_call=prompt"),
    # interpreters and packages
    ("validate TASKS S.python=NEW", "no such file or directory"),
    ("validate TASKS S.python=FILE", "cannot be run: Permission denied"),
    ("validate TASKS S.python=FOLDER", "cannot be run: Permission denied"),
    ("validate TASKS S.python=''", "S.python"),
    ("validate TASKS S.python=/bin/true", "ended its process (exit code 0)"),
    ("validate TASKS S.python=/usr/bin/yes", "was answered by something else than Python"),
    (
        "validate TASKS S.source=verifiers",
        "verifiers needs the package verifiers in an environment of its own",
    ),
    # try
    ("try RUN", "holds a run, and settings are wanted here"),
    (f"try TASKS --prompts {DIGITS}", "ask for at most that"),
    ("try TASKS iterations=0", "iterations"),
    ("try TASKS run_dir=RUN/inner", "lies inside the directory of another run"),
    ("try TASKS run_dir=FILE/inner", "is a file, not a directory"),
    ("try TASKS run_dir=''", "run_dir"),
    ("try TASKS $'run_dir=NEW\\nmore'", "run_dir"),
    (f"try TASKS run_dir={'x' * 250}", "choose a shorter name"),
    ("try TASKS model.policy=NEW", "no such directory"),
    ("try TASKS model.policy=GGUF", "python -m stages.models.gguf"),
    ("try TASKS model.policy=QUANT/", "its weights are in GGUF"),
    ("try TASKS model.policy=BARE model.tokenizer=null", "has no tokenizer"),
    ("try TASKS scheduler=allocation", "not inside an allocation"),
    ("try TASKS scheduler=slurmm", "did you mean"),
    ("try TASKS --time-candidates", "has settings of its own"),
]
GYM_MISTAKES: list[tuple[str, str]] = [
    (f"validate TASKS S.source=reasoning_gym {words}", said)
    for words, said in (
        ("", "missing 1 required positional argument: 'dataset'"),
        ("S.arguments.dataset=basic_aritmetic", "no data set 'basic_aritmetic'"),
        ("S.arguments.dataset=[basic_arithmetic]", "no data set"),
        ("S.arguments.dataset=composite", "give each data set of composite a component of its own"),
        ("S.arguments={dataset:basic_arithmetic,max_term:3}", "unexpected keyword argument 'max_term'"),
        ("S.arguments={dataset:basic_arithmetic,max_terms:three}", "refuses its settings"),
        ("S.arguments={dataset:basic_arithmetic,min_terms:5,max_terms:3}", "refuses its settings"),
        ("S.arguments={dataset:basic_arithmetic,system:Add,chat:false}", "system is a chat message"),
        ("S.arguments={dataset:basic_arithmetic,pattern:\"'('\"}", "missing ), unterminated subpattern"),
        ("S.arguments={dataset:basic_arithmetic,chat:false,pattern:answer}", "has no group"),
    )
]
CHANGING = ("run", "submit")
IN_BETWEEN = ("auto: ", "waiting for the import of ")
TOLD = {
    "validate": IN_BETWEEN,
    "try": IN_BETWEEN,
    "run": (*IN_BETWEEN, "configuration: ", "policy: ", "number formats: ", "environment ", "disk: "),
}
"""Beginnings of lines that a command says besides on standard error."""
TRIED = sample(MISTAKES + GYM_MISTAKES * HAS_GYM, 1 / 12)


@pytest.fixture(scope="module")
def folder(complete_run, inputs, tmp_path_factory) -> Path:
    """A user's folder with a run, models that are none, and modules."""
    made = write_modules(tmp_path_factory.mktemp("mistakes") / "a project")
    shutil.copytree(complete_run, made / "run", symlinks=True)
    (made / "file").write_text("this is no run\n")
    (made / "folder").mkdir()
    (made / "quant").mkdir()
    for gguf in (made / "weights.gguf", made / "quant" / "weights.gguf"):
        gguf.write_bytes(b"GGUF")
    bare = Path(shutil.copytree(inputs / "policy", made / "bare"))
    for path in bare.glob("tokenizer*"):
        path.unlink()
    return made


@pytest.fixture(scope="module")
def words(folder, inputs) -> Callable[[str], list[str]]:
    """Makes the words of a command line of a row."""
    names = {"RUN": "run", "FILE": "file", "FOLDER": "folder", "NEW": "nothing", "GGUF": "weights.gguf"}
    names |= {"QUANT": "quant", "BARE": "bare"}
    usual = [
        word
        for word in tiny.overrides(inputs, folder / "made", "reward=environment")
        if not word.startswith(("data.prompts=", "data.id_column="))
    ] + ["data.environment.size=24", "data.environment.components.sums.source=mistaken:Sums"]

    def make(line: str) -> list[str]:
        typed = shlex.split(line.replace("$'", "'"))
        given = [spelled(word).replace("\\n", "\n") for word in typed]
        for name, path in names.items():
            given = [word.replace(name, str(folder / path)) for word in given]
        keys = {word.partition("=")[0] for word in given if "=" in word}
        kept = [word for word in usual if word.partition("=")[0] not in keys]
        return [one for word in given for one in (kept if word == "TASKS" else [word])]

    return make


def spelled(text: str) -> str:
    """Write the keys of environments out."""
    for short, key in (("E.", "data.environment."), ("S.", "data.environment.components.sums.")):
        text = key + text.removeprefix(short) if text.startswith(short) else text
    return text


def files_of(folder: Path) -> dict[str, int]:
    """Files and folders, and when each was written; without what Python and a lease keep for themselves."""
    own = {"__pycache__", "locks"}
    found = [path for path in folder.rglob("*") if own.isdisjoint(path.parts)]
    return {str(path): path.lstat().st_mtime_ns for path in found if path != folder / "run"}


def processes_in(folder: Path) -> list[str]:
    """Command lines of processes that were started in the folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
    return found


@pytest.mark.parametrize(("line", "said"), TRIED, ids=[ascii(line[:70])[1:-1] for line, _ in TRIED])
def test_a_mistake_about_environments_is_one_line_and_leaves_nothing(line, said, folder, words, slurm_ppo):
    before = files_of(folder)
    done = slurm_ppo(*words(line), cwd=folder, timeout=LIMIT)
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == 2, (done.stdout, done.stderr)
    (told,) = [text for text in done.stderr.splitlines() if not text.startswith(TOLD[line.split()[0]])]
    assert told.startswith("error: ")
    assert told.isprintable()
    assert len(told) <= LONGEST
    assert spelled(said) in told
    assert told.endswith("; nothing was changed") is line.startswith(CHANGING), told
    assert files_of(folder) == before
    assert eventually(lambda: not processes_in(folder)), processes_in(folder)
