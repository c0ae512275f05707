"""Train policy and critic on an iteration's scored responses.

Runs on any number of ranks: all read everything, each trains on its share and writes its part.
"""

import torch

from pipeline.run.commits import BadCommit, FileEntry, hash_file
from pipeline.run.durable import fsync_path
from pipeline.run.states import is_due, state_record
from stages import ranks
from stages.context import Context, StageResult
from stages.models.passes import count_pass, counted_passes, forget_passes, uncounted
from stages.ppo import kept
from stages.ppo.averaging import save_average
from stages.ppo.learner import update as learner_update
from stages.ppo.math.kl import next_kl_coef
from stages.ppo.memory import out_of_memory_explained
from stages.ppo.metrics import mean_kl, update_metrics
from stages.ppo.reference import with_reference
from stages.ppo.refill import Intake, read_intake, save_spare
from stages.ppo.resuming import Start, resume
from stages.ppo.state.learned import PART, Learned, Machine, TrainerState
from stages.ppo.state.saved_state import is_hashed_here
from stages.ppo.state.writer import LearnerState
from stages.ppo.training import Learner, Steps
from stages.process import background
from stages.training import committed_entries, save_tokenizer


def update(context: Context, iteration: int) -> StageResult | None:
    """Train on an iteration. Returns None on every rank but the first, which has the result of all."""
    set_up_ranks(context)
    # 1. every shard of this iteration, verified, and groups that earlier updates left for it
    with context.stopwatch.timing("read"):
        intake = read_intake(context, iteration)
    with out_of_memory_explained(context.config, intake.experience, is_used=kept.is_there()):
        return learn(iteration, context, intake)


def load(context: Context, version: int) -> None:
    """Load what the update after policy ``version`` goes on with, and keep it, unless it is still to come.
    Every rank takes part."""
    set_up_ranks(context)
    is_next = version == context.task.iteration - 1 and kept.can_stay(context.config)
    if all(ranks.share(is_next and has_state(context, version))):
        start = resume(context, version)
        kept.adopt(context, start.learner, version)


def has_state(context: Context, version: int) -> bool:
    """Whether the trainer's state of a version is committed; version 0 needs none."""
    try:
        return version == 0 or state_record(context.paths, version) is not None
    except BadCommit:  # for the update to say
        return False


def set_up_ranks(context: Context) -> None:
    """Have the ranks meet, and share the work of verifying what they read."""
    ranks.start_distributed()
    context.hashes, context.agree = is_hashed_here, ranks.first_of


def learn(iteration: int, context: Context, intake: Intake) -> StageResult | None:
    """Learn from an iteration's experience, and write the policy; leave a writer of the rest."""
    config, stopwatch = context.config, context.stopwatch
    # 2. the reference's log-probabilities, unless the reward stage has computed them
    with stopwatch.timing("reference"):
        experience = with_reference(context, intake.experience, iteration)
    # 3. policy, critic and their optimizers where the previous iteration left them
    with stopwatch.timing("load"), uncounted():
        start = resume(context, iteration - 1)
    learner, state = start.learner, start.state
    # 4. the update, and the KL coefficient of the next one
    moments = state.rewards.including(intake.scores)
    with context.computing():
        done = learner_update(learner, experience, iteration, state.kl_coef, moments, stopwatch)
    count_all_ranks()
    kl, coef = mean_kl(done.experience, done.targets), state.kl_coef
    if kl is not None and config.algorithm.trains_policy(iteration):  # else the coefficient cannot steer it
        coef = next_kl_coef(coef, kl, len(done.experience), config.algorithm.kl)
    following = TrainerState(
        iteration=iteration,
        kl_coef=coef,
        responses=state.responses + len(experience.rewarded),
        rewards=moments,
        seed=config.seed,
    )
    # 5. the policy, which others wait for; behind its commit, what learning needs to go on
    with stopwatch.timing("save"):
        outputs = save_policy(context, learner, learned(learner, following, done.steps))
        outputs += save_average(context, iteration)
        outputs += save_spare(context, intake)
    leave(context, start, outputs)
    if not ranks.is_first():
        return None
    metrics = update_metrics(config, experience, done) | {"objective/kl_coef": state.kl_coef}
    if config.algorithm.critic_warmup:
        metrics["policy/is_warmup"] = float(not config.algorithm.trains_policy(iteration))
    metrics |= intake.metrics
    metrics |= {f"seconds/update/{name}": seconds for name, seconds in stopwatch.seconds.items()}
    metrics |= start.relearned.metrics | {"samples": float(following.responses)}
    return StageResult(outputs, len(experience.rewarded), "trainer/1", iteration, metrics)


def count_all_ranks() -> None:
    """Let what went through the models be that of all ranks. Every rank takes part."""
    own = counted_passes()
    tokens, positions = ranks.sum_over_ranks(
        torch.tensor([own.tokens, own.positions], dtype=torch.float64)
    ).tolist()
    forget_passes()
    count_pass(tokens, positions)


def leave(context: Context, start: Start, outputs: tuple[FileEntry, ...]) -> None:
    """Leave a writer of the state, if it is due, and a learner for the next update, if the process stays.
    Every rank takes part."""
    spent = context.stopwatch.seconds
    newest, seconds = start.relearned.newest, sum(spent.values()) - spent["load"]
    if (begun := background.newest(context.paths.root)) > newest:  # written meanwhile, or being written
        newest = begun
    else:
        seconds += start.relearned.seconds
    is_wanted = is_due(context.config, context.task.iteration, newest, seconds)
    context.skips_state = not ranks.share(is_wanted)[0]
    if not context.skips_state:
        context.state_writer = LearnerState(context, start.learner)
    kept.keep(context, start.learner, outputs, newest, seconds)


def learned(learner: Learner, state: TrainerState, steps: Steps) -> Learned:
    """Return the small numbers of an update. Every rank takes part.

    Raises:
        NumericalError: a weight or moment is not finite; on every rank.
    """
    return Learned(
        state=state,
        decisions=tuple(steps.decisions),
        skipped=len(steps.skipped),
        overflows=steps.overflows,
        stopped=steps.is_stopped,
        counters={trainer.name: trainer.counters() for trainer in learner.trainers},
        machine=Machine.here(learner.config.update.zero),
        sums={trainer.name: trainer.sums() for trainer in learner.trainers},
    )


def save_policy(context: Context, learner: Learner, numbers: Learned) -> tuple[FileEntry, ...]:
    """Write the policy and the small numbers under this attempt's own names, durably.

    Every rank takes part and writes; the first one has what all wrote. The others have nothing.
    """
    folder = context.files.policy(context.attempt)
    by_rank = ranks.share(learner.policy.save_model(folder))
    if not ranks.is_first():
        return ()
    save_tokenizer(context, folder)
    path = context.files.data(context.attempt, PART, "json")
    with path.open("x") as file:
        file.write(numbers.to_json())
    fsync_path(path)
    written = [file for files in by_rank for file in files]
    return (*committed_entries(context, folder, written), hash_file(context.paths, path))
