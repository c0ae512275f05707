"""Makes ppo_golden_more.json: what verl 0.9.1 and TRL 1.12 compute where ppo_golden.json has no numbers.

Run by hand, in an environment of its own (verl and TRL pin other versions than this project's):

    python3 -m venv ENV
    ENV/bin/pip install --no-deps verl==0.9.1
    ENV/bin/pip install torch trl==1.12.0 'tensordict<=0.10' ray hydra-core torchdata pylatexenc codetiming
    ENV/bin/python tests/golden/make_ppo_golden.py

It first computes ppo_golden.json again and stops where a number differs; that is also where one reads what
went into them. Made with torch 2.13 on a CPU. Inputs are float64, drawn from a fixed seed and rounded to six
decimals, so that the file holds them exactly; results have twelve digits. Masks: "mask" has right padding,
"hole" also observations within responses, "empty" also a row without any token of the policy.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor
from trl.experimental.bco.bco_trainer import RunningMoments
from trl.experimental.ppo.ppo_trainer import masked_whiten as trl_masked_whiten
from verl import DataProto
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo import rollout_corr_helper as correction
from verl.utils import torch_functional as functional
from verl.workers.reward_manager.dapo import DAPORewardManager

FOLDER = Path(__file__).parent
MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
ESTIMATORS = ["k1", "abs", "k2", "k3"]
MASKS = ["mask", "hole", "empty"]
LENGTHS = [9, 7, 5, 3, 1, 6]
HOLES = {0: [2, 3, 6], 1: [1], 5: [3, 4]}
KL_COEF = 0.05


def check_page() -> None:
    """Compute the entries of ppo_golden.json, in float32 as they were made."""
    page = json.loads((FOLDER / "ppo_golden.json").read_text())
    inputs = {name: torch.tensor(value) for name, value in page["inputs"].items()}
    masks = {"mask": inputs["mask"], "hole": inputs["mask_hole"]}
    old, new, reference, values = (inputs[name] for name in ("old", "new", "ref", "values"))
    found: dict[str, object] = {}
    for name, mask in masks.items():
        for kind in ESTIMATORS:
            kl = verl.kl_penalty(old, reference, kind)
            found[f"kl_{kind}_{name}_maskedmean"] = functional.masked_mean(kl, mask).item()
        # The score is at the last token of the policy, the k1 penalty at each.
        rewards = token_rewards(inputs["score"], verl.kl_penalty(old, reference, "k1"), mask)
        for gamma, lam in ((1.0, 1.0), (0.99, 0.9), (1.0, 0.95)):
            advantages, returns = verl.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
            found[f"gae_{name}_g{gamma}_l{lam}"] = {
                "adv": (advantages * mask).tolist(),
                "ret": (returns * mask).tolist(),
                "adv_unmasked": advantages.tolist(),
            }
        for mode in MODES:
            # The losses take the whitened advantages and the returns of gamma 1, lambda 0.95.
            policy = verl.compute_policy_loss(
                old, new, advantages, mask, cliprange_low=0.2, cliprange_high=0.28, loss_agg_mode=mode
            )
            value = verl.compute_value_loss(values + 0.4, returns, values, mask, 0.2, mode)
            found[f"pg_{name}_{mode}"] = [float(x) for x in policy]
            found[f"vf_{name}_{mode}"] = [float(x) for x in value]
    rewards, index = inputs["score"].unsqueeze(1) * torch.eye(1, 7), np.array([0, 0, 1, 1])
    found["grpo"] = verl.compute_grpo_outcome_advantage(rewards, masks["mask"], index)[0].tolist()
    found["rloo"] = verl.compute_rloo_outcome_advantage(rewards, masks["mask"], index)[0].tolist()
    found["adaptive_kl"] = controlled(0.2, 6.0, 10000, [(3, 256), (6, 256), (12, 256), (6.6, 256)])
    for name, value in found.items():
        assert_close(value, page[name], name)
    assert set(page) - {"inputs"} == set(found), set(page) ^ set(found)


def assert_close(found: object, expected: object, name: str) -> None:
    if isinstance(expected, dict):
        for key in expected:
            assert_close(found[key], expected[key], f"{name}.{key}")
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=name)


def make_inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(19)
    shape = (len(LENGTHS), max(LENGTHS))

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(*(size or shape), generator=generator, dtype=torch.float64)
        return (drawn * scale * 1e6).round() / 1e6

    mask = torch.arange(shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)
    hole = mask.clone()
    for row, columns in HOLES.items():
        hole[row, columns] = False
    empty = hole.clone()
    empty[2] = False
    old = -normal().abs()
    return {
        "mask": mask.double(),
        "hole": hole.double(),
        "empty": empty.double(),
        "old": old,
        "new": old + normal(scale=1.0),
        "ref": old + normal(scale=0.3),
        "rollout": old + normal(scale=0.25),
        "values": normal(),
        "value_predictions": normal(scale=0.7),
        "returns": normal(),
        "advantages": normal(),
        "score": normal(shape[0]),
        "baseline": normal(shape[0]),
        "groups": torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 2.0]),
        "logits": normal(2, 3, 11, scale=3.0),
        "tokens": torch.randint(0, 11, (2, 3), generator=generator).double(),
        # Beyond each of the limits that keep exponentials finite.
        "differences": torch.tensor(
            [-30.0, -21.0, -5.0, -2.0, -0.5, 0.0, 0.5, 2.0, 5.0, 21.0, 30.0]
        ).double(),
        "log_ratio": normal(scale=0.5),
        "lengths": torch.arange(1.0, 17.0).double(),
    }


def token_rewards(score: Tensor, kl: Tensor, mask: Tensor) -> Tensor:
    """The score at the last token of the policy, and a KL penalty at all."""
    rewards = -KL_COEF * kl * mask
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    rewards[torch.arange(len(last)), last] += score
    return rewards * mask


def advantage_entries(inputs: dict[str, Tensor], name: str) -> dict[str, object]:
    mask, groups = inputs[name], inputs["groups"].long().numpy()
    rewards = token_rewards(inputs["score"], verl.kl_penalty(inputs["old"], inputs["ref"], "k1"), mask)
    entries: dict[str, Tensor] = {"rewards": rewards}
    for gamma, lam in ((1.0, 0.95), (0.97, 0.8)):
        advantages, returns = verl.compute_gae_advantage_return(rewards, inputs["values"], mask, gamma, lam)
        entries[f"gae_g{gamma}_l{lam}_advantages"] = advantages * mask
        entries[f"gae_g{gamma}_l{lam}_returns"] = returns * mask
    for gamma in (1.0, 0.9):
        advantages, returns = verl.compute_reinforce_plus_plus_outcome_advantage(
            rewards, mask, config=SimpleNamespace(gamma=gamma)
        )
        entries[f"reinforce++_g{gamma}_advantages"] = advantages
        entries[f"reinforce++_g{gamma}_returns"] = returns
    advantages, _ = verl.compute_remax_outcome_advantage(rewards, inputs["baseline"], mask)
    entries["remax"] = advantages * mask
    by_group = {
        "grpo": verl.compute_grpo_outcome_advantage,
        "rloo": verl.compute_rloo_outcome_advantage,
        "reinforce++-baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    for estimator, function in by_group.items():
        entries[estimator] = function(rewards.clone(), mask, groups)[0]
    entries["dr-grpo"] = verl.compute_grpo_outcome_advantage(
        rewards.clone(), mask, groups, norm_adv_by_std_in_grpo=False
    )[0]
    return entries


def kl_entries(inputs: dict[str, Tensor]) -> dict[str, object]:
    entries: dict[str, object] = {}
    differences = inputs["differences"]
    for kind in ESTIMATORS:
        entries[f"kl_{kind}"] = verl.kl_penalty(inputs["old"], inputs["ref"], kind)
        for through in ("", "+"):
            log_probs = (differences - 31).requires_grad_()
            value = verl.kl_penalty(log_probs, torch.full_like(differences, -31.0), kind + through)
            value.sum().backward()
            entries[f"kl_{kind}{through}_differences"] = value.detach()
            entries[f"kl_{kind}{through}_gradient"] = log_probs.grad
    steps = [(3.0, 256), (6.0, 64), (12.0, 512), (6.6, 256), (5.5, 1024), (-1.0, 64)]
    entries["kl_steps"] = steps
    entries["adaptive_kl"] = controlled(0.1, 6.0, 10000, steps)
    fixed, seen = verl.FixedKLController(0.1), []
    for kl, count in steps:
        fixed.update(kl, count)
        seen.append(fixed.value)
    entries["fixed_kl"] = seen
    return entries


def controlled(coef: float, target: float, horizon: int, steps: list[tuple[float, int]]) -> list[float]:
    controller, seen = verl.AdaptiveKLController(coef, target, horizon), []
    for kl, count in steps:
        controller.update(kl, count)
        seen.append(float(controller.value))
    return seen


LOSSES = {
    "symmetric": {"clip_ratio": 0.2},
    "asymmetric": {"clip_ratio": 0.2, "clip_ratio_low": 0.15, "clip_ratio_high": 0.28},
    "dual": {"clip_ratio": 0.2, "clip_ratio_c": 1.3},
}
NAMED_LOSSES = {
    "gspo": (verl.compute_policy_loss_gspo, "seq-mean-token-mean"),
    "sapo": (verl.compute_policy_loss_sapo, "seq-mean-token-mean"),
    "cispo": (verl.compute_policy_loss_cispo, "token-mean"),
    "gmpo": (verl.compute_policy_loss_geo_mean, "seq-mean-token-mean"),
}
"""verl's function and the aggregation that it takes; its gspo is the form for tokens."""
GLOBAL_COUNTS = {"batch_num_tokens": 100, "global_batch_size": 12, "loss_scale_factor": 16}


