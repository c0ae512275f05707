"""Rules about what the policy learns. Pure; a rule without its numbers is silent."""

from collections.abc import Callable, Iterator

from pipeline.config.algorithm import GROUP_ESTIMATORS, Estimator
from pipeline.config.reward import RuleConfig
from pipeline.metrics.advice_input import (
    TREND_ROWS,
    WINDOW,
    Advice,
    AdviceInput,
    Findings,
    Rule,
    Series,
    Severity,
    Trend,
    evaluation_trend,
    matching,
    percent,
    recent,
    series,
    trend_of,
)
from pipeline.metrics.first_signs import UNEQUAL, is_constant
from pipeline.text import number

_SOFTER = "raise algorithm.kl.coef (or set algorithm.kl.controller=adaptive), lower update.learning_rate"
_IMPORTANT = 0.1
"""Share of the rewards' standard deviation by which a mean reward has to change before it matters."""


def reward_hacking(evidence: AdviceInput) -> Findings:
    """Detect a score that rises while what it stands for falls."""
    important = _IMPORTANT * _spread(evidence)
    heldout = evaluation_trend(evidence.trained)
    if heldout and heldout.falls(important):
        first, last = heldout.earlier.iterations[0], heldout.later.iterations[-1]
        score = trend_of(series(evidence.trained, "reward/mean").between(first, last), least=4)
        if score and score.rises(important):
            title = "the held-out reward falls while the reward rises"
            yield _hacked(Severity.PROBLEM, title, score, heldout)
    score = trend_of(series(evidence.trained, "reward/mean")[-TREND_ROWS:])
    if score and score.rises(important):
        for name, trend in _rule_trends(evidence):
            title = f"component {name} falls while the reward rises"
            yield _hacked(Severity.WARNING, title, score, trend)


def _hacked(severity: Severity, title: str, score: Trend, truth: Trend) -> Advice:
    what = f"{_moved(score)}; {_moved(truth)}"
    remedy = (
        f"read the samples with the highest reward; {_SOFTER}, change the weights of reward.components, or "
        "go back to the best policy (slurm-ppo fork RUN@best)"
    )
    return Advice(severity, Rule.REWARD_HACKING, title, what, remedy, (score.later.name, truth.later.name))


def _moved(trend: Trend) -> str:
    earlier, later = trend.earlier, trend.later
    numbers = f"{number(earlier.middle)} ({earlier.span}) to {number(later.middle)} ({later.span})"
    return f"{later.name} went from {numbers}"


def _rule_trends(evidence: AdviceInput) -> Iterator[tuple[str, Trend]]:
    """Yield trends of rules with positive weight that fall. Reward models are what is being hacked."""
    components = evidence.config.reward.components
    for name, component in components.items() if len(components) > 1 else ():
        trend = trend_of(series(evidence.trained, f"reward/{name}/mean")[-TREND_ROWS:])
        spread = recent(evidence, f"reward/{name}/std")
        important = _IMPORTANT * spread.middle if spread else 0.0
        is_wanted = isinstance(component, RuleConfig) and component.weight > 0
        if is_wanted and trend and trend.falls(important):
            yield name, trend


def _spread(evidence: AdviceInput) -> float:
    found = recent(evidence, "reward/std")
    return found.middle if found else 0.0


def reward_falling(evidence: AdviceInput) -> Findings:
    """Detect a reward that is half a standard deviation of responses below its best window."""
    found = series(evidence.trained, "reward/mean")[-TREND_ROWS:]
    now, spread = found[-WINDOW:], _spread(evidence)
    windows = [found.between(i, i + WINDOW - 1) for i in found.iterations[: -2 * WINDOW + 1]]
    best = max((w for w in windows if len(w) == WINDOW), key=lambda w: w.middle, default=None)
    if best and spread and best.middle - now.middle > 0.5 * spread:
        was = f"was {number(best.middle)} in {best.span}"
        what = f"reward/mean {was} and is {number(now.middle)} in {now.span}"
        remedy = f"{_SOFTER}, or go back with slurm-ppo fork RUN@{best.iterations[-1]}"
        title = "the reward has fallen"
        yield Advice(Severity.WARNING, Rule.REWARD_FALLING, title, what, remedy, (found.name,))


