"""Ten sites and kinds of site: the scripts of the examples, and what wrappers, plug-ins and old versions
print.

Facts of sites are from the pages that the examples name; what wrappers print is made up.
"""

import os
import re
import subprocess
from dataclasses import replace

import pytest

from pipeline.config.compose import compose
from pipeline.config.scheduler import resources_of
from pipeline.executors.slurm.resources import command_words
from pipeline.run.directory import Run
from slurm.commands import run_command
from slurm.ended import NoAccounting, read_ended
from slurm.limits import read_limits
from slurm.query import parse_queue, read_queue
from slurm.submission import submit_script
from tests.support import ROOT
from tests.support.scripted import imagined_run, pinned, rendered

EXAMPLES = ROOT / "examples" / "slurm"
SITES = {
    "perlmutter": "m1234_g",
    "juwels_booster": "myproject",
    "lumi": "project_462000000",
    "leonardo": "EUHPC_X00_000",
    "frontier": "ABC123",
    "lonestar6": "ABC12345",
    "lrz_clusters": "ab123",
}
"""Account of each."""


def run_at(site: str) -> Run:
    config = compose(
        [
            *("name=r1", "run_dir=/scratch/r1", "model.policy=/models/policy", "data.prompts=/data/prompts"),
            *("data.prompts_per_iteration=8", "rollout.num_shards=4", "iterations=4"),
            *("reward=rule", "reward.components.rule.function=a:b", "scheduler.python=/env/bin/python"),
            *(f"scheduler={site}", f"scheduler.account={SITES[site]}"),
        ],
        EXAMPLES,
    )
    return replace(imagined_run("/scratch/r1"), config=config)


def options_in(script: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {name: value.strip("'") for name, value in found}


@pytest.mark.parametrize("site", SITES)
def test_the_scripts_of_a_site_are_what_they_were(site, tmp_path):
    """After a change that is meant: PIN=1 pytest tests/executors/test_sites.py; look at the difference."""
    shown = re.compile(r"(00001-rollout|00001-update|00000-driver)-")
    found = {name: text for name, text in rendered(run_at(site)).items() if shown.match(name)}
    assert found == pinned(f"site-{site}", found)
    for name, text in found.items():
        (tmp_path / name).write_text(text)
        assert subprocess.run(["bash", "-n", tmp_path / name], capture_output=True).stderr == b""
        assert options_in(text)["account"] == SITES[site]


def scripts_at(site: str) -> dict[str, dict[str, str]]:
    """Return the options of each job kind."""
    return {name.split("-")[1]: options_in(text) for name, text in rendered(run_at(site)).items()}


def test_a_site_without_partitions_gets_constraint_and_qos():
    options = scripts_at("perlmutter")
    assert not any("partition" in given for given in options.values())
    assert (options["rollout"]["constraint"], options["rollout"]["qos"]) == ("gpu", "shared")
    assert (options["update"]["constraint"], options["update"]["qos"]) == ("gpu&hbm80g", "regular")
    assert options["driver"]["constraint"] == "cpu"


def test_a_site_without_gres_is_asked_for_no_gpus_and_no_memory():
    asked = {name for given in scripts_at("lonestar6").values() for name in given}
    assert asked.isdisjoint({"gres", "gpus-per-node", "gpus", "mem", "mem-per-cpu"})


@pytest.mark.parametrize("site", ["juwels_booster", "leonardo"])
def test_a_site_that_counts_gpus_as_gres_gets_them_so(site):
    options = scripts_at(site)
    assert options["update"]["gres"] == "gpu:4"
    assert not any("gpus-per-node" in given for given in options.values())


def test_jobs_without_an_environment_pass_on_what_is_set_up_in_them():
    """--export=NONE also says that steps inherit nothing, unless the script takes that back before them."""
    run = run_at("lrz_clusters")
    options = scripts_at("lrz_clusters")
    assert {given["export"] for given in options.values()} == {"NONE"}
    assert all("get-user-env" in given and "clusters" not in given for given in options.values())
    (update,) = (text for name, text in rendered(run).items() if "-update-" in name)
    assert update.index("unset SLURM_EXPORT_ENV") < update.index("exec srun")
    words = command_words(resources_of(run.config.scheduler, "update"), "tasks")
    assert not any("--export" in word for word in words)


# --- kinds of site, by what their programs print ---


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Put a site's programs first on the PATH: name -> lines of shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def put(**lines: str) -> None:
        for name, text in {"srun": "", **lines}.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)

    return put


PRINTED = {
    "job_submit": "echo 'sbatch: lua: job of 1 node goes to partition 17' >&2; echo 4711",
    "banner": "echo; echo 'Welcome. 3 of your 120 jobs run.'; echo; echo 'Submitted batch job 4711'",
    "checks": "echo '--> Verifying valid submit host...OK'; echo '--> 2026 quota: 12%'; echo 4711",
    "several clusters": "echo '4711;far'",
    "in words": "echo 'Submitted batch job 4711 on cluster far'",
}
"""Answers of sbatch: plug-ins print on stderr, scripts in front of it on stdout, as TACC's do."""


@pytest.mark.parametrize("printed", PRINTED)
def test_the_job_is_found_in_whatever_a_site_prints(programs, tmp_path, printed):
    programs(sbatch=PRINTED[printed])
    assert submit_script(tmp_path / "script") == "4711"


ROW = "7|{index}|RUNNING|0|0|1|2|3|10:00|9|0:01|{held}|{asked}|gpu|n1|None|mine|"


def test_a_site_that_shows_nobody_the_jobs_of_others(programs):
    """PrivateData=jobs: squeue shows the user's own, and that is all that is asked for."""
    row = ROW.format(index=0, held="cpu=1,node=1", asked="N/A")
    programs(squeue=f'case " $* " in *" --user={os.getuid()} "*) echo "{row}" ;; *) exit 1 ;; esac')
    assert [element.array_id for element in read_queue(lambda name: True)] == ["7"]


def test_a_site_without_accounting(programs):
    disabled = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
    programs(sacct=disabled, sacctmgr=disabled, scontrol=f"cat {ROOT}/tests/golden/slurm/24.11/config.txt")
    assert read_limits().max_submit is None
    with pytest.raises(NoAccounting) as raised:
        read_ended(["7"])
    assert raised.value.is_absent


def test_old_formats():
    """Slurm 20.11 has ``gpu:2`` where later versions have ``gres:gpu:2`` and ``gres/gpu:2``."""
    rows = [
        ROW.format(index=index, held="cpu=4,mem=8G,node=2,billing=4", asked=asked)
        for index, asked in enumerate(("gpu:2", "gpu:a100:2", "gres:gpu:2", "gres/gpu:2"))
    ]
    assert [element.gpus for element in parse_queue("\n".join(rows) + "\n")] == [4, 4, 4, 4]


def test_a_federation_shows_one_clusters_jobs_below_a_heading(programs):
    row = ROW.format(index=0, held="cpu=1,node=1", asked="N/A").replace("7|", "67108871|", 1)
    programs(squeue=f"echo 'CLUSTER: far'; echo '{row}'", sinfo="echo 'CLUSTER: far'; echo 'n1|idle'")
    assert [element.array_id for element in read_queue(lambda name: True)] == ["67108871"]
    assert run_command(["sinfo"]) == "n1|idle\n"
