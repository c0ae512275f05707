"""Checks of memory that runs out: in each stage the error says so, and the next call computes.

On a GPU torch is allowed almost no more of it. Without one the process is allowed almost no more addresses,
which shows how the end of the host's memory is met.
"""

import contextlib
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from pipeline.config.engines import Engine
from pipeline.decide.device_faults import DeviceFault, diagnose
from stages.context import OutOfMemory
from stages.engines import make_generator
from stages.engines.transformers import make_scorer
from stages.ppo.memory import is_of_host, out_of_memory_explained
from stages.rehearsal.answers import CheckFailed, CheckInput, Shown, with_torch
from stages.rehearsal.engines import engine_config, responses
from stages.rehearsal.models import even_experience, policy, random_prompts, reward_model
from stages.rehearsal.training import learner_of, trained, update_of

_LEFT = 1 << 26
"""Bytes that may still be allocated: the first activations of the calls below take more, others less."""
_ROWS, _LENGTH = 4096, 100
_BUDGET = _ROWS * 128
_REPORT = "report this, with this command's log"


@contextlib.contextmanager
def almost_no_memory() -> Iterator[None]:
    """Leave almost no memory in the block: of this process's GPU, or of its addresses."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _LEFT) / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + _LEFT, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def run_out(call: Callable[[], object]) -> None:
    """Make a call that needs more memory than it gets. Raises CheckFailed unless it ends with an error that
    tasks know."""
    try:
        with almost_no_memory():
            call()
    except OutOfMemory:  # the update's own words
        return
    except RuntimeError as error:
        found = diagnose(f"{type(error).__name__}: {error}")
        if is_of_host(error) or (found is not None and found.row.fault is DeviceFault.MEMORY):
            return
        raise CheckFailed(f"memory ran out, and the error does not say so: {error}", _REPORT) from error
    raise CheckFailed("no error although almost no memory was allowed", _REPORT)


def shown(what: str) -> Shown:
    whose = "the GPU's" if torch.cuda.is_available() else "the host's"
    return Shown(f"the end of {whose} memory is said as such, and the next {what}")


@with_torch
def generation(given: CheckInput) -> Shown:
    """Check a rollout's engine."""
    config = engine_config(given.folder, Engine.TRANSFORMERS, f"rollout.tokens_per_batch={_BUDGET}")
    engine = make_generator(config, str(policy(given.folder)))
    prompts = random_prompts(8, 256, 24)
    expected = responses(engine, prompts, 1.0)
    run_out(lambda: responses(engine, [[5] * _LENGTH] * _ROWS, 1.0, longest=4))
    engine.reset()
    if [one.tokens for one in responses(engine, prompts, 1.0)] != [one.tokens for one in expected]:
        raise CheckFailed("after memory ran out the same seeds give other responses", _REPORT)
    return shown("call gives the same responses as before")


@with_torch
def scoring(given: CheckInput) -> Shown:
    """Check a reward model's engine."""
    config = engine_config(given.folder, Engine.TRANSFORMERS, f"reward.tokens_per_batch={_BUDGET}")
    scorer = make_scorer(config, str(reward_model(given.folder)))
    sequences = random_prompts(8, 256, 24)
    expected = scorer.score(sequences)
    run_out(lambda: scorer.score([[5] * _LENGTH] * _ROWS))
    scorer.reset()
    if scorer.score(sequences) != expected:
        raise CheckFailed("after memory ran out a reward model gives other scores", _REPORT)
    return shown("call gives the same scores as before")


@with_torch
def training(given: CheckInput) -> Shown:
    """Check an update, and what it says to change."""
    words = (f"data.prompts_per_iteration={_ROWS}", f"update.tokens_per_micro_batch={_BUDGET}")
    learner = learner_of(given.folder, "update.zero_stage=0", *words)
    experience = even_experience(_ROWS, 256, _LENGTH // 2, _LENGTH // 2)

    def explained() -> None:
        with out_of_memory_explained(learner.config, experience):
            update_of(learner, given=experience)

    run_out(explained)
    learner.policy.free()
    trained(given.folder, "update.zero_stage=0")
    return shown("update computes")