_KL_FACTOR, _KL_FLOOR = 3.0, 0.1
"""Factor, and nats per token: a KL that trebles within a few iterations matters above the floor."""


def kl_jump(evidence: AdviceInput) -> Findings:
    """Detect a policy three times as far from the reference as a few iterations before."""
    jump = _jump(evidence, "objective/kl_per_token", _KL_FACTOR)
    if jump and jump[1].middle > _KL_FLOOR:
        title = "the policy runs away from the reference"
        remedy = f"{_SOFTER}, or end updates early with algorithm.target_kl"
        names = ("objective/kl_per_token", "objective/kl")
        yield Advice(Severity.WARNING, Rule.KL_JUMP, title, _jumped(*jump), remedy, names)


_AWAY = 0.1
"""Share by which the KL to the teachers rises where the policy does not learn from them."""


def away_from_teacher(evidence: AdviceInput) -> Findings:
    """Detect a policy that moves away from its teachers."""
    trend = trend_of(series(evidence.trained, "teacher/kl_per_token")[-TREND_ROWS:])
    if trend and trend.rises(_AWAY * abs(trend.earlier.middle)):
        title = "the policy moves away from its teachers"
        remedy = "lower update.learning_rate, or raise reward.teachers.NAME.weight"
        names = ("teacher/kl_per_token", "teacher/kl")
        yield Advice(Severity.WARNING, Rule.AWAY_FROM_TEACHER, title, _moved(trend), remedy, names)


def _jump(evidence: AdviceInput, name: str, factor: float) -> tuple[Series, Series] | None:
    """Return the ten values before and the last three, if the latter are ``factor`` times as large."""
    found = series(evidence.trained, name)
    after, before = found[-3:], found[-13:-3]
    if len(before) < WINDOW:
        return None
    return (before, after) if after.middle > factor * abs(before.middle) else None


def _jumped(before: Series, after: Series) -> str:
    numbers = f"{number(before.middle)} in {before.span} and {number(after.middle)} in {after.span}"
    return f"{after.name}: median {numbers}"


_LENGTH_FACTOR = 2.0


def length_change(evidence: AdviceInput) -> Findings:
    """Detect lengths that double or halve within 40 iterations. Growth that pays is only worth a note."""
    found = series(evidence.trained, "response_length/mean")[-TREND_ROWS:]
    before, after = found[:WINDOW], found[-WINDOW:]
    if len(found) < 2 * WINDOW or before.middle <= 0:
        return
    what = f"{_jumped(before, after)} tokens"
    if after.middle > _LENGTH_FACTOR * before.middle:
        score = trend_of(series(evidence.trained, "reward/mean")[-TREND_ROWS:])
        severity = Severity.NOTE if score and score.rises() else Severity.WARNING
        remedy = (
            "read samples: if they ramble, give algorithm.shaping.overlong_buffer, add a length_penalty to "
            "reward.components, or lower rollout.max_new_tokens"
        )
        title = "responses get much longer"
        yield Advice(severity, Rule.LENGTH_EXPLOSION, title, what, remedy, (found.name,))
    elif after.middle < before.middle / _LENGTH_FACTOR:
        remedy = f"read samples: if they are cut short to please the reward, {_SOFTER}, or change the reward"
        title = "responses get much shorter"
        yield Advice(Severity.WARNING, Rule.LENGTH_COLLAPSE, title, what, remedy, (found.name,))


_ENTROPY_LOW, _ENTROPY_GONE, _ENTROPY_FACTOR = 0.05, 0.01, 0.2
"""Nats per token, and a factor: at 0.05 about one token in a hundred is a choice. A policy that was so low at
first has not collapsed."""


