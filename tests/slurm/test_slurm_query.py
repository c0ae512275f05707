"""What Slurm's commands print, and what becomes of it: recorded outputs of real clusters, and properties."""

import os
import re
import signal as signals
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm import commands, ended, limits, query
from slurm.commands import SlurmError, SlurmMissing, SlurmTimeout, clean_environment, run_command
from slurm.ended import NoAccounting, parse_accounting
from slurm.limits import (
    format_duration,
    parse_duration,
    parse_gres,
    parse_job_limits,
    parse_limits,
    parse_memory,
    parse_partitions,
)
from slurm.query import Element, expand, parse_queue
from slurm.reasons import is_at_limit, lacks_room, reason_in_words
from slurm.states import Phase, SlurmState, UnknownState, exit_in_words, parse_state, phase_of
from tests.support import ROOT

DATA = ROOT / "tests/golden/slurm"
VERSIONS = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())


def recorded(version: str, name: str) -> str:
    return (DATA / version / name).read_text()


def recorded_queue(version: str, name: str) -> str:
    """With the fields that squeue was not yet asked for then, as where nothing is known of them."""
    text = recorded(version, name)
    return re.sub(
        r"^(\d+\|[^|\n]*\|[A-Z_,+]+\|(?:[^|\n]*\|){6})", r"\1N/A|0:00|N/A|N/A|", text, flags=re.MULTILINE
    )


def of(elements: list[Element], name: str) -> list[Element]:
    return sorted((element for element in elements if element.name == name), key=lambda one: one.index)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put programs of our own first on the PATH: name -> lines of shell."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(commands, "_BACK_OFF_SECONDS", 0.0)
    monkeypatch.setattr(commands, "calls", Counter())

    def put(**lines: str) -> None:
        for name, text in lines.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)

    return put


# --- commands ---


def test_environment_is_cleaned():
    """Inside a job, or with a user's formats, the same commands would print other things."""
    dirty = {
        **dict.fromkeys(("SLURM_JOB_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SACCT_FORMAT"), "x"),
        **dict.fromkeys(("SLURM_MEM_PER_NODE", "SINFO_SORT", "SCANCEL_USER", "SLURM_TIME_FORMAT"), "x"),
        **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "RENDEZVOUS_FILE"), "x"),
        commands.BEFORE: "x",
        **dict.fromkeys(("SLURM_CLUSTERS", "SALLOC_QOS", "SRUN_X", "SCONTROL_ALL"), "x"),
        **dict.fromkeys(("SLURM_CONF", "SLURM_CONF_SERVER", "HOME", "PATH", "SLURMPPO"), "kept"),
    }
    cleaned = clean_environment(dirty)
    assert {name for name, value in cleaned.items() if value == "kept"} == {
        *("SLURM_CONF", "SLURM_CONF_SERVER", "HOME", "PATH", "SLURMPPO")
    }
    assert "x" not in cleaned.values()
    assert cleaned["SLURM_BITSTR_LEN"] == "0"
    assert cleaned["SLURM_TIME_FORMAT"] == "%s"


SUBMITS = """
import sys
from slurm.commands import run_command
print(run_command([sys.argv[1]]), end="")
"""


@pytest.mark.parametrize("is_packed", [True, False], ids=["remembered", "without gzip"])
def test_what_is_set_up_for_a_job_is_not_passed_on_to_those_that_it_submits(tmp_path, is_packed):
    """A worker's pass submits jobs of other stages, and sbatch passes its whole environment on. sbatch itself
    is found where a module that was loaded for the job has it."""
    for name in ("sbatch", "squeue"):
        (tmp_path / name).write_text(
            '#!/bin/sh\necho "$MINE|$CHANGED|$SLURM_CONF|$OF_TASKS|$SLURM_PPO_BEFORE"\n'
        )
        (tmp_path / name).chmod(0o755)
    hide = "" if is_packed else "gzip() { return 127; }; "
    setup = f"export MINE=1 CHANGED=after OF_TASKS=2 SLURM_CONF=now PATH={tmp_path}:$PATH"
    runs = f'for each in sbatch squeue; do {sys.executable} -c "$0" $each; done'
    began = os.environ | {"CHANGED": "two\nlines = 'before'", "SLURM_CONF": "then", "PYTHONPATH": str(ROOT)}
    script = f"{hide}{commands.REMEMBER_BEFORE}; {setup}; {runs}"
    said = subprocess.run(["bash", "-c", script, SUBMITS], env=began, text=True, capture_output=True)
    assert said.returncode == 0, said.stderr
    own = "1|after|now|2|\n"
    assert said.stdout == ("|two\nlines = 'before'|now||\n" if is_packed else own) + own


