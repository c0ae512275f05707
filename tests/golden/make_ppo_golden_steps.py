"""Makes ppo_golden_steps.json: what verl 0.9.1 computes of rewards of steps, lambdas, teachers and warm-up.

Run as make_ppo_golden.py, in the same environment, with whose inputs it goes on:

    ENV/bin/python tests/golden/make_ppo_golden_steps.py

verl's group estimators know one reward a response, so that the steps of a group are given to them as
responses of one token, and their values summed by verl's REINFORCE++: the process supervision of GRPO (arXiv
2402.03300, section 4.1.3). Its GAE takes one lambda for each response where it is given a tensor, and has no
second one: decoupled returns are those of a second call. What verl does not have is not here: RLOO and means
of several teachers. Its default limit of a teacher's KL, loss_max_clamp, is off.
"""

import json
from types import SimpleNamespace

import torch
from make_ppo_golden import FOLDER, KL_COEF, LossConfig, make_inputs, plain, verl
from tensordict import TensorDict
from torch import Tensor
from verl.experimental.separation.ray_trainer import SeparateRayPPOTrainer
from verl.trainer.distillation.losses import distillation_ppo_loss
from verl.utils import tensordict_utils, torch_functional
from verl.workers.config import DistillationLossConfig

ENDS = {0: [1, 4, 7, 8], 1: [2, 6], 2: [0, 4], 5: [1, 5]}
"""Last tokens of the steps of some responses; others have one step, the response."""
ALONE = 5
"""A response that is alone in its group, of which nothing can be learned by comparison."""
GAMMA, LAM, CRITIC_LAM, ALPHA = 0.97, 0.8, 1.0, 0.6
COEF = 0.7


def step_inputs(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    draw, shape = torch.Generator().manual_seed(38), inputs["old"].shape
    ends = torch.zeros(shape, dtype=torch.float64)
    for row, columns in ENDS.items():
        ends[row, columns] = 1.0
    rewards, teacher = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(2))
    given = {"step_rewards": rewards * ends, "step_ends": ends, "teacher": inputs["old"] + teacher}
    return {name: (value * 1e6).round() / 1e6 for name, value in given.items()}


def cut(rewards: Tensor, ends: Tensor, mask: Tensor, groups: Tensor) -> tuple[Tensor, list, list]:
    """Return the steps of the responses that have others beside them: rewards since the step before, groups,
    and places. The last one has what follows it."""
    sums, of_group, places = [], [], []
    for row in range(ALONE):
        tokens = mask[row].nonzero().flatten().tolist()
        last = [t for t in tokens if ends[row, t]] or tokens[-1:]
        begins = [-1, *last[:-1]]
        for begin, end in zip(begins, last, strict=True):
            upto = tokens[-1] if end == last[-1] else end
            sums.append(sum(float(rewards[row, t]) for t in tokens if begin < t <= upto))
            of_group.append(int(groups[row]))
            places.append((row, end))
    return torch.tensor(sums, dtype=torch.float64), of_group, places


def to_come(values: Tensor, places: list, mask: Tensor, gamma: float = 1.0) -> Tensor:
    """Sum by verl what lies at some tokens, from each token on."""
    at_ends = torch.zeros_like(mask)
    at_ends[tuple(zip(*places, strict=True))] = values
    config = SimpleNamespace(gamma=gamma)
    return verl.compute_reinforce_plus_plus_outcome_advantage(at_ends, mask, config=config)[1]


def step_entries(inputs: dict[str, Tensor], name: str) -> dict[str, object]:
    mask, values = inputs[name], inputs["values"]
    kl = verl.kl_penalty(inputs["old"], inputs["ref"], "k1")
    rewards = (inputs["step_rewards"] - KL_COEF * kl) * mask
    entries: dict[str, object] = {"rewards": rewards}
    alpha = (1 - 1 / (ALPHA * mask.sum(1).clamp(min=1))).clamp(min=0)
    for kind, lam in {"gae": LAM, "critic": CRITIC_LAM, "alpha": alpha}.items():
        advantages, returns = verl.compute_gae_advantage_return(rewards, values, mask, GAMMA, lam)
        entries |= {f"{kind}_advantages": advantages * mask, f"{kind}_returns": returns * mask}
    config = SimpleNamespace(gamma=GAMMA)
    advantages, _ = verl.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, config=config)
    entries["reinforce++"] = advantages
    advantages, _ = verl.compute_remax_outcome_advantage(rewards, inputs["baseline"], mask)
    entries["remax"] = advantages * mask
    return entries | group_entries(rewards, inputs, mask)