def entropy_collapse(evidence: AdviceInput) -> Findings:
    """Detect a policy that hardly explores any more."""
    now = recent(evidence, "policy/entropy")
    before = series(evidence.trained, "policy/entropy")[:WINDOW]
    if now is None or now.middle > _ENTROPY_LOW or now.middle > _ENTROPY_FACTOR * before.middle:
        return
    severity = Severity.PROBLEM if now.middle < _ENTROPY_GONE else Severity.WARNING
    remedy = (
        "set algorithm.entropy_coef above 0, raise algorithm.clip_range_high or rollout.temperature, lower "
        "update.learning_rate, or go back to before it fell (slurm-ppo fork RUN@ITERATION)"
    )
    title = "the policy's entropy is nearly gone"
    what = f"{_jumped(before, now)} nats per token"
    yield Advice(severity, Rule.ENTROPY_COLLAPSE, title, what, remedy, ("policy/entropy",))


_FLAT_MANY, _FLAT_ALL = 0.5, 0.9


def flat_groups(evidence: AdviceInput) -> Findings:
    """Detect many prompts whose samples score the same: estimators that compare them learn nothing there."""
    found = recent(evidence, "reward/frac_zero_std")
    config = evidence.config
    if config.rollout.samples_per_prompt < 2 or found is None or found.middle <= _FLAT_MANY:
        return
    if is_constant(evidence) or _are_replaced(evidence) or not config.reward.components:
        return
    compares = config.algorithm.estimator in GROUP_ESTIMATORS
    severity = Severity.PROBLEM if compares and found.middle > _FLAT_ALL else Severity.WARNING
    rewards = recent(evidence, "reward/mean")
    mean = f", mean reward {number(rewards.middle)}" if rewards else ""
    what = f"{percent(found.middle)} of prompts in {found.span}{mean}"
    left_out = "algorithm.shaping.filter_groups leaves such prompts out, rollout.oversample replaces them"
    remedy = f"{UNEQUAL}; {'raise rollout.oversample' if config.is_refilled else left_out}"
    title = "most prompts' samples score the same"
    yield Advice(severity, Rule.FLAT_GROUPS, title, what, remedy, (found.name,))


_MISSING_MUCH = 0.1


def _are_replaced(evidence: AdviceInput) -> bool:
    """Whether updates are all but full for all that, by rollout.oversample."""
    missing, prompts = recent(evidence, "refill/missing"), evidence.config.data.prompts_per_iteration
    return missing is not None and missing.middle <= _MISSING_MUCH * prompts


_CLIPPED_MUCH = 0.3
"""Clipped share of tokens: PPO's own runs have a few to twenty percent; above, most gradient is lost."""
_STILL = 1e-7
"""KL per token of an update that moves nothing: the rounding of single precision."""


def clipping(evidence: AdviceInput) -> Findings:
    """Detect steps that go too far, or nowhere."""
    low, high = (recent(evidence, f"policy/clip_fraction_{side}") for side in ("low", "high"))
    if low and high and low.middle + high.middle > _CLIPPED_MUCH:
        what = f"{percent(low.middle)} of tokens below and {percent(high.middle)} above, in {low.span}"
        remedy = "lower update.learning_rate, update.epochs or update.minibatches, or set algorithm.target_kl"
        title = "too many tokens are clipped"
        yield Advice(Severity.WARNING, Rule.CLIPPING, title, what, remedy, (low.name, high.name))
    moved, rate = recent(evidence, "policy/approx_kl"), recent(evidence, "policy/learning_rate")
    update = evidence.config.update
    # With one step in all the ratio is 1 when it is measured; and at its schedule's end a run moves nothing.
    is_seen = update.epochs * update.minibatches > 1 and rate and rate.middle > 0.01 * update.learning_rate
    if is_seen and moved and abs(moved.middle) < _STILL:
        what = f"policy/approx_kl is {number(moved.middle)} in {moved.span}, and nothing is clipped"
        remedy = "raise update.learning_rate; look at policy/grad_norm, reward/std and policy/advantage_std"
        title = "the updates hardly move the policy"
        yield Advice(Severity.WARNING, Rule.NOTHING_MOVES, title, what, remedy, (moved.name,))


