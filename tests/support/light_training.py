"""The light trainer (see :mod:`tests.support.light`): what it learns is a chain of hashes."""

import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline.config.algorithm import Estimator
from pipeline.run.commits import BadCommit, hash_file, hash_tree
from pipeline.run.durable import fsync_path
from pipeline.run.plan import policy_maker
from pipeline.run.schemas import FinishReason, component_column, is_sampled
from pipeline.run.tasks import Stage, Task
from stages.context import Context, StageResult, StateWriter
from stages.engines.base import PolicyTrainer
from stages.training import hash_folders, read_shards, save_tokenizer
from tests.support.light import (
    DICE,
    dice,
    digest,
    fraction,
    seeds_digest,
    take_time,
    weights_digest,
    write_model,
    write_weights,
)

STATE_SECONDS = "LIGHT_STATE_SECONDS"
"""Variable: seconds that a trainer's state takes to be written."""
STATE_FAILS = "LIGHT_STATE_FAILS"
"""Variable: iterations whose state cannot be written, as on a full disk."""
STATE_WAITS = "LIGHT_STATE_WAITS"
"""Variable: if set, a state is written once a rollout of the next iteration is committed."""
ROOM = "LIGHT_NO_ROOM"
"""Variable: if set, there is no room for a copy of a state."""
GATE = "LIGHT_GATE"
"""Variable, ITERATION:FILE: updates from that iteration on wait until the file is there."""


class Learnt(NamedTuple):
    """What the next iteration begins with, besides the policy."""

    digests: list[bytes]
    """Of the critic's weights, if there is a critic, and of all moments; none for version 0."""
    count: int
    """Responses rolled out so far."""


class LightTrainer(PolicyTrainer):
    """Each version's weights are a hash of the version before it and of all that it learns from.

    Its state, critic and moments, is committed behind the policy; one that was lost is learnt again, from the
    newest that there is. ``commits_at_once``: policy and state are one commit, as it may be with users'.
    """

    def __init__(self, commits_at_once: bool = False) -> None:
        self.commits_at_once = commits_at_once

    def update(self, context, iteration):
        config, files, attempt = context.config, context.files, context.attempt
        first, learnt = kept_or_newest(context, iteration - 1)
        for lost in range(first + 1, iteration):
            print(f"iteration {lost} is learned again", flush=True)
            chain, count = learn_again(context, lost, learnt)
            check_is_committed(context, lost, chain)
            learnt = Learnt(digests_of(config, chain), count)
        chain, count, responses, rewards = learn(context, iteration, learnt)
        print(f"epoch 1, mini-batch 1: policy loss {fraction(chain, 'policy/loss'):.4f}", flush=True)
        policy = files.policy(attempt)
        write_model(policy, chain, Path(config.model.policy) / "config.json")
        save_tokenizer(context, policy)
        outputs = hash_folders(context, [policy])
        if self.commits_at_once:
            outputs += write_at_once(context, chain, iteration, count)
        else:
            outputs += (write_learned(context, chain, count),)
            context.state_writer = LightStateWriter(context, chain)
            if context.stays:
                KEPT[context.paths.root] = (attempt, iteration, Learnt(digests_of(config, chain), count))
        metrics = learning_metrics(chain) | reward_metrics(config, responses, rewards)
        metrics |= {"samples": float(count), "objective/kl_coef": config.algorithm.kl.coef}
        metrics["seconds/update/steps"] = context.compute_seconds
        return StageResult(outputs, responses.num_rows, "trainer/1", iteration, metrics)


KEPT: dict[Path, tuple[str, int, Learnt]] = {}
"""By run, what the last update of this process has left: its attempt and iteration, what follows them."""


def kept_or_newest(context, version) -> tuple[int, Learnt]:
    """What this process has in memory, if its own attempt is that version; else the newest state."""
    attempt, kept, learnt = KEPT.pop(context.paths.root, ("", -1, None))
    if kept == version and context.read(policy_maker(version)).attempt == attempt:
        print(f"going on from memory, where iteration {version} is", flush=True)
        return version, learnt
    first = context.newest_state(version)
    return first, read_learnt(context, first)