def test_output_input_and_count(programs):
    programs(squeue='cat; echo "$SLURM_TIME_FORMAT"; printf "\\377"')
    assert run_command(["squeue", "-h"], input="in") == "in%s\n\N{REPLACEMENT CHARACTER}"
    assert commands.calls == {"squeue": 1}


def test_missing_program(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing, match=r"^sbatch is not on this machine's PATH; run on a login node"):
        run_command(["sbatch", "x"])


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
        "sbatch: error: Batch job submission failed: Unable to contact slurm controller (receive failure)",
        "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
        "squeue: error: Slurm backup controller in standby mode",
        "sbatch: error: Batch job submission failed: Slurm temporarily unable to accept job",
        "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
    ],
)
def test_transient_errors_are_told_apart(programs, words):
    programs(sbatch=f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmTimeout) as caught:
        run_command(["sbatch", "--parsable"], retries=2)
    assert caught.value.returncode == 1
    assert caught.value.stderr == f"{words}\n"
    assert "\n" not in str(caught.value)
    assert commands.calls["sbatch"] == 3


@pytest.mark.parametrize(
    "words",
    [
        "sbatch: error: Batch job submission failed: Invalid job array specification",
        "sbatch: error: invalid partition specified: nope",
        "sbatch: error: Batch job submission failed: Requested time limit is invalid",
        "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy",
    ],
)
def test_refusals_are_final(programs, words):
    programs(sbatch=f"echo '{words}' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"^sbatch failed: ") as caught:
        run_command(["sbatch", "--parsable"], retries=2)
    assert not isinstance(caught.value, SlurmTimeout)
    assert commands.calls["sbatch"] == 1


def test_a_retry_may_help(programs, tmp_path):
    programs(
        squeue=f'[ -e {tmp_path}/up ] && echo fine && exit; touch {tmp_path}/up; echo "timed out" >&2; exit 1'
    )
    assert run_command(["squeue"], retries=1) == "fine\n"


def test_time_limit_of_our_own(programs):
    programs(squeue="echo 'cannot stat file /etc/slurm/slurm.conf' >&2; exec sleep 60")
    with pytest.raises(SlurmTimeout, match=r"no answer in 0\.3 s; cannot stat file") as caught:
        run_command(["squeue"], timeout=0.3)
    assert caught.value.returncode is None


def test_imports_are_light():
    """A pass of the driver starts many short processes; these modules must not slow them down."""
    code = (
        "import sys, slurm.query, slurm.limits, slurm.ended;"
        "assert not {'torch', 'numpy', 'pipeline', 'stages', 'submitit'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# --- states ---


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("CANCELLED by 1000", SlurmState.CANCELLED),
        ("CANCELLED+", SlurmState.CANCELLED),
        ("OUT_OF_ME+", SlurmState.OUT_OF_MEMORY),
        ("running", SlurmState.RUNNING),
        ("COMPLETED", SlurmState.COMPLETED),
        ("RUNNING,COMPLETING", SlurmState.RUNNING),
        ('["COMPLETING", "FAILED"]', SlurmState.FAILED),
        ("COMPLETING", SlurmState.COMPLETING),
        (" TIMEOUT ", SlurmState.TIMEOUT),
    ],
)
def test_states_as_they_are_shown(text, state):
    assert parse_state(text) is state


@pytest.mark.parametrize("text", ["", "?", "FROZEN", "RE+", "COMPLE+", "RUNNINGS", "123"])
def test_unknown_states_are_not_guessed(text):
    with pytest.raises(UnknownState):
        parse_state(text)