def stopped_early(evidence: AdviceInput) -> Findings:
    """Detect updates most of whose steps are not taken."""
    update = evidence.config.update
    planned = update.epochs * update.minibatches
    stopped, steps = recent(evidence, "policy/stopped_early"), recent(evidence, "policy/steps")
    if stopped and steps and stopped.middle == 1 and steps.middle < planned / 2:
        what = f"{number(steps.middle)} of {planned} steps are taken in {steps.span}"
        remedy = "lower update.learning_rate or update.epochs, or raise algorithm.target_kl"
        title = "algorithm.target_kl ends updates early"
        yield Advice(Severity.NOTE, Rule.STOPPED_EARLY, title, what, remedy, (stopped.name, steps.name))


RATIO_ERROR = 0.01
"""Largest error of any token: kernels that sum in any order stay below it, wrong inputs do not."""


def first_ratio(evidence: AdviceInput) -> Findings:
    """Detect a first ratio other than 1: before the first step old and new policy are the same."""
    found = recent(evidence, "policy/ratio_error_first")
    if found and found.middle > RATIO_ERROR:
        what = f"{found.name}: median {number(found.middle)} in {found.span}; 0 is right"
        remedy = (
            "set update.attention=eager and update.remove_padding=false to see whether kernels are to blame, "
            "or update.precision=fp32; if that does not help, please report it"
        )
        title = "the first ratio is not 1"
        yield Advice(Severity.PROBLEM, Rule.FIRST_RATIO, title, what, remedy, (found.name,))


_SKIPPED_SHARE, _OVERFLOW_SHARE = 0.02, 0.2
"""Shares of steps: fp16 looks for its loss scale by overflowing now and then, but not every fifth step."""


def skipped_steps(evidence: AdviceInput) -> Findings:
    """Detect steps that were lost to numbers that are not finite."""
    for name, share, rule, title, remedy in _LOST_STEPS:
        rows = evidence.trained[-2 * WINDOW :]
        lost, taken = series(rows, name), series(rows, "policy/steps")
        total = sum(lost.values) + sum(taken.values)
        if len(lost) >= WINDOW and total > 0 and sum(lost.values) / total > share:
            what = f"{number(sum(lost.values))} of {number(total)} steps in {lost.span}"
            yield Advice(Severity.WARNING, rule, title, what, remedy, (name, "policy/steps"))


_LOST_STEPS = (
    (
        "policy/skipped_steps",
        _SKIPPED_SHARE,
        Rule.SKIPPED_STEPS,
        "steps are skipped: losses or gradients are not finite",
        "lower update.learning_rate or algorithm.clip_range_high; with update.precision=fp16 use bf16",
    ),
    (
        "policy/overflow_steps",
        _OVERFLOW_SHARE,
        Rule.LOSS_SCALE,
        "fp16 overflows again and again",
        "set update.precision=bf16 where the GPUs have it, else lower update.learning_rate",
    ),
)

_NORM_FACTOR = 10.0


def gradient_explosion(evidence: AdviceInput) -> Findings:
    """Detect gradients ten times as large as before, and clipped to update.max_grad_norm."""
    rates = {"policy": "update.learning_rate", "value": "update.critic_learning_rate"}
    for model, key in rates.items():
        jump = _jump(evidence, f"{model}/grad_norm", _NORM_FACTOR)
        if jump and jump[1].middle > evidence.config.update.max_grad_norm:
            remedy = f"lower {key} or raise update.warmup_steps; look at rewards and lengths of the same rows"
            title = f"gradients of the {'critic' if model == 'value' else 'policy'} explode"
            names = (f"{model}/grad_norm",)
            yield Advice(Severity.WARNING, Rule.GRADIENT_EXPLOSION, title, _jumped(*jump), remedy, names)


