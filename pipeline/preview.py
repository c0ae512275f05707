"""Whether a run can do what it is asked to: validate. Runs nothing."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import Config
from pipeline.data import PromptError, Prompts, read_prompts, summarize
from pipeline.modeldirs import has_chat_template
from pipeline.notifychecks import notify_warnings
from pipeline.paths import RunPaths
from pipeline.plugincheck import Sample, check_engines, check_rules, check_scheduler
from pipeline.plugins import make_importable
from pipeline.rewardchecks import unknown_field
from pipeline.rewardconfig import Component, RemoteConfig, RewardModelConfig
from pipeline.runs import check_is_free
from pipeline.schemas import reserved_columns


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
    num_usable = 0
    samples = []
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
            samples += [sample_of(f"{key}={path}", found, index) for index in range(len(found.rows))[:1]]
    if num_usable < config.data.prompts_per_iteration:
        raise PromptError(
            f"data.prompts={config.data.prompts} has {num_usable} usable rows, fewer than "
            f"data.prompts_per_iteration={config.data.prompts_per_iteration}"
        )
    check_rules(config, samples)
    check_scheduler(config)
    yield from check_engines(config)
    for name, component in config.reward.components.items():
        yield f"reward {name}: {describe_component(component)}, weight {component.weight:g}"
        yield from remote_warnings(name, component, samples)
    if config.model.trust_remote_code:
        yield "warning: model.trust_remote_code is on, Python code in the model directories will be run"
    yield from notify_warnings(config.notify)
    yield "ok so far; token lengths are checked by the run's first task"


def sample_of(source: str, found: Prompts, index: int) -> Sample:
    """A row as rules get it, but for the chat template, which only tasks can apply."""
    row = found.rows[index]
    text = row.prompt if isinstance(row.prompt, str) else "\n".join(m.content for m in row.prompt)
    columns = found.columns.slice(index, 1).to_pylist()[0] if found.columns.num_columns else {}
    return Sample(source, row.prompt_id, text, columns)


def describe_component(component: Component) -> str:
    if isinstance(component, RewardModelConfig):
        return f"model {component.path}"
    if isinstance(component, RemoteConfig):
        return f"{component.api} at {component.url}"
    return f"rule {component.function}"


def remote_warnings(name: str, component: Component, samples: Sequence[Sample]) -> Iterator[str]:
    """What tasks need and this shell lacks; they may get it elsewhere.

    Raises:
        PromptError: the judge's message names a column that a prompt file does not have.
    """
    if isinstance(component, RemoteConfig):
        for sample in samples:
            if why := unknown_field(component, list(sample.columns)):
                raise PromptError(f"reward.components.{name}.template: {why} ({sample.source})")
        variable = component.api_key_env
        if variable and not os.environ.get(variable):
            yield f"warning: reward.components.{name}.api_key_env={variable}: is not set here; tasks need it"


def check_chat(key: str, path: str, found: Prompts, policy: Path) -> None:
    """Raises PromptError when there are chat messages and no template to make text of them."""
    chats = sum(not isinstance(row.prompt, str) for row in found.rows)
    if chats and not has_chat_template(policy):
        raise PromptError(
            f"{key}={path} holds chat messages in {chats} rows, but the tokenizer of model.policy={policy} "
            "has no chat template; add chat_template to the tokenizer, or give prompts as plain text"
        )