class LossConfig(dict):
    """What verl's policy loss asks of its configuration."""

    clip_ratio = property(lambda self: self["clip_ratio"])
    clip_ratio_low = property(lambda self: self.get("clip_ratio_low"))
    clip_ratio_high = property(lambda self: self.get("clip_ratio_high"))
    global_batch_info = property(lambda self: self.get("global_batch_info", {}))
    policy_loss = property(lambda self: {"rollout_correction": {"loss_type": "ppo_clip"}})
    tau_pos = property(lambda self: 1.0)
    tau_neg = property(lambda self: 1.05)


verl.ActorConfig = LossConfig  # some losses check the class of what they are given


def loss_entries(inputs: dict[str, Tensor], name: str) -> dict[str, object]:
    mask = inputs[name]
    entries: dict[str, object] = {}
    weights, _ = correction.compute_rollout_correction_weights(inputs["old"] - inputs["rollout"], mask)
    for mode in MODES:
        for kind, clips in LOSSES.items():
            entries[f"policy_{kind}_{mode}"] = policy_entry(inputs, mask, LossConfig(clips), mode, None)
        asymmetric = LossConfig(LOSSES["asymmetric"])
        entries[f"policy_weighted_{mode}"] = policy_entry(inputs, mask, asymmetric, mode, weights)
        counted = LossConfig(LOSSES["asymmetric"], global_batch_info=GLOBAL_COUNTS)
        entries[f"policy_global-counts_{mode}"] = policy_entry(inputs, mask, counted, mode, None)
        # Two policies instead of three: the rollout's log-probabilities are the old ones.
        two = {**inputs, "old": inputs["rollout"]}
        bypass = verl.compute_policy_loss_bypass_mode
        entries[f"policy_bypass_{mode}"] = policy_entry(two, mask, asymmetric, mode, None, bypass)
        predictions = inputs["value_predictions"].clone().requires_grad_()
        loss, clipped = verl.compute_value_loss(
            predictions, inputs["returns"], inputs["values"], mask, 0.2, mode
        )
        loss.backward()
        entries[f"value_{mode}"] = [loss.item(), clipped.item()]
        entries[f"value_{mode}_gradient"] = predictions.grad
        entries[f"aggregate_{mode}"] = verl.agg_loss(inputs["returns"], mask, mode).item()
    for kind, (function, mode) in NAMED_LOSSES.items():
        if kind == "gmpo" and name == "empty":  # verl takes the mean over empty rows too
            continue
        entries[f"policy_{kind}"] = policy_entry(inputs, mask, asymmetric, mode, None, function)
        if kind != "gmpo":  # which takes weights of whole responses
            entries[f"policy_{kind}_weighted"] = policy_entry(
                inputs, mask, asymmetric, mode, weights, function
            )
    return entries


