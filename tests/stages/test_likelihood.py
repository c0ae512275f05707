"""A policy that learned ids finds them likely; the ids of another tokenizer, less likely than chance."""

import math
from dataclasses import asdict, replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.checks.finding import Verdict
from pipeline.config.resolve import configure
from pipeline.tryout.prompt_look import check_likelihood, judge_likelihood
from stages.trials.likelihood import likelihood
from tests.support import tiny

PROMPT = list(range(60, 100))
OTHER = [id_ + 80 for id_ in PROMPT]


@pytest.fixture(scope="module")
def config(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("likelihood")
    return configure(tiny.overrides(models, folder / "run"))


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """The same of a policy that has learned one text by heart."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(config.model.policy)
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.tensor([PROMPT])
    for _ in range(60):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return replace(config, model=replace(config.model, policy=str(folder)))


def test_the_policys_own_ids_are_likely_and_anothers_are_not(trained):
    own, other = likelihood(trained, [PROMPT]), likelihood(trained, [OTHER])
    assert own.nll < 0.5 < own.chance == math.log(258)
    assert other.nll > other.chance
    assert judge_likelihood(**asdict(own)).verdict is Verdict.OK
    assert "another model's" in judge_likelihood(**asdict(other)).measured


def test_a_random_model_of_few_ids_is_worth_a_warning_only_and_is_looked_at_in_a_process_of_its_own(config):
    found = check_likelihood(config, [PROMPT])
    assert (found.verdict, found.numbers["tokens"]) == (Verdict.WARNING, len(PROMPT) - 1)


def test_one_token_is_no_text(config):
    with pytest.raises(ValueError, match="no prompt has two tokens"):
        likelihood(config, [[1]])