def learn(context, iteration, learnt):
    """One iteration: the chain that everything it makes follows from, the responses so far, what was read."""
    responses, rewards, shards = read_shards(context, iteration)
    policy = context.policy_directory(iteration - 1)
    print(f"read {responses.num_rows} responses", flush=True)
    with context.computing():
        take_time()
        wait_at_gate(iteration)
        parts = [weights_digest(policy), *learnt.digests]
        chain = digest(iteration, parts, contents(responses), contents(rewards), list(shards), *dice())
    return chain, learnt.count + responses.filter(is_sampled(responses)).num_rows, responses, rewards


def learn_again(context, iteration, learnt):
    """Go on from what the commit says where its inputs are spoilt too, or give another policy each time."""
    try:
        chain, count = learn(context, iteration, learnt)[:2]
        if DICE not in os.environ:
            return chain, count
    except BadCommit as error:
        print(f"iteration {iteration} cannot be learned again ({error})", flush=True)
    said = context.json(policy_maker(iteration), "learned")
    return bytes.fromhex(said["chain"]), said["responses"]


def wait_at_gate(iteration: int) -> None:
    first, _, file = os.environ.get(GATE, "").partition(":")
    until = time.monotonic() + 7200
    while first and iteration >= int(first) and not Path(file).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{file} was not made")
        time.sleep(0.1)


def check_is_committed(context, version, chain) -> None:
    """What is learnt again gives the same policy."""
    found = weights_digest(context.policy_directory(version))
    assert found == seeds_digest({"model.safetensors": chain}), f"policy {version} was learned otherwise"


def state_seeds(config, chain) -> dict[str, dict[str, bytes]]:
    """Folder -> file -> seed of its weights."""
    moments = {"policy.safetensors": digest("moments", chain)}
    if config.algorithm.estimator is not Estimator.GAE:
        return {"moments": moments}
    moments["critic.safetensors"] = digest("critic's moments", chain)
    return {"critic": {"model.safetensors": digest("critic", chain)}, "moments": moments}


def digests_of(config, chain) -> list[bytes]:
    """As :class:`Learnt` has them, of weights that are not written."""
    return [seeds_digest(seeds) for seeds in state_seeds(config, chain).values()]


def read_learnt(context, version) -> Learnt:
    """What a committed version holds, in whatever form."""
    if version == 0:
        return Learnt([], 0)
    if context.read(policy_maker(version)).holds_state:
        critic, state = context.critic_directory(version), context.trainer_directory(version)
        count = json.loads((state / "state.json").read_text())["responses"]
        return Learnt([weights_digest(folder) for folder in (critic, state) if folder], count)
    folder = context.state_directory(version)
    folders = [folder / name for name in ("critic", "moments") if (folder / name).is_dir()]
    count = context.json(policy_maker(version), "learned")["responses"]
    return Learnt([weights_digest(folder) for folder in folders], count)


def write_learned(context, chain, count):
    """The small numbers, which the policy's commit holds."""
    path = context.files.data(context.attempt, "learned", "json")
    said = {"responses": count, "digest": digest("state", chain).hex(), "chain": chain.hex()}
    path.write_text(json.dumps(said))
    fsync_path(path)
    return hash_file(context.paths, path)


def write_at_once(context, chain, iteration, count):
    """Critic and trainer state as parts of the policy's commit."""
    trainer = context.files.trainer(context.attempt)
    seeds = state_seeds(context.config, chain)
    for name, seed in seeds["moments"].items():
        write_weights(trainer / name, seed)
    time.sleep(float(os.environ.get(STATE_SECONDS, "0")))
    (trainer / "state.json").write_text(json.dumps({"iteration": iteration, "responses": count}))
    folders = [trainer]
    if "critic" in seeds:
        folders.append(context.files.critic(context.attempt))
        config = Path(context.config.model.policy) / "config.json"
        write_model(folders[1], seeds["critic"]["model.safetensors"], config)
    return hash_folders(context, folders)


