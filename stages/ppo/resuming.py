"""Going on from what was committed: models, optimizers and counters as an update left them.

Where the newest state is older than the policy, the iterations between are learned again (:mod:`.replay`).
"""

from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedModel

from pipeline.config.algorithm import Estimator
from pipeline.config.schema import Config
from pipeline.run.commits import CorruptData, Record, check_digest
from pipeline.run.paths import RunPaths
from pipeline.run.plan import state_of
from stages import ranks
from stages.context import Context
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import load_causal_lm
from stages.ppo import kept
from stages.ppo.bare import Bare, bare_model
from stages.ppo.critics import load_critic
from stages.ppo.lora import adapt, load_policy
from stages.ppo.replay import Relearned, references_of, relearn
from stages.ppo.settling import set_counters
from stages.ppo.state.learned import Learned, Machine, TrainerState, learned_of, state_after
from stages.ppo.state.sums import contradiction
from stages.ppo.state.writer import CRITIC
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner, say


@dataclass(frozen=True)
class Start:
    """What learning goes on with."""

    learner: Learner
    state: TrainerState
    relearned: Relearned
    """What was learned again on the way, and the newest state that is committed."""


def resume(context: Context, version: int) -> Start:
    """Return everything that learning goes on with after iteration ``version``: from memory, if it is there,
    else from the newest state and the iterations since."""
    if found := kept.take(context, version):
        if version > 0:  # else it was loaded ahead, as it is
            set_counters(found.learner, learned_of(context, version))
        relearned = Relearned(found.newest, found.seconds)
        return Start(found.learner, state_after(context, version), relearned)
    learner, relearned = loaded(context, version)
    return Start(learner, state_after(context, version), relearned)


def loaded(context: Context, version: int) -> tuple[Learner, Relearned]:
    """Return the learner as iteration ``version`` left it, from the newest state and the iterations since."""
    reader = replace(context, lineage={})  # what is read to get there again is no input of this update
    newest: int = ranks.share(reader.newest_state(version))[0]  # another's file system may remember less
    references = references_of(context, newest, version)  # first, as it is not to be beside the models
    learner = load_learner(context if newest == version else reader, newest)
    kept.use(learner)
    return learner, relearn(context, learner, newest, version, references)


def load_learner(context: Context, version: int) -> Learner:
    """Load models, optimizers and counters as they were committed with policy ``version``.

    Raises:
        CorruptData: the state is not what was learned; names its task. On every rank.
    """
    folder = context.state_directory(version)
    learner = load_models(context, version, folder)
    if folder is not None:
        owner = state_of(version)
        problem = _load(learner, folder, context.read(owner), context.paths)
        if problem := problem or unlike(learner, learned_of(context, version)):
            raise CorruptData(owner, problem)
    return learner


def load_models(context: Context, version: int, state: Path | None) -> Learner:
    """Load policy and critic, with optimizers that have done nothing yet."""
    config = context.config
    base = 0 if config.update.lora else version  # which never changes; the state has the adapters
    model = policy_from(context.policy_directory(base), config)
    policy, critic = Trainer("policy", model, config.update.learning_rate, config.update), None
    if config.algorithm.estimator is Estimator.GAE:
        model = critic_from(critic_start(context, state), config)
        critic = Trainer("critic", model, config.update.critic_learning_rate, config.update)
    return Learner(config, policy, critic)


def policy_from(directory: Path, config: Config) -> PreTrainedModel | Bare:
    """Load a policy; with ZeRO 3 without its weights, which are read later. Every rank takes part."""
    update, trust = config.update, config.model.trust_remote_code
    if update.zero_stage < 3:
        return load_policy(directory, config)

    def load(placement: str | None) -> PreTrainedModel:
        loaded = load_causal_lm(directory, update.precision, trust, placement, update.attention)
        return hide_unknown_ids(loaded, config)

    bare = bare_model(load, directory)
    adapt(bare.model, directory, config)
    return bare


def critic_from(directory: Path, config: Config) -> PreTrainedModel | Bare:
    """Load a critic, as :func:`policy_from`."""
    update, trust = config.update, config.model.trust_remote_code

    def load(placement: str | None) -> PreTrainedModel:
        return load_critic(directory, update.precision, trust, update.attention, placement)

    return load(None) if update.zero_stage < 3 else bare_model(load, directory)


def critic_start(context: Context, state: Path | None) -> Path:
    """Return the directory that a critic is loaded from."""
    if state is not None and (state / CRITIC).is_dir():
        return state / CRITIC
    return context.source(context.config.model.critic or context.config.model.policy)


def _load(learner: Learner, folder: Path, record: Record, paths: RunPaths) -> str | None:
    """Load the optimizers' state, verified. Returns what is wrong with it, on every rank."""
    return next(filter(None, (_load_one(one, folder, record, paths) for one in learner.trainers)), None)


def _load_one(trainer: Trainer, folder: Path, record: Record, paths: RunPaths) -> str | None:
    entries, problem = {paths.root / entry.path: entry for entry in record.outputs}, None
    try:
        for path, size, digest in trainer.load_state(folder):
            check_digest(record, entries[path], size, digest)
    except CorruptData as error:
        problem = error.why
    except (OSError, KeyError, ValueError) as error:
        problem = f"{folder} cannot be loaded: {error}"
    return ranks.first_of(problem)


def unlike(learner: Learner, learned: Learned) -> str | None:
    """Return in words how what was loaded is not what was learned. Every rank takes part."""
    is_same_machine = learned.machine == Machine.here(learner.config.update.zero_stage)
    for trainer in learner.trainers:
        if (expected := learned.sums.get(trainer.name)) is None:
            continue
        found = trainer.sums()
        if problem := contradiction(found, expected):
            return f"{trainer.name}: {problem}"
        if is_same_machine and found != expected:
            say(f"the {trainer.name}'s state adds up a little otherwise than where it was learned")
    return None