def policy_entry(
    inputs: dict[str, Tensor],
    mask: Tensor,
    config: LossConfig,
    mode: str,
    weights: Tensor | None,
    function: Callable[..., tuple[Tensor, dict[str, float]]] = verl.compute_policy_loss_vanilla,
) -> dict[str, object]:
    new = inputs["new"].clone().requires_grad_()
    loss, metrics = function(inputs["old"], new, inputs["advantages"], mask, mode, config, weights)
    loss.backward()
    return {
        "loss": loss.item(),
        "clipped": metrics["actor/pg_clipfrac"],
        "dual_clipped": metrics["actor/pg_clipfrac_lower"],
        "kl": metrics["actor/ppo_kl"],
        "gradient": new.grad.tolist(),
    }


def mismatch_entries(inputs: dict[str, Tensor], name: str) -> dict[str, object]:
    mask, log_ratio = inputs[name], inputs["log_ratio"]
    entries: dict[str, object] = {}
    for level in ("token", "sequence"):
        for mode, threshold in (("truncate", 2.0), ("mask", "0.5_2.0")):
            for normalize in (False, True):
                weights, _ = correction.compute_rollout_correction_weights(
                    log_ratio, mask, level, threshold, normalize
                )
                entries[f"weights_{level}_{mode}{'_normalized' if normalize else ''}"] = weights
    # verl weighs no sequence by its geometric mean, but reports its inverse and rejects sequences by it.
    inverse = [
        correction.compute_offpolicy_metrics(log_ratio[[i]], torch.zeros(1, mask.shape[1]), mask[[i]])[
            "ppl_ratio"
        ]
        for i in range(len(mask))
        if mask[i].any()
    ]
    entries["geometric_inverse"] = inverse
    kept, _ = correction.compute_rollout_rejection_mask(log_ratio, mask, "seq_mean_k1", "0.8_1.25")
    entries["geometric_kept"] = kept
    entries["metrics"] = correction.compute_offpolicy_metrics(inputs["old"], inputs["rollout"], mask)
    # A threshold that nothing reaches: the sample size of the weights as they are.
    _, weighed = correction.compute_rollout_correction_weights(
        inputs["old"] - inputs["rollout"], mask, "token", 1e6
    )
    entries["effective_sample_size"] = weighed["rollout_is_eff_sample_size"]
    return entries


