"""Going on from what was committed: models, optimizers and counters as an update left them.

Where the newest state is older than the policy, the iterations between are learned again: with the same
steps, towards the same policies. Each ends with the one that was committed after it, whatever rounding makes
of the way between. Any number of ranks puts the same rows into the same micro-batches as were learned from,
and scales losses alike: others would round otherwise. A replay never fails an update: where it cannot be
done, learning goes on from the committed weights with the newest moments, and says so.
"""

import itertools
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from pipeline.config.algorithm import Estimator, ReferenceStage
from pipeline.config.engine_rules import has_reference_in
from pipeline.config.schema import Config
from pipeline.run.commits import BadCommit, CorruptData, Record, check_digest, read_record
from pipeline.run.paths import RunPaths
from pipeline.run.plan import policy_maker, state_of
from pipeline.run.replays import DIFFERENCE, GIVEN_UP, REPLAYED, UNEXPECTED, WORTH_A_WARNING
from pipeline.run.retention import Thinned
from pipeline.run.states import longest_replay
from stages import ranks
from stages.context import Context, Stopwatch, UserError
from stages.logs import log
from stages.models.hidden import hide_unknown_ids
from stages.models.loading import load_causal_lm
from stages.ppo import kept
from stages.ppo.bare import Bare, bare_model
from stages.ppo.committed import committed_weights
from stages.ppo.critics import load_critic
from stages.ppo.learner import update
from stages.ppo.lora import adapt, load_policy
from stages.ppo.reference import is_policy, reference_log_probs, reference_model
from stages.ppo.refill import Intake, read_intake
from stages.ppo.saving import save_state, warnings_noted
from stages.ppo.settling import Settled, set_counters, settle
from stages.ppo.state.learned import Learned, Machine, TrainerState, learned_of, state_after
from stages.ppo.state.slices import WEIGHT
from stages.ppo.state.sums import contradiction, largest_difference
from stages.ppo.state.writer import CRITIC
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner, say


@dataclass(frozen=True)
class Again:
    """An iteration that was learned again."""

    difference: float
    """Difference to the committed policy (:attr:`Settled.difference`)."""
    is_unexpected: bool
    """Whether something differs at all, on the very machine that learned it then."""


@dataclass(frozen=True)
class Relearned:
    """What came of learning iterations again."""

    newest: int
    """Version of the newest state that is committed now."""
    seconds: float = 0.0
    """Seconds spent since that state."""
    again: Sequence[Again] = ()
    is_given_up: bool = False
    """Whether one could not be learned again, so that learning goes on from the committed weights."""

    @property
    def metrics(self) -> dict[str, float]:
        """Numbers for the update's record, from which :mod:`pipeline.orchestrate.lost_states` makes an event;
        none where nothing was learned again."""
        if not self.again and not self.is_given_up:
            return {}
        return {
            REPLAYED: float(len(self.again)),
            DIFFERENCE: max((one.difference for one in self.again), default=0.0),
            UNEXPECTED: float(sum(one.is_unexpected for one in self.again)),
            GIVEN_UP: float(self.is_given_up),
        }


def references_of(context: Context, newest: int, version: int) -> dict[int, Tensor]:
    """Return the reference's log-probabilities, [N, T], of the iterations after ``newest`` up to ``version``,
    by iteration, if updates compute them; as far as the iterations can be learned again.

    To be called before there are models to train, beside which the reference is never in memory. Every rank
    takes part.
    """
    found: dict[int, Tensor] = {}
    if newest == version or not has_reference_in(context.config, ReferenceStage.UPDATE):
        return found
    reader = replace(context, lineage={}, stopwatch=Stopwatch())
    iterations = [i for i in range(newest + 1, version + 1) if not is_policy(reader, i)]
    for reference, together in itertools.groupby(iterations, reader.reference_of):
        with reference_model(reader, reference) as model:
            for iteration in together:
                intake, problem = _intake(reader, iteration)
                if ranks.first_of(problem) or intake is None:
                    return found
                shares, given = learned_of(reader, iteration).machine.ranks, intake.experience
                found[iteration] = reference_log_probs(reader, model, given, iteration, shares)
    return found


def relearn(
    context: Context, learner: Learner, newest: int, version: int, references: Mapping[int, Tensor]
) -> Relearned:
    """Bring a learner with the state of iteration ``newest`` to that of ``version``.

    A state is saved on the way when the process is warned of its end, and each time that a quarter of the
    time limit was spent. What is read on the way is no input of this update, which is made from policy
    ``version``.

    Args:
        references: the reference's log-probabilities, from :func:`references_of`.
    """
    reader = replace(context, lineage={}, stopwatch=Stopwatch(), stays=True)
    begun, limit = time.monotonic(), longest_replay(context.config)
    done: list[Again] = []
    with warnings_noted() as is_warned:
        for iteration in range(newest + 1, version + 1):
            again = _relearn_or_go_on(reader, learner, iteration, version, references.get(iteration))
            if again is None:  # the next state is due: nothing can be learned again from that one
                return Relearned(newest, math.inf, done, is_given_up=True)
            done.append(again)
            is_urgent = is_warned() or time.monotonic() - begun > limit
            if any(ranks.share(is_urgent)) and save_state(reader, learner, iteration):
                newest, begun = iteration, time.monotonic()
    return Relearned(newest, time.monotonic() - begun, done)


