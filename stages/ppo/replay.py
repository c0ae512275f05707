"""Learning iterations again whose trainer's state was lost: with the same steps, towards the same policies.

Each iteration replayed starts from the policy that was committed before it, and ends with the one that was
committed after it, whatever rounding makes of the way between. A replay never fails an update: where it
cannot be done, learning goes on from the committed weights with the newest moments, and says so.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeline.config.algorithm import ReferenceStage
from pipeline.config.engine_rules import has_reference_in
from pipeline.run.commits import BadCommit, read_record
from pipeline.run.plan import policy_maker
from pipeline.run.retention import Thinned
from pipeline.run.states import longest_replay
from stages import ranks
from stages.context import Context, Stopwatch, UserError
from stages.logs import log
from stages.ppo.committed import CommittedWeights, committed_weights
from stages.ppo.experience import Experience, read_experience
from stages.ppo.learner import update
from stages.ppo.math.rounding import nearest_that_rounds_to
from stages.ppo.reference import reference_log_probs, reference_model
from stages.ppo.saving import save_state, warnings_noted
from stages.ppo.state.learned import Learned, Machine, learned_of, state_after
from stages.ppo.state.slices import WEIGHT
from stages.ppo.state.sums import largest_difference
from stages.ppo.trainer import Trainer
from stages.ppo.training import Learner, say

WORTH_A_WARNING = 0.01
"""Difference to the committed policy, relative to the iteration's own change of it."""


@dataclass(frozen=True)
class Settled:
    """How far the fp32 weights had to be moved, in norms over the weights of all ranks."""

    moved: float
    update: float
    """Norm of what the iteration changed."""

    @property
    def difference(self) -> float:
        """Part of the iteration's change; 0 where nothing had to be moved."""
        return self.moved / self.update if self.update else float(self.moved > 0)


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
    with reference_model(reader) as model:
        for iteration in range(newest + 1, version + 1):
            experience, problem = _experience(reader, iteration)
            if ranks.first_of(problem) or experience is None:
                break
            found[iteration] = reference_log_probs(reader, model, experience, iteration)
    return found


def relearn(
    context: Context, learner: Learner, newest: int, version: int, references: Mapping[int, Tensor]
) -> tuple[int, float]:
    """Bring a learner with the state of iteration ``newest`` to that of ``version``.

    A state is saved on the way when the process is warned of its end, and each time that a quarter of the
    time limit was spent. What is read on the way is no input of this update, which is made from policy
    ``version``.

    Args:
        references: the reference's log-probabilities, from :func:`references_of`.

    Returns:
        The version of the newest state that is committed now, and seconds spent since it.
    """
    reader = replace(context, lineage={}, stopwatch=Stopwatch(), stays=True)
    begun, limit = time.monotonic(), longest_replay(context.config)
    with warnings_noted() as is_warned:
        for iteration in range(newest + 1, version + 1):
            if not _relearn_or_go_on(reader, learner, iteration, version, references.get(iteration)):
                return (
                    newest,
                    math.inf,
                )  # so that the state is due: nothing can be learned again from that one
            is_urgent = is_warned() or time.monotonic() - begun > limit
            if any(ranks.share(is_urgent)) and save_state(reader, learner, iteration):
                newest, begun = iteration, time.monotonic()
    return newest, time.monotonic() - begun


def _relearn_or_go_on(
    reader: Context, learner: Learner, iteration: int, version: int, reference: Tensor | None
) -> bool:
    """Learn an iteration again; where that cannot be done, go on from the weights of ``version``. Returns
    whether it could be done."""
    say(f"the trainer's state of iteration {iteration} {_fate(reader, iteration)}: it is learned again")
    problem = _relearn_one(reader, learner, iteration, reference)
    if problem is None:
        return True
    if ranks.is_first():
        log.warning(
            f"iteration {iteration} cannot be learned again ({problem}): going on from the weights "
            f"of policy {version}, with the optimizer's moments of iteration {iteration - 1}"
        )
    settle(learner.policy, committed_weights(reader, version))
    set_counters(learner, learned_of(reader, version))
    return False


