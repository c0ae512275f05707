"""Settings of the update are timed one after the other, and the words of the best are printed."""

import pytest

from pipeline.checks import candidates as checked
from pipeline.config.issue import ConfigError
from pipeline.config.update import Precision
from pipeline.forecast.candidates import (
    MachineFacts,
    Timed,
    UpdateCandidate,
    best_of,
    candidate_of,
    candidates,
    conclusion,
    in_words,
    time_candidates,
)
from pipeline.forecast.parts import GIB
from tests.support.processes import config_of
from tests.support.tables import LONG

OWN = UpdateCandidate(Precision.FP32, 0, 2048)
CPUS = MachineFacts("CPUs", has_gpu=False, has_bf16=True)
OLD_CPUS = MachineFacts("CPUs", has_gpu=False, has_bf16=False)
CARD = MachineFacts("A100", has_gpu=True, has_bf16=True, has_flash=True)


def like(seconds_of):
    """A measurement of each candidate by a function of it, which returns seconds and GiB."""

    def time(candidate):
        seconds, gib = seconds_of(candidate)
        return Timed(candidate, seconds, 2048 / seconds, gib * GIB)

    return time


def as_on_cpus(candidate):
    is_half = candidate.precision is Precision.BF16
    return 10.0 / (2.4 if is_half else 1), 3.9 + 0.9 * (candidate.tokens > 512) + 1.4 * candidate.zero_stage


@pytest.fixture
def config(inputs, tmp_path):
    return config_of(inputs, tmp_path / "run", "update.tokens_per_micro_batch=2048")


def test_each_setting_is_varied_from_the_best_so_far(config):
    found = list(time_candidates(config, CPUS, like(as_on_cpus)))
    half = UpdateCandidate(Precision.BF16, 1, 2048)
    assert [one.candidate for one in found] == [OWN, half, UpdateCandidate(Precision.BF16, 1, 512)]
    assert best_of(found).candidate == found[-1].candidate, "as fast, and with less memory"
    assert conclusion(found) == (
        "best: update.precision=bf16 update.zero_stage=1 update.tokens_per_micro_batch=512 (2.40 times as "
        "fast, +0.50 GiB; bf16 keeps 8 bits of each number: log-probabilities differ from fp32's by its "
        "rounding)"
    )


def test_without_instructions_for_bf16_the_other_settings_are_varied(config):
    found = [one.candidate for one in time_candidates(config, OLD_CPUS, like(as_on_cpus))]
    assert found == [OWN, UpdateCandidate(Precision.FP32, 1, 2048), UpdateCandidate(Precision.FP32, 0, 512)]


def test_what_is_tried_on_a_card_has_flash_attention_in_half_precision_only(config):
    found = list(time_candidates(config, CARD, like(lambda one: (1.0 + (one.precision == "fp32"), 1.0))))
    assert {one.candidate.attention for one in found if one.candidate.precision == "bf16"} == {
        None,
        "flash_attention_2",
    }
    assert {one.candidate.tokens for one in found} == {2048, 8192, 16_384}
    assert candidates(config, CARD)[0] == candidate_of(config) == OWN


def test_a_candidate_that_fails_is_named_and_never_the_best(config):
    fails = Timed(OWN, problem="was killed")
    works = Timed(UpdateCandidate(Precision.BF16, 1, 2048), 2.0, 1024.0, GIB)
    assert best_of([fails, works]) == works
    assert conclusion([fails, works]) == f"best: {' '.join(works.candidate.words)}"
    assert conclusion([works, fails]) == "the settings are the best of those timed"
    assert in_words(fails) == f"{' '.join(OWN.words)}: was killed"
    assert in_words(works).endswith(
        "update.tokens_per_micro_batch=2048: 2.00 s, 1,024 tokens/s, peak 1.00 GiB"
    )
    assert list(time_candidates(config, CPUS, lambda one: Timed(one, problem="was killed"))) == [fails]
    assert conclusion([fails]) == "nothing could be timed: was killed"


def test_rows_are_as_long_as_the_settings_allow(config):
    assert checked.usual_lengths(config, CPUS) == [(52, 12)] * (2048 // 64)


def test_a_process_that_fails_is_quoted(config, monkeypatch):
    monkeypatch.setattr(checked, "_PROGRAM", "no.such.module")
    assert "No module named 'no" in checked.time_one(config, OWN, [(4, 4)], 1).problem
    with pytest.raises(ConfigError, match=r"settings cannot be timed here: .*No module named 'no"):
        checked.machine_facts()


def test_a_trainer_of_the_users_has_settings_of_its_own(config):
    with pytest.raises(ConfigError, match=r"^update.engine=.*: has settings of its own"):
        checked.timed_here(config, machine=CPUS)


@LONG
def test_an_update_of_the_runs_own_models_is_timed(models, tmp_path, slurm_ppo):
    """With a critic, in fp32 and with another micro-batch."""
    config = config_of(models, tmp_path / "run")
    found = checked.time_one(config, UpdateCandidate(Precision.FP32, 0, 64), [(12, 12), (5, 9)], rounds=1)
    assert not found.problem
    assert found.tokens_per_second == pytest.approx(38 / found.seconds)
    assert 0.1 * GIB < found.peak < 8 * GIB
    assert not checked.machine_facts().has_gpu