def blind_critic(evidence: AdviceInput) -> Findings:
    """Detect a critic that predicts no more than a constant, which adds noise, after ten iterations."""
    found = recent(evidence, "value/explained_variance")
    is_used = evidence.config.algorithm.estimator is Estimator.GAE
    if not is_used or found is None or len(evidence.trained) < 2 * WINDOW or found.middle > 0.0:
        return
    what = f"{found.name}: median {number(found.middle)} in {found.span}; 0 is a constant, 1 is all"
    remedy = (
        "raise update.critic_learning_rate, update.epochs or algorithm.critic_warmup, start model.critic "
        "from the reward model, or set algorithm.estimator=rloo, which needs no critic"
    )
    title = "the critic explains nothing"
    yield Advice(Severity.WARNING, Rule.BLIND_CRITIC, title, what, remedy, (found.name,))


_CUT_MANY, _CUT_MOST = 0.25, 0.75
"""Shares of responses: an untrained model may ramble, but one that never ends is scored on a beginning."""


def truncation(evidence: AdviceInput) -> Findings:
    """Detect responses that were cut at rollout.max_new_tokens, and did not end."""
    found = recent(evidence, "finish_reason/length") or recent(evidence, "response_length/clip_ratio")
    if found is None or found.middle <= _CUT_MANY:
        return
    severity = Severity.PROBLEM if found.middle > _CUT_MOST else Severity.WARNING
    limit = evidence.config.rollout.max_new_tokens
    what = f"{percent(found.middle)} of responses end at rollout.max_new_tokens={limit}, in {found.span}"
    remedy = (
        "raise rollout.max_new_tokens (and model.context_length), or teach ending: "
        "algorithm.shaping.missing_eos_penalty, algorithm.shaping.overlong_buffer"
    )
    title = "many responses are cut at the length limit"
    yield Advice(severity, Rule.TRUNCATION, title, what, remedy, (found.name,))


_LOST_SHARE = 0.01
_LOST_HOW = {
    "truncated": "did not fit the reward model's context and were cut",
    "unscored": "could not be scored",
    "late": "took longer than time_limit and got timeout_score",
    "failed": "made the rule fail and got error_score",
    "unreadable": "got a reply that held no score",
}


def unscored(evidence: AdviceInput) -> Findings:
    """Detect that more than one response in a hundred has a reward that is not about it."""
    responses = evidence.config.responses_per_iteration
    for name, kind in matching(evidence, rf"reward/.+/({'|'.join(_LOST_HOW)})"):
        found, component = recent(evidence, name), name.split("/")[1]
        if found and found.middle > _LOST_SHARE * responses:
            what = (
                f"{number(found.middle)} of {responses} responses {_LOST_HOW[kind]} (median of {found.span})"
            )
            remedy = (
                "lower rollout.max_new_tokens or data.max_prompt_tokens, or take another reward model"
                if kind == "truncated"
                else f"look at the logs (slurm-ppo logs RUN reward) and at {component} of reward.components"
            )
            title = f"rewards of component {component} are not of the whole response"
            title = title if kind == "truncated" else f"responses without a score of component {component}"
            yield Advice(Severity.WARNING, Rule.UNSCORED, title, what, remedy, (name,))


LEARNING_RULES: tuple[Callable[[AdviceInput], Findings], ...] = (
    reward_hacking,
    reward_falling,
    kl_jump,
    away_from_teacher,
    length_change,
    entropy_collapse,
    flat_groups,
    clipping,
    stopped_early,
    first_ratio,
    skipped_steps,
    gradient_explosion,
    blind_critic,
    truncation,
    unscored,
)