@given(st.sampled_from(SlurmState))
def test_every_state_reads_back_and_has_a_phase(state):
    assert parse_state(state) is state
    assert phase_of(state) in Phase


@pytest.mark.parametrize(
    ("phase", "states"),
    [
        (Phase.PENDING, "PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD"),
        (Phase.RUNNING, "RUNNING COMPLETING CONFIGURING SUSPENDED RESIZING SIGNALING STAGE_OUT STOPPED"),
        (
            Phase.ENDED,
            "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT",
        ),
    ],
)
def test_phases(phase, states):
    assert {phase_of(SlurmState[name]) for name in states.split()} == {phase}


def test_every_reason_that_slurm_has_is_put_in_words():
    reasons = (DATA / "reasons.txt").read_text().split()
    assert len(reasons) > 150
    assert [reason for reason in reasons if reason_in_words(reason) == reason] == []


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "other jobs have a higher priority"),
        ("(Resources)", "waiting for free resources"),
        ("ReqNodeNotAvail, UnavailableNodes:q0", "nodes that it needs are down, drained or reserved"),
        ("launch failed requeued held", "Slurm could not start it on its node and holds it"),
        ("launch_failed_requeued_held", "Slurm could not start it on its node and holds it"),
        ("job requeued in held state", "requeued and held"),
        ("QOSMaxGRESPerUser", "the QOS's limit of GPUs or other devices is reached (QOSMaxGRESPerUser)"),
        (
            "AssocGrpCPUMinutesLimit",
            "the account's limit of CPUs times minutes, shared by all its users, is reached "
            "(AssocGrpCPUMinutesLimit)",
        ),
        ("QOSMinGRES", "it asks for less than the QOS's minimum of GPUs or other devices"),
        ("MaxJobsPerAccount", "the QOS's limit of jobs is reached (MaxJobsPerAccount)"),
        ("a site's own words", "a site's own words"),
        ("", ""),
    ],
)
def test_reasons_in_words(reason, words):
    assert reason_in_words(reason) == words


@pytest.mark.parametrize(
    ("state", "code", "signal", "words"),
    [
        (SlurmState.TIMEOUT, 0, 15, "stopped at its time limit (TIMEOUT)"),
        (SlurmState.NODE_FAIL, 0, 0, "its node failed (NODE_FAIL)"),
        (SlurmState.FAILED, 1, 0, "exit code 1"),
        (SlurmState.FAILED, 0, signals.SIGKILL, "killed by signal 9 (SIGKILL), often out of memory"),
        (SlurmState.FAILED, 139, 0, "killed by signal 11 (SIGSEGV)"),
        (SlurmState.FAILED, 0, 125, "killed by signal 125"),
        (SlurmState.COMPLETED, 0, 0, "completed"),
    ],
)
def test_ends_in_words(state, code, signal, words):
    assert exit_in_words(state, code, signal) == words


# --- array expressions ---


@pytest.mark.parametrize(
    ("text", "indices"),
    [
        ("N/A", [0]),
        ("", [0]),
        ("7", [7]),
        ("[3-7,9%2]", [3, 4, 5, 6, 7, 9]),
        ("1,3,10-20:5%3", [1, 3, 10, 15, 20]),
    ],
)
def test_array_expressions(text, indices):
    assert expand(text) == indices


@pytest.mark.parametrize("text", ["1,3,...", "[1-", "a", "1--3", "1,,2", "1-5:0"])
def test_cut_array_expressions_are_refused(text):
    with pytest.raises(ValueError, match="not a whole array expression"):
        expand(text)


ranges = st.tuples(st.integers(0, 4000), st.integers(0, 50), st.integers(1, 9))


@given(st.lists(ranges, min_size=1), st.none() | st.integers(1, 99), st.booleans())
def test_array_expressions_expand_to_what_they_were_made_of(parts, throttle, bracketed):
    words = [str(first) if not more else f"{first}-{first + more}:{step}" for first, more, step in parts]
    text = ",".join(words) + (f"%{throttle}" if throttle else "")
    expected = [index for first, more, step in parts for index in range(first, first + more + 1, step)]
    assert expand(f"[{text}]" if bracketed else text) == expected


# --- the queue ---