def _relearn_or_go_on(
    reader: Context, learner: Learner, iteration: int, version: int, reference: Tensor | None
) -> Again | None:
    """Learn an iteration again; where that cannot be done, go on from the weights of ``version``, and return
    None."""
    say(f"the trainer's state of iteration {iteration} {_fate(reader, iteration)}: it is learned again")
    again = _relearn_one(reader, learner, iteration, reference)
    if isinstance(again, Again):
        return again
    if ranks.is_first():
        log.warning(
            f"iteration {iteration} cannot be learned again ({again}): going on from the weights "
            f"of policy {version}, with the optimizer's moments of iteration {iteration - 1}"
        )
    settle(learner.policy, committed_weights(reader, version))
    set_counters(learner, learned_of(reader, version))
    return None


def _fate(reader: Context, iteration: int) -> str:
    record = read_record(reader.paths, policy_maker(iteration))
    return "was not due" if record is not None and record.skips_state else "was lost"


def _relearn_one(reader: Context, learner: Learner, iteration: int, reference: Tensor | None) -> Again | str:
    """Learn one iteration again. Returns what came of it, or why it cannot be done, on every rank."""
    intake, problem = _intake(reader, iteration)
    if problem := ranks.first_of(problem):
        return problem
    has_reference = has_reference_in(reader.config, ReferenceStage.UPDATE)
    if reference is None and has_reference and not is_policy(reader, iteration):
        return "its shards could not be read when the reference was there"
    try:
        weights = committed_weights(reader, iteration)
    except (BadCommit, Thinned) as error:  # which all ranks raise together
        return str(error)
    assert intake is not None
    experience = intake.experience
    learned, before = learned_of(reader, iteration), state_after(reader, iteration - 1)
    start = [one.parts[WEIGHT].to("cpu", copy=True) for one in learner.policy.held()]
    moments = before.rewards.including(intake.scores)
    if reference is not None:
        experience = replace(experience, reference_log_probs=reference)
    update(learner, experience, iteration, before.kl_coef, moments, reader.stopwatch, learned)
    settled = settle(learner.policy, weights, start)
    set_counters(learner, learned)
    return _compared(learner, learned, iteration, settled)


def _intake(reader: Context, iteration: int) -> tuple[Intake | None, str | None]:
    """Return what an iteration was learned from, or why this rank cannot have it."""
    try:
        learned_of(reader, iteration)
        return read_intake(reader, iteration), None
    except (BadCommit, Thinned, UserError, OSError) as error:
        return None, str(error)


def _compared(learner: Learner, learned: Learned, iteration: int, settled: Settled) -> Again:
    """Compare an iteration with what was learned then, and log it. Every rank takes part."""
    apart = {t.name: largest_difference(t.sums(), learned.sums.get(t.name, {})) for t in learner.trainers}
    machine = Machine.here(learner.config.update.zero)
    is_repeatable = machine == learned.machine and machine.device == "cpu"
    sums = "; ".join(f"{name}: {part:.1e} at {key}" for name, (key, part) in apart.items() if part)
    again = Again(settled.difference, is_repeatable and bool(settled.apart or sums))
    if ranks.is_first():
        elsewhere = machine.unlike(learned.machine)
        text = (
            f"iteration {iteration} learned again: its weights differ from the committed ones by "
            f"{again.difference:.1e} of what it changed{f', sums by {sums}' if sums else ''}"
            f"{f' ({elsewhere})' if elsewhere else ''}"
        )
        log.log(*_judged(again, text))
    return again


def _judged(again: Again, text: str) -> tuple[int, str]:
    """Return the level at which to log a line about an iteration, and the line."""
    if again.is_unexpected:
        return logging.ERROR, f"{text}; on the same machine and versions there should be no difference"
    return logging.WARNING if again.difference > WORTH_A_WARNING else logging.INFO, text


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
    if update.zero < 3:
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

    return load(None) if update.zero < 3 else bare_model(load, directory)


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
    is_same_machine = learned.machine == Machine.here(learner.config.update.zero)
    for trainer in learner.trainers:
        if (expected := learned.sums.get(trainer.name)) is None:
            continue
        found = trainer.sums()
        if problem := contradiction(found, expected):
            return f"{trainer.name}: {problem}"
        if is_same_machine and found != expected:
            say(f"the {trainer.name}'s state adds up a little otherwise than where it was learned")
    return None