@dataclass
class LightStateWriter(StateWriter):
    """Writes critic and moments of a version, as slowly or badly as the environment says."""

    context: Context
    chain: bytes

    def detach(self):
        """There are no devices."""
        return True

    def copied(self, is_wanted):
        """There is nothing to copy."""
        return 0.0 if is_wanted and ROOM not in os.environ else None

    def write(self, is_wanted):
        context, iteration = self.context, self.context.task.iteration
        if not is_wanted:
            return ()
        wait_for_rollout(context, iteration + 1)
        folder = context.files.state(context.attempt)
        for name, seeds in state_seeds(context.config, self.chain).items():
            for file, seed in seeds.items():
                write_weights(folder / name / file, seed)
        if str(iteration) in os.environ.get(STATE_FAILS, "").split():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        time.sleep(float(os.environ.get(STATE_SECONDS, "0")))
        return hash_tree(context.paths, folder)


def wait_for_rollout(context, iteration: int) -> None:
    """Wait for the next iteration's first rollout, if the environment says so: a run whose rollouts waited
    for the state would not go on."""
    is_last = iteration > context.config.iterations
    until = time.monotonic() + 60
    record = context.paths.task(Task(iteration, Stage.ROLLOUT)).record
    while STATE_WAITS in os.environ and not is_last and not record.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"no rollout of iteration {iteration} was committed")
        time.sleep(0.01)


def contents(table):
    """A table's values, whatever its batches."""
    return {name: table[name].to_pylist() for name in table.column_names}


def learning_metrics(chain: bytes) -> dict[str, float]:
    """What a healthy update reports, as functions of the chain."""
    shares = ("policy/clip_fraction_low", "policy/clip_fraction_high", "value/clip_fraction")
    others = ("policy/loss", "policy/entropy", "policy/approx_kl", "policy/grad_norm", "policy/advantage_std")
    others += ("value/loss", "value/grad_norm", "value/explained_variance", "value/mean", "mismatch/max")
    others += ("objective/kl", "objective/kl_per_token", "policy/advantage_mean", "value/returns_mean")
    metrics = {name: 0.1 * fraction(chain, name) for name in shares}
    metrics |= {name: fraction(chain, name) for name in others}
    metrics |= {"policy/ratio": 1.0, "policy/ratio_error_first": 0.0, "mismatch/kl": 0.0}
    metrics["mismatch/effective_samples"] = 1 - 0.1 * fraction(chain, "samples")
    metrics |= {"policy/learning_rate": 1e-3, "policy/padding_efficiency": 1.0}
    return metrics | {f"policy/{name}": 0.0 for name in ("skipped_steps", "overflow_steps", "stopped_early")}


def reward_metrics(config, responses, rewards) -> dict[str, float]:
    sampled = is_sampled(responses)
    responses, rewards = responses.filter(sampled), rewards.filter(sampled)
    lengths = np.array([len(tokens) for tokens in responses["response_tokens"].to_pylist()])
    scores = rewards["reward"].to_numpy()
    reasons = responses["finish_reason"].to_pylist()
    metrics = {f"reward/{name}": float(getattr(scores, name)()) for name in ("mean", "std", "min", "max")}
    metrics |= {f"response_length/{name}": float(getattr(lengths, name)()) for name in ("mean", "min", "max")}
    metrics |= {f"finish_reason/{reason}": reasons.count(reason) / len(reasons) for reason in FinishReason}
    for name in config.reward.components:
        column = rewards[component_column(name)].to_numpy()
        metrics |= {f"reward/{name}/mean": float(column.mean()), f"reward/{name}/std": float(column.std())}
    return metrics | {
        "response_tokens": float(lengths.sum()),
        "response_length/clip_ratio": reasons.count(FinishReason.LENGTH) / len(reasons),
        "num_turns/mean": float(np.mean(responses["num_turns"].to_pylist())),
        "reward/frac_zero_std": 0.0,
        "reward/discarded": 0.0,
    }