@pytest.mark.parametrize("version", VERSIONS)
def test_queue_soon_after_submission(version):
    elements = parse_queue(recorded_queue(version, "squeue-early.txt"))
    keys = [(element.array_id, element.index) for element in elements]
    assert len(keys) == len(set(keys))
    waiting = [one for one in of(elements, "sppo-gpu") if one.state == SlurmState.PENDING]
    assert [one.index for one in waiting] == list(range(1, 10))
    assert {one.reason for one in waiting} == {"JobArrayTaskLimit"}
    assert {one.time_limit for one in waiting} == {600.0}
    assert [one.index for one in of(elements, "sppo-held")] == [1, 3, *range(5, 61, 7)]
    assert [one.index for one in of(elements, "sppo-dep")] == [3, 9, *range(11, 41), *range(50, 91, 2), 1000]
    running = of(elements, "sppo-timeout")
    assert [(one.index, one.state, one.time_limit) for one in running] == [(i, "RUNNING", 60) for i in (5, 7)]
    assert all(one.started and one.ended is None and one.exit_code is None for one in running)
    assert [(one.node, one.partition) for one in running] == [("q1", "cpu")] * 2
    ended = of(elements, "sppo-ok")
    assert [(one.index, one.state, one.exit_code, one.signal) for one in ended] == [
        *[(0, "COMPLETED", 0, 0), (1, "COMPLETED", 0, 0), (2, "FAILED", 3, 0), (3, "COMPLETED", 0, 0)]
    ]
    assert all(one.submitted <= one.started <= one.ended for one in ended)


