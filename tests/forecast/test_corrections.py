"""What a rehearsal has measured stands in the place of what the formulas assume, and is named."""

import json
from dataclasses import replace

import pytest

from pipeline.checks import rehearsal_record
from pipeline.checks.finding import CheckGroup, Verdict, ok
from pipeline.checks.memory import card_in, check_memory, judge_need
from pipeline.config.update import UpdateConfig
from pipeline.forecast.cards import any_of, card_named, kind_of
from pipeline.forecast.corrections import CPU, Corrected, Correction, corrected, slope
from pipeline.forecast.stages import rollout_need, update_need
from tests.support.large_models import eight_billion
from tests.support.processes import config_of

NOW = 1e9


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def config(inputs, tmp_path):
    policy = eight_billion(tmp_path / "policy", inputs / "policy")
    found = config_of(inputs, tmp_path / "run")
    model = replace(found.model, policy=str(policy), context_length=8192)
    rollout = replace(found.rollout, engine="transformers", max_new_tokens=1024)
    return replace(found, model=model, rollout=rollout, update=UpdateConfig(engine="deepspeed"))


def named(need) -> dict[str, float]:
    """Sizes of the parts of a need, by name."""
    found: dict[str, float] = {}
    for part in need.parts:
        found[part.name] = found.get(part.name, 0.0) + part.size
    return found


def test_a_factor_is_of_what_grows_with_the_size():
    assert slope((100.0, 300.0), (150.0, 350.0)) == 1.0
    assert slope((100.0, 300.0), (150.0, 450.0)) == 1.5


def test_only_what_was_measured_of_a_stage_is_corrected(config):
    measured = Correction("h100", {"update": 1.5, "serving": 3.0, "context_bytes": 5.0}, NOW)
    before = update_need(config, 1)
    after = corrected(before, measured)
    one, other = named(before), named(after)
    changed = {name for name in one if one[name] != other[name]}
    assert changed == {"activations", "logits", "CUDA"}
    assert other["logits"] == pytest.approx(1.5 * one["logits"])
    assert other["CUDA"] == 5.0
    assert after.certain <= before.certain  # a tiny model's factor refuses nothing


def test_fewer_bytes_than_the_formulas_say_are_fewer_certain_ones_too(config):
    before = update_need(config, 0)
    assert corrected(before, Correction(CPU, {"update": 0.5}, NOW)).certain < before.certain


def test_of_vllm_its_start_and_its_cache_are_corrected(config):
    before = rollout_need(replace(config, rollout=replace(config.rollout, engine="vllm")), 1)
    after = corrected(before, Correction("h100", {"cache": 1.1, "vllm_bytes": 7.0, "serving": 9.0}, NOW))
    one, other = named(before), named(after)
    assert other["graphs"] == 7.0
    assert other["key-value cache of one sequence"] == pytest.approx(
        1.1 * one["key-value cache of one sequence"]
    )
    assert after.cache == pytest.approx(1.1 * before.cache)
    assert {name for name in one if one[name] != other[name]} == {
        "graphs",
        "key-value cache of one sequence",
    }


def test_every_line_says_what_has_corrected_it(config):
    kept = [ok("memory-training", "", **{"correction/CPU/update": 1.25, "seconds": 3.0})]
    rehearsal_record.keep_record("here", [(CheckGroup.REHEARSAL, one) for one in kept])
    said = {one.title: one.measured for one in check_memory(config)}
    assert "; corrected by the rehearsal on CPU, " in said["memory of update"]
    assert said["memory of update"].endswith(" s ago: activations and logits x 1.25")
    assert "corrected" not in said["memory of rollout"]
    assert all("corrected" not in one.measured for one in check_memory(config, gpu_memory=80))


def test_what_is_proposed_fits_with_what_was_measured_too(config):
    scheduler = replace(config.scheduler, update=replace(config.scheduler.update, ranks=8))
    update = replace(config.update, precision="bf16", zero_stage=3, tokens_per_micro_batch=16384)
    config = replace(config, scheduler=scheduler, update=update)
    need, card = update_need(config, 1), card_named("h100-80gb")

    def proposed(factor: float):
        measured = Correction("h100", {"update": factor}, NOW)
        return judge_need(config, need, card, lambda _: 1, measured)

    assert proposed(1.0).verdict is Verdict.WARNING
    assert proposed(2.0).advice != proposed(1.0).advice
    assert "corrected by the rehearsal on h100" in proposed(2.0).measured


def test_rehearsals_of_several_cards_and_checks_are_kept_side_by_side():
    def keep(**numbers: float) -> None:
        rehearsal_record.keep_record("here", [(CheckGroup.REHEARSAL, ok("memory", "", **numbers))])

    keep(**{"correction/NVIDIA H100 80GB HBM3/update": 1.1, "correction/CPU/serving": 0.9})
    keep(**{"correction/NVIDIA H100 80GB HBM3/cache": 1.2})
    found = rehearsal_record.corrections()
    assert {kind: dict(one.numbers) for kind, one in found.items()} == {
        "h100": {"update": 1.1, "cache": 1.2},
        "CPU": {"serving": 0.9},
    }
    assert {name for one in found.values() for name in one.numbers} <= {*Corrected}


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"CPU": 1}), json.dumps({"CPU": {"other": 1}})])
def test_what_cannot_be_read_corrects_nothing(tmp_path, content):
    path = tmp_path / "cache/slurm-ppo/cards.json"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert rehearsal_record.corrections() == {}


def test_a_card_has_one_name_whoever_names_it():
    assert kind_of("NVIDIA H100 80GB HBM3") == kind_of("h100") == "h100"
    assert kind_of("NVIDIA A100-SXM4-40GB") == card_named("nvidia_a100-sxm4-80gb").kind == "a100"
    assert card_in("81559, NVIDIA H100 80GB HBM3").kind == "h100"
    assert card_in("[N/A], NVIDIA H100 80GB HBM3") is None
    assert any_of([card_named("h100"), card_named("v100")]).kind == ""
    assert any_of([card_named("h100-80gb"), card_named("h100")]).kind == "h100"