def _fate(reader: Context, iteration: int) -> str:
    record = read_record(reader.paths, policy_maker(iteration))
    return "was not due" if record is not None and record.skips_state else "was lost"


def _relearn_one(reader: Context, learner: Learner, iteration: int, reference: Tensor | None) -> str | None:
    """Learn one iteration again. Returns why it cannot be done, on every rank."""
    experience, problem = _experience(reader, iteration)
    if problem := ranks.first_of(problem):
        return problem
    if reference is None and has_reference_in(reader.config, ReferenceStage.UPDATE):
        return "its shards could not be read when the reference was there"
    try:
        weights = committed_weights(reader, iteration)
    except (BadCommit, Thinned) as error:  # which all ranks raise together
        return str(error)
    assert experience is not None
    learned, before = learned_of(reader, iteration), state_after(reader, iteration - 1)
    start = [one.parts[WEIGHT].to("cpu", copy=True) for one in learner.policy.held()]
    moments = before.rewards.including(experience.outcome.scores)
    if reference is not None:
        experience = replace(experience, reference_log_probs=reference)
    decisions = learned.decisions
    update(learner, experience, iteration, before.kl_coef, moments, reader.stopwatch, decisions)
    settled = settle(learner.policy, weights, start)
    set_counters(learner, learned)
    _report(learner, learned, iteration, settled)
    return None


def _experience(reader: Context, iteration: int) -> tuple[Experience | None, str | None]:
    """Return an iteration's experience, or why this rank cannot have it."""
    try:
        learned_of(reader, iteration)
        return read_experience(reader, iteration), None
    except (BadCommit, Thinned, UserError, OSError) as error:
        return None, str(error)


def settle(trainer: Trainer, weights: CommittedWeights, start: Sequence[Tensor] | None = None) -> Settled:
    """Move each fp32 weight that does not round to the committed one to the nearest value that does.

    Every rank takes part. If all do, nothing is touched.

    Args:
        start: this rank's weights before the iteration.
    """
    squares = torch.zeros(2, dtype=torch.float64)
    for number, one in enumerate(trainer.held()):
        weight = one.parts[WEIGHT]
        committed = weights.part(one.name, one.start, len(one)).to(weight.device)
        moved = nearest_that_rounds_to(weight, committed)
        squares[0] += _squared(moved - weight)
        squares[1] += _squared(weight.cpu() - start[number]) if start else 0.0
        weight.copy_(moved)
    moved_square, update_square = ranks.sum_over_ranks(squares).tolist()
    if moved_square and trainer.config.zero_stage:
        for name, parameter in trainer.trained():
            trainer.set_computed(parameter, weights.whole(name))
    return Settled(math.sqrt(moved_square), math.sqrt(update_square))


def _squared(tensor: Tensor) -> float:
    return float((tensor.double() ** 2).sum())


def set_counters(learner: Learner, learned: Learned) -> None:
    """Set the counters of policy and critic to those that an update committed."""
    for trainer in learner.trainers:
        if trainer.name in learned.counters:
            trainer.set_counters(learned.counters[trainer.name])


def _report(learner: Learner, learned: Learned, iteration: int, settled: Settled) -> None:
    """Log how close the iteration came to what was learned then. Every rank takes part."""
    apart = {t.name: largest_difference(t.sums(), learned.sums.get(t.name, {})) for t in learner.trainers}
    if not ranks.is_first():
        return
    machine = Machine.here(learner.config.update.zero_stage)
    is_repeatable = machine == learned.machine and machine.device == "cpu"
    elsewhere = machine.unlike(learned.machine)
    sums = "; ".join(f"{name}: {part:.1e} at {key}" for name, (key, part) in apart.items() if part)
    text = (
        f"iteration {iteration} learned again: its weights differ from the committed ones by "
        f"{settled.difference:.1e} of what it changed{f', sums by {sums}' if sums else ''}"
        f"{f' ({elsewhere})' if elsewhere else ''}"
    )
    if is_repeatable and (settled.moved or sums):
        log.error(f"{text}; on the same machine and versions there should be no difference")
    elif settled.difference > WORTH_A_WARNING:
        log.warning(text)
    else:
        log.info(text)