@pytest.mark.parametrize("version", VERSIONS)
def test_single_jobs_in_the_queue(version):
    elements = parse_queue(recorded_queue(version, "squeue-early.txt"), lambda name: name.startswith("sppo-"))
    by_name = {element.name: element for element in elements}
    assert "other-job" not in by_name
    odd, broken = by_name["sppo-odd|na me, x"], by_name["sppo-new\nline"]
    assert (odd.state, odd.exit_code, odd.signal, odd.index) == (SlurmState.FAILED, 0, 9, 0)
    assert broken.state == SlurmState.COMPLETED
    assert by_name["sppo-seg"].exit_code == 139  # a shell's word for a child that was killed
    assert by_name["sppo-requeue"].restarts == 1
    assert by_name["sppo-suspended"].state == SlurmState.SUSPENDED
    begin = by_name["sppo-begin"]
    assert (begin.state, begin.started, begin.ended) == (SlurmState.PENDING, None, None)
    reasons = {name: by_name[f"sppo-{name}"].reason for name in ("never", "long", "down", "rqhold")}
    assert reasons == {
        "never": "DependencyNeverSatisfied",
        "long": "PartitionTimeLimit",
        "down": "PartitionDown",
        "rqhold": "job requeued in held state",
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_queue_after_failures(version):
    elements = parse_queue(recorded_queue(version, "squeue.txt"))
    assert {one.state for one in of(elements, "sppo-nodefail")} == {SlurmState.NODE_FAIL}
    assert {one.state for one in of(elements, "sppo-timeout")} == {SlurmState.TIMEOUT}
    assert {one.state for one in of(elements, "sppo-cancel")} == {SlurmState.CANCELLED}
    [requeued] = of(elements, "sppo-noderq")
    assert requeued.restarts == 1


def test_what_jobs_hold_and_those_that_wait_ask_for():
    elements = parse_queue(recorded("22.05", "squeue-held.txt"))

    def shown(name: str) -> set:
        return {(e.state, e.cpus, e.gpus, e.memory_mb, e.num_nodes, e.elapsed) for e in of(elements, name)}

    running, pending = SlurmState.RUNNING, SlurmState.PENDING
    assert shown("sppo-gpu") == {(running, 2, 1, 150, 1, 4.0), (pending, 2, 1, 150, 1, 0.0)}, (
        "each element's own"
    )
    assert shown("sppo-typed") == {(running, 3, 2, 4500, 1, 4.0)}
    assert shown("sppo-two") == {(pending, 2, 4, 2048, 2, 0.0)}
    assert shown("sppo-cpu") == {(running, 1, 0, 100, 1, 4.0)}
    assert shown("sppo-short") == {(SlurmState.COMPLETED, 1, 0, 100, 1, 1.0)}
    (begins,) = of(elements, "sppo-begin")
    assert begins.eligible - begins.submitted == 1000


@pytest.mark.parametrize(
    ("resources", "per_node", "gpus", "memory"),
    [
        ("cpu=4,mem=8G,node=2,billing=4", "gres:gpu:2", 4, 8192),
        ("cpu=4,mem=1.50G,node=1,billing=4", "gres/gpu:h100:1,gres/shard:3", 1, 1536),
        ("cpu=4,node=1,gres/gpu:a100=2,gres/gpu:l40=1", "gres:gpu", 3, None),
        ("cpu=4,mem=many,node=3", "gres:gpu", 3, None),
        ("cpu=4,mem=4G,node=2", "gpu:2", 4, 4096),  # up to Slurm 20.11
        ("cpu=4,node=1", "gpu:a100:3,craynetwork:1", 3, None),
        ("N/A", "N/A", None, None),
    ],
)
def test_gpus_also_where_a_cluster_does_not_count_them(resources, per_node, gpus, memory):
    text = f"1|N/A|RUNNING|0|0|1|2|3|10:00|9|0:01|{resources}|{per_node}|cpu|q0|None|x|\n"
    [element] = parse_queue(text)
    assert (element.gpus, element.memory_mb) == (gpus, memory)


def test_completing_jobs_have_not_ended():
    """Recorded on 22.05.8: what became of the job is not shown before it is cleaned up."""
    times = "1795269500|1795269503|1795270103|10:00|N/A|0:09"
    text = f"10|N/A|COMPLETING|0|1|{times}|N/A|N/A|low|q0|None|sppo-requeue|\n"
    [element] = parse_queue(text)
    assert phase_of(element.state) == Phase.RUNNING
    assert (element.ended, element.exit_code, element.started) == (None, None, 1795269503.0)


@pytest.mark.parametrize(
    "text",
    [
        "slurm_load_jobs: something else\n",
        "1|N/A|RUNNING|0|0\n",
        "1|N/A|RUNNING|0|0|1|2|3|10:00|N/A|0:00|N/A|N/A|cpu|q0|name|\n",
    ],
)
def test_a_queue_in_another_format_is_an_error(text):
    """Never fewer jobs than there are: they would be submitted again."""
    with pytest.raises(SlurmError, match="its output is not understood"):
        parse_queue(text)


def test_unknown_states_only_matter_for_our_jobs():
    text = "1|N/A|FROZEN|0|0|1|2|3|10:00|N/A|0:00|N/A|N/A|cpu|q0|None|x|\n"
    assert parse_queue(text, lambda name: name == "y") == []
    with pytest.raises(UnknownState):
        parse_queue(text)


def test_an_empty_queue():
    assert parse_queue("") == []


names = st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(st.lists(names.filter(lambda name: "\n" not in name or "|" not in name), max_size=5))
def test_any_name_comes_back(some):
    rows = [
        f"{i}|N/A|RUNNING|0|0|5|6|7|1:00|N/A|0:00|N/A|N/A|cpu|q0|None|{name}|\n"
        for i, name in enumerate(some)
    ]
    elements = parse_queue("".join(rows))
    assert [(one.array_id, one.name) for one in elements] == [(str(i), name) for i, name in enumerate(some)]


def test_one_call_for_the_whole_queue(programs):
    programs(squeue=f"cat {DATA}/22.05/squeue-held.txt")
    assert len(query.read_queue(lambda name: name.startswith("sppo-"))) == 15
    assert commands.calls == {"squeue": 1}


# --- accounting ---


@pytest.mark.parametrize("version", VERSIONS)
def test_accounting(version):
    found = parse_accounting(recorded(version, "sacct.txt"))
    by_name: dict[str, list[Element]] = {}
    for element in found.values():
        by_name.setdefault(element.name, []).append(element)
    assert all(element == found[element.array_id, element.index] for element in found.values())
    assert [(one.state, one.exit_code) for one in of(by_name["sppo-ok"], "sppo-ok")] == [
        *[("COMPLETED", 0), ("COMPLETED", 0), ("FAILED", 3), ("COMPLETED", 0)]
    ]
    assert {one.state for one in by_name["sppo-timeout"]} == {SlurmState.TIMEOUT}
    assert {one.state for one in by_name["sppo-cancel"]} == {SlurmState.CANCELLED}
    assert {one.state for one in by_name["sppo-nodefail"]} == {SlurmState.NODE_FAIL}
    assert {one.exit_code for one in by_name["sppo-fails"]} == {4}
    assert {one.signal for one in by_name["sppo-odd|na me, x"]} == {9}
    assert {one.state for one in by_name["sppo-new\nline"]} == {SlurmState.COMPLETED}
    [requeued] = by_name["sppo-noderq"]  # NODE_FAIL, then COMPLETED
    assert (requeued.state, requeued.restarts) == (SlurmState.COMPLETED, 1)
    assert requeued.submitted < requeued.started < requeued.ended
    assert len(by_name["sppo-dep"]) == 1 + 2 + 30 + 21
    waiting = by_name["sppo-never"][0]
    assert waiting.state == SlurmState.PENDING
    assert waiting.reason in ("DependencyNeverSatisfied", "")  # 24.11 does not tell accounting


HAND_WRITTEN = """\
7|OUT_OF_MEMORY|0:125|100|110|130|60|gpu|q0|None|one
7.batch|OUT_OF_MEMORY|0:125|110|110|130|||q0||batch
7.extern|COMPLETED|0:0|110|110|130|||q0||extern
8_3|FAILED|1:0|100|110|130|60|gpu|q0|None|two
8_3.batch|FAILED|1:0|110|110|130|||q0||batch
8_3.0|OUT_OF_MEMORY|0:125|110|110|130|||q0||python
9|OUT_OF_MEMORY|0:0|100|110|130|UNLIMITED|gpu|q0|None|three
9.extern|COMPLETED|0:0|110|110|130|||q0||extern
9.batch|OUT_OF_MEMORY|0:9|110|110|130|||q0||batch
10_1|NODE_FAIL|0:0|100|110|130|60|gpu|q0|None|four
10_1.batch|CANCELLED||110|110|130|||q0||batch
10_1|PENDING|0:0|130|Unknown|Unknown|60|gpu|None assigned|BeginTime|four
11|REQUEUED|0:0|100|110|130|60|gpu|q0|None|five
12+0|CANCELLED by 1000|0:0|100|None|130|Partition_Limit|gpu|None assigned|None|six
"""


def test_accounting_where_memory_ran_out():
    found = parse_accounting(HAND_WRITTEN)
    assert [(found[key].state, found[key].signal) for key in (("7", 0), ("9", 0))] == [
        *[(SlurmState.OUT_OF_MEMORY, 125), (SlurmState.OUT_OF_MEMORY, 9)]
    ]
    assert found["8", 3].state == SlurmState.OUT_OF_MEMORY  # its step's, which the job's record hides
    assert found["8", 3].exit_code == 1
    assert found["9", 0].time_limit is None
    assert found["7", 0].time_limit == 3600


def test_requeued_elements_have_not_ended(programs, tmp_path):
    (tmp_path / "out").write_text(HAND_WRITTEN)
    programs(sacct=f"cat {tmp_path}/out")
    found = ended.read_ended(["7", "8", "9", "10", "11", "12"])
    assert sorted(found) == [("12", 0), ("7", 0), ("8", 3), ("9", 0)]
    assert (found["12", 0].started, found["12", 0].time_limit, found["12", 0].node) == (None, None, "")
    assert parse_accounting(HAND_WRITTEN)["10", 1].restarts == 1


@pytest.mark.parametrize(
    "words",
    [
        "Slurm accounting storage is disabled",
        "sacct: error: Problem talking to the database: Connection refused",
        "sacct: error: _open_persist_conn: failed to open persistent connection to host:localhost:6819",
        "sacct: error: Sending PersistInit msg: Connection timed out",
    ],
)
def test_no_accounting_is_not_an_empty_answer(programs, words):
    programs(sacct=f'echo "{words}" >&2; exit 1')
    with pytest.raises(NoAccounting, match=r"^sacct failed: "):
        ended.read_ended(["1"])
    with pytest.raises(NoAccounting):
        ended.read_runs(["1"])


def test_no_accounting_without_sacct(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoAccounting, match="not on this machine's PATH"):
        ended.read_ended(["1"])


def test_other_errors_of_accounting_stay_errors(programs):
    programs(sacct="echo 'sacct: error: Invalid field requested: \"Nope\"' >&2; exit 1")
    with pytest.raises(SlurmError, match="Invalid field"):
        ended.read_ended(["1"])


def test_calls_do_not_grow_with_jobs(programs):
    programs(sacct="")
    assert ended.read_ended([]) == {}
    assert commands.calls == {}
    ended.read_ended([str(number) for number in range(1000)])
    assert commands.calls == {"sacct": 1}
    ended.read_ended([str(number) for number in range(2500)])
    assert commands.calls == {"sacct": 4}


QUEUED = "{id}|{index}|RUNNING|0|0|5|6|7|1:00|N/A|0:00|N/A|N/A|cpu|q0|None|{name}|"


def test_find_by_name(programs):
    """The queue first; accounting for the rest, only; the first of several."""
    lines = [QUEUED.format(id=12, index="3-4", name="a"), QUEUED.format(id=9, index="N/A", name="a")]
    programs(
        squeue="\n".join(f"echo '{line}'" for line in lines),
        sacct='echo "$@" | grep -q -- "--name=b,c " && echo "5_[0-3]|PENDING|0:0|5|U|U|60|gpu|||b"',
    )
    assert ended.find_by_name(["a", "b", "c"]) == {"a": "9", "b": "5"}
    assert commands.calls == {"squeue": 1, "sacct": 1}


def test_find_by_name_without_accounting(programs):
    programs(squeue="", sacct="echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert ended.find_by_name(["a"]) == {}


# --- usage ---


def test_usage_of_recorded_jobs():
    runs = ended.parse_runs(recorded("22.05", "sacct-usage.txt"))
    first, again = (run for run in runs if run.name == "sppo-noderq")
    assert (first.state, again.state) == (SlurmState.NODE_FAIL, SlurmState.COMPLETED)
    assert (first.run_id, again.run_id) == (f"{first.job_id}r0", f"{first.job_id}r1")
    assert first.elapsed + again.elapsed > 60
    gpu = next(run for run in runs if run.name == "sppo-gpu" and run.started)
    assert (gpu.gpus, gpu.cpus, gpu.node, gpu.partition) == (2, 1, "q0", "gpu")


def test_gpus_of_several_types():
    line = "1|COMPLETED|5|5|6|10|billing=1,cpu=4,gres/gpu:a100=2,gres/gpu:l40=1,mem=5G,node=1|q0|gpu|x\n"
    both = line.replace("gres/gpu:a100", "gres/gpu=3,gres/gpu:a100")
    assert [one.gpus for one in ended.parse_runs(line + both)] == [3, 3]


# --- limits ---


@pytest.mark.parametrize("version", VERSIONS)
def test_limits(version):
    major, minor = map(int, version.split("."))
    found = parse_limits(recorded(version, "config.txt"), 5)
    assert found == limits.ClusterLimits((major, minor), 1001, 10000, 300.0, 5, f"q{major}")


def test_limits_in_another_format():
    with pytest.raises(SlurmError, match="MaxArraySize"):
        parse_limits("SLURM_VERSION           = 22.05.8\n")


@pytest.mark.parametrize("version", VERSIONS)
def test_partitions(version):
    found = parse_partitions(recorded(version, "partitions.txt"), recorded(version, "sinfo.txt"))
    assert sorted(found) == ["cpu", "down", "gpu", "low"]
    assert [one.name for one in found.values() if one.default] == ["gpu"]
    assert [found[name].max_time for name in ("gpu", "cpu", "low")] == [3600.0, None, 172800.0]
    assert [found[name].nodes for name in ("gpu", "low")] == [1, 2]
    assert [found[name].state for name in ("gpu", "down")] == ["UP", "DOWN"]
    assert [found[name].allowed_qos for name in ("gpu", "down")] == [None, {"normal"}]
    assert [found[name].most("gpu:a100") for name in ("gpu", "cpu", "low")] == [2, 0, 2]
    assert {(kind.cpus, kind.memory, kind.count) for kind in found["low"].kinds} == {(16, 16000, 1)}


@pytest.mark.parametrize("version", VERSIONS)
def test_submit_limit_of_a_user(version):
    assert parse_job_limits(recorded(version, "assoc.txt"), recorded(version, "qos.txt")) == (200, None)


@pytest.mark.parametrize(
    ("associations", "qos", "limit"),
    [
        ("", "", (None, None)),
        ("||normal|normal||\n", "normal||||\n", (None, None)),
        ("50||normal|||\n||normal||7|\n", "normal||||\nother|3||2|\n", (50, 7)),
        ("||a,b|a||90\n", "a|30||8|80\nb|20|10|5|\n", (30, 8)),
        ("||a,b|||\n", "a|30||8|\nb|20|10||\n", (None, None)),
    ],
)
def test_the_strictest_limit_counts(associations, qos, limit):
    assert parse_job_limits(associations, qos) == limit


def test_limits_without_accounting(programs):
    programs(
        scontrol=f"cat {DATA}/22.05/config.txt",
        sacctmgr="echo 'You are not running a supported accounting_storage plugin' >&2; exit 1",
    )
    found = limits.read_limits()
    assert (found.max_submit, found.max_running) == (None, None)


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("(null)", {}),
        ("", {}),
        ("gpu:a100:4(S:0-1),nvme:1", {"gpu": 4, "gpu:a100": 4, "nvme": 1}),
        ("gpu:a100:2(S:0,3),gpu:l40:1", {"gpu": 3, "gpu:a100": 2, "gpu:l40": 1}),
        ("gpu:8", {"gpu": 8}),
        ("gpu", {"gpu": 1}),
        ("gpu:a100", {"gpu": 1, "gpu:a100": 1}),
        ("bandwidth:lustre:no_consume:4K", {"bandwidth": 4096, "bandwidth:lustre": 4096}),
    ],
)
def test_devices(text, devices):
    assert parse_gres(text) == devices


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("4:00:00", 14400),
        ("1-00:00:00", 86400),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("UNLIMITED", None),
        ("infinite", None),
    ],
)
def test_times(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1:2:3:4", "-1", "1-", "NOT_SET", "1.5"])
def test_what_is_no_time(text):
    with pytest.raises(ValueError, match="not a time"):
        parse_duration(text)


@given(st.integers(0, 10**8))
def test_times_read_back(seconds):
    assert parse_duration(format_duration(seconds)) == seconds


@given(st.floats(0, 10**7))
def test_a_written_time_is_never_too_short(seconds):
    assert 0 <= parse_duration(format_duration(seconds)) - seconds <= 1


@pytest.mark.parametrize(
    ("text", "mebibytes"),
    [("16G", 16384), ("16GB", 16384), ("512M", 512), ("4096", 4096), ("1.5T", 1572864), ("1K", 1), ("0", 0)],
)
def test_sizes(text, mebibytes):
    assert parse_memory(text) == mebibytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "16X", "1e3"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_memory(text)


def test_what_the_end_of_another_job_of_its_user_may_free():
    for reason in ("Resources", "(Priority)", "QOSMaxGRESPerUser", "AssocGrpCpuLimit", "Licenses"):
        assert lacks_room(reason), reason
    for reason in ("Dependency", "BeginTime", "JobArrayTaskLimit", "None", "JobHeldUser"):
        assert not lacks_room(reason), reason
    assert not lacks_room("QOSMaxWallDurationPerJobLimit"), "no end frees anything of that"


def test_what_only_the_end_of_another_job_of_its_user_frees():
    for reason in ("QOSMaxJobsPerUserLimit", "(AssocGrpGRES)", "AssocMaxJobsLimit"):
        assert is_at_limit(reason), reason
    for reason in ("Resources", "(Priority)", "Licenses", "QOSMaxWallDurationPerJobLimit", "None", ""):
        assert not is_at_limit(reason), reason