def group_entries(rewards: Tensor, inputs: dict[str, Tensor], mask: Tensor) -> dict[str, object]:
    compared = mask.clone()
    compared[ALONE] = 0
    sums, groups, places = cut(rewards, inputs["step_ends"] * mask, mask, inputs["groups"])
    entries: dict[str, object] = {}
    for kind, scales in {"grpo": True, "dr-grpo": False}.items():
        of_steps, _ = verl.compute_grpo_outcome_advantage(
            sums.unsqueeze(1).clone(), torch.ones(len(sums), 1), groups, norm_adv_by_std_in_grpo=scales
        )
        entries[kind] = to_come(of_steps.squeeze(1), places, compared)
    whitened = torch_functional.masked_whiten(entries["dr-grpo"], compared)
    return entries | {"reinforce++-baseline": whitened * compared}


class Actor(LossConfig):
    """What verl's losses ask of the actor's configuration beside the clips."""

    loss_agg_mode = property(lambda self: self["mode"])
    loss_scale_factor = property(lambda self: None)
    use_kl_loss = property(lambda self: False)


def teacher_entries(inputs: dict[str, Tensor], name: str) -> dict[str, object]:
    mask, entries = inputs[name], {}
    for mode in ("token-mean", "seq-mean-token-mean"):
        for rewarded in (False, True):
            suffix = f"{'_with-rewards' if rewarded else ''}_{mode}"
            # verl compares the policy as it is with the teacher, which at the first step is the old one.
            entries[f"advantage{suffix}"] = taught(inputs, mask, mode, "k1", rewarded, inputs["old"])
            for kind in ("abs", "k2", "k3"):
                entries[f"loss_{kind}{suffix}"] = taught(inputs, mask, mode, kind, rewarded, inputs["new"])
    return entries


def taught(
    inputs: dict[str, Tensor], mask: Tensor, mode: str, kind: str, rewarded: bool, log_probs: Tensor
) -> dict[str, object]:
    """The loss of a policy with a teacher, by verl: of it alone, or beside the advantages of rewards."""
    new = log_probs.clone().requires_grad_()
    config = DistillationLossConfig(
        loss_mode=kind,
        use_task_rewards=rewarded,
        distillation_loss_coef=COEF,
        loss_max_clamp=None,
        use_policy_gradient=kind == "k1",
    )
    loss, _ = distillation_ppo_loss(
        Actor(mode=mode, clip_ratio=0.2, global_batch_info={}),
        SimpleNamespace(distillation_loss=config),
        {"log_probs": unpadded(new)},
        micro_batch(inputs, mask),
    )
    loss.backward()
    return {"loss": loss.item(), "gradient": new.grad}


def unpadded(matrix: Tensor) -> Tensor:
    """Rows behind each other, each after a prompt of one token, whose prediction is the first of the row."""
    rows, columns = matrix.shape
    flat = torch.nn.functional.pad(matrix, (0, 1)).flatten()
    return torch.nested.nested_tensor_from_jagged(flat, torch.arange(rows + 1) * (columns + 1))


def micro_batch(inputs: dict[str, Tensor], mask: Tensor) -> TensorDict:
    rows, columns = mask.shape
    tensors = {
        "prompts": torch.zeros(rows, 1),
        "responses": torch.zeros(rows, columns),
        "attention_mask": torch.ones(rows, 1 + columns).long(),
        "response_mask": mask.bool(),
        "old_log_probs": inputs["old"],
        "advantages": inputs["advantages"],
        "teacher_logprobs": unpadded(inputs["teacher"]),
    }
    sizes = {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(1).sum())}
    return tensordict_utils.get_tensordict(tensors, {"dp_size": 1, **sizes})


def warmup_entries() -> dict[str, object]:
    """Whether verl's trainer updates the actor in its steps 1 to 6, by trainer.critic_warmup."""
    found = {}
    for warmup in range(5):
        seen = []
        for step in range(1, 7):
            output = SimpleNamespace(meta_info={"metrics": {"actor/loss": [0.0]}})
            trainer = SimpleNamespace(
                config=SimpleNamespace(trainer=SimpleNamespace(critic_warmup=warmup)),
                global_steps=step,
                metrics={},
                timing_raw={},
                _update_actor=lambda batch, output=output: output,
            )
            SeparateRayPPOTrainer._fit_update_actor(trainer, None)
            seen.append(float("actor/loss" in trainer.metrics))
        found[f"critic_warmup_{warmup}"] = seen
    return found


def main() -> None:
    inputs = make_inputs()
    own = step_inputs(inputs)
    golden: dict[str, object] = {f"inputs/{name}": value for name, value in own.items()}
    inputs |= own
    for name in ("mask", "hole", "empty"):
        if name != "empty":
            golden |= {f"{name}/{key}": value for key, value in step_entries(inputs, name).items()}
        golden |= {f"{name}/teacher_{key}": value for key, value in teacher_entries(inputs, name).items()}
    golden |= warmup_entries()
    lines = [f"{json.dumps(key)}: {json.dumps(plain(golden[key]))}" for key in sorted(golden)]
    (FOLDER / "ppo_golden_steps.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} entries")


if __name__ == "__main__":
    main()
