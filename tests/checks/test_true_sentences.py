"""Sentences of the pages that name programs, limits and sizes say what the code does."""

import re

from pipeline.checks.cluster import OPTIONAL, PROGRAMS
from pipeline.checks.disk import most_kept
from pipeline.config.scheduler import SlurmConfig
from pipeline.config.update import UpdateConfig
from pipeline.metrics.learning_advice import RATIO_ERROR
from pipeline.workers.looking import PASS_AGE, PERSON_AGE, WORKER_AGE
from tests.support import ROOT


def page(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_page_on_clusters_names_the_programs_of_slurm_that_are_called():
    needed, used, *_ = page("docs/howto/slurm.md").split("\n\n")[1].split(". ")
    assert set(re.findall(r"`(\w+)`", needed)) == set(PROGRAMS)
    assert set(re.findall(r"`(\w+)`", used)) == set(OPTIONAL)


def test_the_pages_name_the_ratio_that_advice_tolerates():
    for name in ("docs/tutorial/reading.md", "docs/explanation/learner.md"):
        assert re.search(rf"(below|Above) {RATIO_ERROR:g}\b", page(name)), name


def test_the_page_on_disk_space_counts_what_is_there_by_default():
    update = UpdateConfig()
    kept = most_kept(100, update.keep_last, update.keep_every, update.save_every).states
    text = page("docs/howto/disk_space.md")
    assert f"`update.keep_last={update.keep_last}`" in text
    one, all_ = 7 * 2 * (2 + 12), 7 * 2 * (2 + 12) * kept
    assert {f"{one} GB", f"{all_} GB"} <= set(re.findall(r"\d+ GB", text))
    assert {2: "two", 3: "three", 4: "four"}[kept] + " such iterations" in text


def test_the_page_for_administrators_has_the_limits_of_the_code():
    text = page("docs/howto/administrators.md")
    minutes = SlurmConfig.check_minutes
    assert f"{24 * 60 // minutes} guards, one every `scheduler.check_minutes` ({minutes})" in text
    assert f"`scheduler.linger_max` ({SlurmConfig.linger_max:,} s" in text
    ages = (
        f"{PASS_AGE:g} s old for a pass, {PERSON_AGE:g} for `watch`, {WORKER_AGE:g} for a worker that waits"
    )
    assert ages in text


def test_the_same_bytes_are_promised_on_cpus_alone():
    for name in ("README.md", "docs/index.md"):
        promised = [
            s for s in re.split(r"(?<=[.:;])\s", page(name)) if re.search(r"byte for byte|same bytes", s)
        ]
        assert promised, name
        assert [s for s in promised if "CPU" not in s] == [], name
        assert "nothing but Arrow" not in page(name)
