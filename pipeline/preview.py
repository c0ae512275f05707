"""What a run would do, and whether it can: plan and validate. Runs nothing."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipeline.config import Config, RewardModelConfig, RuleConfig
from pipeline.data import PromptError, Prompts, read_prompts, summarize
from pipeline.modeldirs import has_chat_template
from pipeline.observe import Records
from pipeline.paths import RunPaths
from pipeline.plan import Plan
from pipeline.plugins import load_rules, make_importable
from pipeline.reconcile import stale_because
from pipeline.runs import check_is_free
from pipeline.schemas import reserved_columns
from pipeline.tasks import Task


def describe_plan(plan: Plan, paths: RunPaths | None) -> str:
    """Every task that would run and why, after counts per stage. ``paths`` of an existing run, or None."""
    reasons = outstanding(plan, paths)
    counts = Counter(task.stage for task in reasons)
    total = Counter(task.stage for task in plan.all_tasks())
    lines = [f"{'stage':<10}{'to run':>8}{'done':>8}"]
    lines += [f"{stage:<10}{counts[stage]:>8}{total[stage] - counts[stage]:>8}" for stage in total]
    lines += ["", *(f"{task}: {reason}" for task, reason in reasons.items())]
    if not reasons:
        lines.append("nothing to do: every task is committed")
    lines.append("This was a plan: nothing was run.")
    return "\n".join(lines)


def outstanding(plan: Plan, paths: RunPaths | None) -> dict[Task, str]:
    """Tasks without a commit that stands, with the reason."""
    if paths is None:
        return dict.fromkeys(plan.all_tasks(), "not committed")
    records = Records(paths)
    records.refresh(plan.all_tasks())
    committed = records.committed()
    reasons: dict[Task, str] = {}
    for task in plan.all_tasks():
        if task in records.corrupt:
            reasons[task] = records.corrupt[task]
        elif task not in committed:
            reasons[task] = "not committed"
        elif why := stale_because(task, plan.inputs(task), committed):
            reasons[task] = why
    return reasons


def validate_inputs(config: Config, folder: Path | None = None) -> Iterator[str]:
    """Look at everything the user gave that can be judged without torch; a line each.

    Args:
        folder: where rules are imported from. Default: the current one.

    Raises:
        PromptError, PluginError: something cannot be used.
    """
    check_is_free(RunPaths(Path(config.run_dir)))
    make_importable(str(folder or Path.cwd()))
    yield f"configuration: {config.iterations} iterations of {config.responses_per_iteration} responses"
    yield f"policy: {config.model.policy}, context {config.model.context_length} tokens"
    for name, component in config.reward.components.items():
        if isinstance(component, RewardModelConfig):
            yield f"reward {name}: model {component.path}, weight {component.weight:g}"
    load_rules(config)
    for name, component in config.reward.components.items():
        if isinstance(component, RuleConfig):
            yield f"reward {name}: rule {component.function}, weight {component.weight:g}"
    num_usable = 0
    for key, path in (("data.prompts", config.data.prompts), ("data.heldout", config.data.heldout)):
        if path:
            found = read_prompts(
                Path(path),
                prompt_column=config.data.prompt_column,
                id_column=config.data.id_column,
                split=config.data.split,
                reserved=reserved_columns(config),
            )
            yield f"{key}: {len(found.rows)} usable rows in {path}; {summarize(found.rejected)}"
            check_chat(key, path, found, Path(config.model.policy))
            num_usable = num_usable or len(found.rows)
    if num_usable < config.data.prompts_per_iteration:
        raise PromptError(
            f"data.prompts={config.data.prompts} has {num_usable} usable rows, fewer than "
            f"data.prompts_per_iteration={config.data.prompts_per_iteration}"
        )
    if config.model.trust_remote_code:
        yield "warning: model.trust_remote_code is on, Python code in the model directories will be run"
    yield "ok so far; token lengths are checked by the run's first task"


def check_chat(key: str, path: str, found: Prompts, policy: Path) -> None:
    """Raises PromptError when there are chat messages and no template to make text of them."""
    chats = sum(not isinstance(row.prompt, str) for row in found.rows)
    if chats and not has_chat_template(policy):
        raise PromptError(
            f"{key}={path} holds chat messages in {chats} rows, but the tokenizer of model.policy={policy} "
            "has no chat template; add chat_template to the tokenizer, or give prompts as plain text"
        )