def whitening_entries(inputs: dict[str, Tensor], name: str) -> dict[str, object]:
    mask, values = inputs[name], inputs["returns"] * 3 + 1
    entries: dict[str, object] = {"masked_var": functional.masked_var(values, mask).item()}
    for shift, suffix in ((True, ""), (False, "_unshifted")):
        entries[f"verl_whiten{suffix}"] = functional.masked_whiten(values, mask, shift) * mask
        entries[f"trl_whiten{suffix}"] = trl_masked_whiten(values, mask, shift) * mask
    return entries


def distribution_entries(inputs: dict[str, Tensor]) -> dict[str, object]:
    logits = inputs["logits"].clone().requires_grad_()
    entropy = functional.entropy_from_logits(logits)
    entropy.sum().backward()
    return {
        "log_probs": functional.logprobs_from_logits_v2(inputs["logits"], inputs["tokens"].long()),
        "entropy": entropy.detach(),
        "entropy_gradient": logits.grad,
    }


def shaping_entries(inputs: dict[str, Tensor]) -> dict[str, object]:
    moments, seen = RunningMoments(SimpleNamespace(use_distributed=False)), []
    for scores in inputs["score"].split([2, 1, 3]):
        moments.update(scores)
        seen.append([moments.mean, moments.std])
    return {
        "running_moments": seen,
        "overlong": overlong_rewards([int(n) for n in inputs["lengths"]], 16, 6, 0.7),
    }


def overlong_rewards(lengths: list[int], limit: int, buffer: int, penalty: float) -> list[float]:
    """What DAPO's reward manager adds to a score of 1, less that 1."""
    tokenizer = SimpleNamespace(decode=lambda *_, **__: "text", eos_token="<eos>")
    settings = SimpleNamespace(enable=True, len=buffer, penalty_factor=penalty, log=False)
    manager = DAPORewardManager(tokenizer, 0, lambda **_: 1.0, "source", limit, settings)
    count = len(lengths)
    attention = (torch.arange(limit + 1) < torch.tensor(lengths).unsqueeze(1) + 1).long()
    data = DataProto.from_dict(
        tensors={
            "prompts": torch.zeros(count, 1, dtype=torch.long),
            "responses": torch.zeros(count, limit, dtype=torch.long),
            "attention_mask": attention,
        },
        non_tensors={
            "reward_model": np.array([{"ground_truth": ""}] * count, dtype=object),
            "source": np.array(["golden"] * count, dtype=object),
        },
    )
    return (manager(data).double().sum(1) - 1).tolist()


def plain(value: object) -> object:
    """As JSON has it."""
    match value:
        case Tensor():
            return plain(value.tolist())
        case float():
            return float(f"{value:.12g}")
        case dict():
            return {key: plain(item) for key, item in value.items()}
        case list() | tuple():
            return [plain(item) for item in value]
    return value


def main() -> None:
    check_page()
    inputs = make_inputs()
    golden: dict[str, object] = {f"inputs/{name}": value for name, value in inputs.items()}
    for name in MASKS:
        per_mask = [loss_entries, whitening_entries, mismatch_entries]
        if name != "empty":  # verl's advantages put the score of an empty row nowhere sensible
            per_mask.append(advantage_entries)
        for entries in per_mask:
            golden |= {f"{name}/{key}": value for key, value in entries(inputs, name).items()}
    for entries in (kl_entries, distribution_entries, shaping_entries):
        golden |= entries(inputs)
    lines = [f"{json.dumps(key)}: {json.dumps(plain(golden[key]))}" for key in sorted(golden)]
    (FOLDER / "ppo_golden_more.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} entries")


if __name__ == "__main__":
    main()
