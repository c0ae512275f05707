"""Checks of everything the user gave, for ``validate``. Starts no run."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from http.client import HTTPException, RemoteDisconnected
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import pyarrow as pa

from pipeline.checks.disk import check_disk
from pipeline.config.compose import to_yaml
from pipeline.config.findings import Findings
from pipeline.config.issue import ConfigError
from pipeline.config.model_files import has_chat_template
from pipeline.config.model_rules import model_notes
from pipeline.config.reward import (
    ENVIRONMENT_RULE,
    Component,
    RemoteConfig,
    RewardModelConfig,
    RuleConfig,
    unknown_field,
)
from pipeline.config.scheduler import ResourcesConfig
from pipeline.config.schema import Config
from pipeline.config.staleness_rules import staleness_warnings
from pipeline.data.chat import Rendering
from pipeline.data.checks import (
    Judged,
    check_sets,
    check_usable,
    judge,
    prompt_files,
    read_file,
    without_known,
)
from pipeline.data.prompts import Prompts, made_prompts
from pipeline.data.rendering import scoring_templates
from pipeline.data.rows import as_text
from pipeline.data.sources import scan
from pipeline.data.summary import lines, prompt_lengths
from pipeline.data.tables import PromptError
from pipeline.data.tokenizer_files import CannotLook, FileTokenizer, check_can_render, read_tokenizer
from pipeline.data.tokens import Ends, ends_of
from pipeline.executors.allocation import describe_allocation
from pipeline.executors.local_limits import describe_gpus
from pipeline.forecast.lengths import PromptLengths
from pipeline.notify.events import is_secret_name
from pipeline.plugins.environments import made_tasks
from pipeline.plugins.load import MissingImport, make_importable
from pipeline.plugins.row_checks import CHUNK_ROWS, Chunk, chunks_of, row_problems
from pipeline.plugins.trial import (
    NUM_ROWS,
    OpenRule,
    SampleRow,
    check_engines,
    check_is_there,
    check_rules,
    check_scheduler,
    first_look,
    open_rules,
)
from pipeline.process import within
from pipeline.run.directory import check_can_be_made, check_is_free
from pipeline.run.paths import RunPaths
from pipeline.text import exit_in_words

_TRIAL = "stages.trials.check"
"""Module that is run: it makes each model without its weights, and looks for NaN in these."""
_ANSWER = '{"problems": '
"""Beginning of the line that it answers with: libraries may print others."""
_TRIAL_SECONDS = 600.0
_SAID = 200
"""Characters that are shown of the last line of a process that failed."""
PING_SECONDS = 5.0
_NOT_YET = (502, 503, 504)
"""HTTP codes that a gateway answers for a service that is not there."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
"""Hosts that are asked directly: a proxy from the environment would reach itself, not this machine."""


def validate_inputs(
    config: Config,
    found: Findings,
    folder: Path | None = None,
    start: int = 0,
    with_weights: bool = False,
    lengths: list[PromptLengths] | None = None,
) -> Iterator[str]:
    """Check everything the user gave. Yields lines for people, and adds what cannot be used to ``found``: no
    problem hides another.

    Args:
        folder: folder that rules are imported from. Default: the current one.
        start: number of iterations that a fork has from its parent.
        with_weights: try the models too, which takes seconds; else the run's first task does.
        lengths: gets the lengths of the prompts of each file that could be tokenised.
    """
    with found.collecting("run_dir", is_last=True):
        check_is_free(RunPaths(Path(config.run_dir)))
        check_can_be_made(Path(config.run_dir))
    make_importable(str(folder or Path.cwd()))
    yield from [found.decided] * bool(found.decided)
    for what, lines_of in (
        ("GPUs", describe_gpus),
        ("the allocation", describe_allocation),
        ("sizes and number formats", describe_run),
        ("environments", describe_environments),
    ):
        with found.collecting(what):
            yield from lines_of(config)
    with found.collecting("disk space"):
        yield from check_disk(config, start)
    with found.collecting("config.json of the models"):
        yield from model_notes(config)
    samples = yield from validate_rows(config, found, [] if lengths is None else lengths)
    with found.collecting("the scheduler"):
        check_scheduler(config)
    with found.collecting("engines"):
        yield from check_engines(config)
    yield from describe_components(config, samples, found)
    if config.model.trust_remote_code:
        yield "warning: model.trust_remote_code is on, Python code in the model directories will be run"
    yield from staleness_warnings(config)
    yield from environment_warnings(config)
    if with_weights and not found:
        with found.collecting("weights of the models"):
            yield from try_models(config)


def describe_components(config: Config, samples: Sequence[SampleRow], found: Findings) -> Iterator[str]:
    """Yield a line for each component of the reward, and what services that are asked now answer."""
    for name, component in config.reward.components.items():
        yield f"reward {name}: {describe_component(component)}, weight {component.weight:g}"
        if isinstance(component, RemoteConfig):
            with found.collecting(f"reward.components.{name}"):
                yield from remote_warnings(name, component, samples, is_here=config.slurm is None)


def describe_run(config: Config) -> Iterator[str]:
    """Yield the sizes and number formats of a run."""
    yield f"configuration: {config.iterations} iterations of {config.responses_per_iteration} responses"
    yield f"policy: {config.model.policy}, context {config.model.context_length} tokens"
    formats = (config.update.precision, config.rollout_precision, config.reward_precision)
    yield "number formats: update {}, rollout {}, reward and reference {}".format(*formats)


def describe_environments(config: Config) -> Iterator[str]:
    """Yield a line for each environment that makes prompts, and a warning where none of them scores."""
    made, components = config.data.environment, config.reward.components.values()
    if made is None:
        return
    for name, share in made.shares.items():
        held_out = f" and {made.heldout_shares[name]:,} held-out ones" if config.evaluate.every else ""
        yield f"environment {name}: {made.components[name].source}, makes {share:,} tasks{held_out}"
    rules = [one.function for one in components if isinstance(one, RuleConfig)]
    if ENVIRONMENT_RULE not in rules:
        yield (
            "warning: data.environment: no component of the reward scores by the environments; "
            f"choose reward=environment, or give a rule the function {ENVIRONMENT_RULE}"
        )


def validate_rows(
    config: Config, found: Findings, lengths: list[PromptLengths]
) -> Generator[str, None, list[SampleRow]]:
    """Check the prompt files, and the rules on a row of each; rules that are not set rightly, or have no row,
    are imported only. Yields lines for people. Returns these rows, and adds to ``lengths`` those of the
    prompts."""
    files: list[Judged] = []
    with open_rules(config) as rules:
        sound = [rule for rule in rules if not found.names_below(f"reward.components.{rule.name}")]
        is_wrong = found.names("data.prompts") or found.names("data.environment")
        if not is_wrong and not found.names_below("data.environment"):
            with found.collecting("prompts"):
                try:
                    files = yield from validate_prompts(config, sound)
                except MissingImport as error:
                    if config.slurm is None:
                        raise
                    yield f"warning: {error}; compute nodes may have it, and no task was looked at"
        lengths += filter(None, map(prompt_lengths, files))
        samples = [sample for judged in files for sample in samples_of(judged, 1)]
        with found.collecting("rules on rows"):
            if samples:
                yield from check_rules(config, sound, samples)
                yield from first_look(config, sound, samples_of(files[0], NUM_ROWS))
        for rule in [rule for rule in rules if not samples or rule not in sound]:
            with found.collecting(f"the rule {rule.name}"):
                check_is_there(rule)
    return samples


def validate_prompts(config: Config, rules: Sequence[OpenRule]) -> Generator[str, None, list[Judged]]:
    """Check the prompt files. Yields lines for people, and returns the files. Raises PromptError,
    PluginError."""
    found, tokenizer, why_not = judged_files(config)
    files = [judged.without(dict(problems_in(rules, judged))) for judged in found]
    if tokenizer:
        yield from lines(files, config, tokenizer, tokenizer.special, known_ends(config, tokenizer))
    else:
        yield from lines(files, config)
        yield f"not looked at: lengths in tokens ({why_not}); the run's first task does"
    check_usable(config, files)
    for judged in files:
        yield from check_all_answers(config, rules, judged)
    return files


def problems_in(rules: Sequence[OpenRule], judged: Judged) -> Iterator[tuple[int, str]]:
    """Yield index and problem of rows that were looked at, and that a rule cannot score responses to."""
    return row_problems(rules, chunks_of(judged.found.columns), f"{judged.key}={judged.path}")


def check_all_answers(config: Config, rules: Sequence[OpenRule], judged: Judged) -> Iterator[str]:
    """Have rules check all rows of a file of which only a sample was judged. Yields a line for people.
    Raises PromptError where such rows are fatal, or too many."""
    found, names = judged.found, judged.found.columns.column_names
    if judged.is_made or found.num_rows == found.num_total or not names:
        return
    where: list[str] = []

    def chunks() -> Iterator[Chunk]:
        for places, values in scan(Path(judged.path), config.data.split, names, CHUNK_ROWS):
            where.extend(places)
            yield as_read(values, found.columns.schema)

    problems = list(row_problems(rules, chunks(), f"{judged.key}={judged.path}"))
    if not problems:
        return
    share, (index, why) = len(problems) / found.num_total, problems[0]
    text = (
        f"{len(problems):,} of all {found.num_total:,} rows are bad_answer, the first {where[index]}: {why}"
    )
    if share > config.data.max_dropped:
        raise PromptError(
            f"{judged.key}={judged.path}: {text} (data.max_dropped={config.data.max_dropped:g})"
        )
    yield f"{judged.key}: {text}"


def as_read(values: Chunk, schema: pa.Schema) -> Chunk:
    """Return values as reading the whole file makes them: text in a column of text."""
    text_types = (pa.string(), pa.large_string())
    texts = {field.name for field in schema if field.type in text_types}
    return {
        name: [as_text(one) for one in column] if name in texts else column for name, column in values.items()
    }


def judged_files(config: Config) -> tuple[list[Judged], FileTokenizer | None, str]:
    """Read the prompt files, or samples of large ones. Returns them, and the policy's tokenizer or why they
    were not tokenised. Raises PromptError where a whole file cannot be used."""
    found, unreadable = {}, Findings()
    made = made_tasks(config, NUM_ROWS)
    for key, path in prompt_files(config):
        with unreadable.collecting(f"{key}={path}"):
            is_made = key in made
            found[key, path] = (
                made_prompts(made[key], int(path)) if is_made else read_file(config, path, is_sample=True)
            )
    unreadable.refuse()
    for (key, path), prompts in found.items():
        check_chat(key, path, prompts, Path(config.model.policy))
    has_chats = any(not isinstance(row.prompt, str) for prompts in found.values() for row in prompts.rows)
    tokenizer, why_not = None, ""
    try:
        if has_chats:
            check_can_render()
        tokenizer = policy_tokenizer(config)
    except CannotLook as error:
        why_not = str(error)
    rendering = Rendering(time.time(), config.model.chat_template_arguments)
    templates = []
    if tokenizer and has_chats:
        templates = scoring_templates(config, rendering, scorers_tokenizer, tokenizer.is_same)
    judged = [
        judge(*names, prompts, config, rendering, tokenizer, templates) for names, prompts in found.items()
    ]
    judged = without_known(judged)
    check_sets(judged)
    return judged, tokenizer, why_not


def scorers_tokenizer(key: str, directory: str) -> FileTokenizer | None:
    """Read the tokenizer of a reward model or service; None where only the run's first task can."""
    with contextlib.suppress(CannotLook):
        return read_tokenizer(Path(directory))
    return None


def policy_tokenizer(config: Config) -> FileTokenizer:
    """Read the policy's tokenizer. Raises CannotLook."""
    if config.model.tokenizer:
        raise CannotLook(f"only tasks call model.tokenizer={config.model.tokenizer}")
    return read_tokenizer(Path(config.model.policy))


def known_ends(config: Config, tokenizer: FileTokenizer) -> Ends | None:
    """Return the ids that end a response; None where only tasks can look, as the template may name one."""
    if tokenizer.chat_template:
        try:
            check_can_render()
        except CannotLook:
            return None
    return ends_of(Path(config.model.policy), tokenizer, config.rollout.stop_token_ids)


def environment_warnings(config: Config) -> Iterator[str]:
    """Warn of job variables that look like secrets: their values lie in config.yaml and batch scripts."""
    scheduler = config.slurm
    if scheduler is None:
        return
    stages = {name: stage for name, stage in vars(scheduler).items() if isinstance(stage, ResourcesConfig)}
    stages |= {f"pools.{name}": pool for name, pool in scheduler.pools.items()}
    given = {"scheduler": scheduler.environment}
    given |= {f"scheduler.{name}": stage.environment for name, stage in stages.items()}
    for key, variables in given.items():
        for name in filter(is_secret_name, variables):
            yield (
                f"warning: {key}.environment.{name}: its value is written to files of the run, which others "
                "may read; export it where you submit, or read it from a file by scheduler.setup"
            )


def samples_of(judged: Judged, most: int) -> list[SampleRow]:
    """Return usable rows of a file to try rules on, spread over it, beginning with the first."""
    step = max(1, len(judged.kept) // most)
    chosen = judged.kept[::step][:most]
    return [sample_of(f"{judged.key}={judged.path}", judged.found, index) for index in chosen]


def sample_of(source: str, found: Prompts, index: int) -> SampleRow:
    """Return a row as rules get it, except for the chat template, which only tasks can apply."""
    row = found.rows[index]
    text = row.prompt if isinstance(row.prompt, str) else "\n".join(m.content or "" for m in row.prompt)
    columns = found.columns.slice(index, 1).to_pylist()[0] if found.columns.num_columns else {}
    return SampleRow(source, row.prompt_id, text, columns)


def describe_component(component: Component) -> str:
    if isinstance(component, RewardModelConfig):
        return f"model {component.path}"
    if isinstance(component, RemoteConfig):
        return f"{component.api} at {component.url}"
    return f"rule {component.function}"


def remote_warnings(
    name: str, remote: RemoteConfig, samples: Sequence[SampleRow], is_here: bool
) -> Iterator[str]:
    """Warn of an API key that is not set in this shell, and of a service that does not answer.

    Args:
        is_here: whether tasks will run on this machine too; elsewhere they may have both.

    Raises:
        PromptError: the judge's message names a column that a prompt file does not have.
        ConfigError: the service does not answer, and tasks will run on this machine.
    """
    key = f"reward.components.{name}"
    for sample in samples:
        if why := unknown_field(remote, list(sample.columns)):
            raise PromptError(f"{key}.template: {why} ({sample.source})")
    variable = remote.api_key_env
    if variable and not os.environ.get(variable):
        yield f"warning: {key}.api_key_env={variable}: is not set here; tasks need it"
    if not remote.trial:
        yield f"reward {name}: not asked whether it answers (trial=false)"
    elif why := why_silent(remote.url):
        text = f"{key}.url={remote.url}: nothing answers there ({why})"
        later = f"if it is started later, set {key}.trial=false"
        if is_here:
            raise ConfigError(f"{text}; {later}")
        yield f"warning: {text}; compute nodes may reach it; {later}"


def check_chat(key: str, path: str, found: Prompts, policy: Path) -> None:
    """Raise PromptError when there are chat messages and no template to make text of them."""
    chats = sum(not isinstance(row.prompt, str) for row in found.rows)
    if chats and not has_chat_template(policy):
        raise PromptError(
            f"{key}={path} holds chat messages in {chats} rows, but the tokenizer of model.policy={policy} "
            "has no chat template; add chat_template to the tokenizer, or give prompts as plain text"
        )


# --- models and services, tried ---


def try_models(config: Config) -> Iterator[str]:
    """Try whether the models can be loaded as they will be used, and whether their numbers are finite. Yields
    lines for people, also where that could not be tried. Raises ConfigError with every problem."""
    command = [sys.executable, "-P", "-m", _TRIAL]
    given = to_yaml(config)
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=_TRIAL_SECONDS)
    except subprocess.TimeoutExpired:
        yield _not_tried(f"took longer than {_TRIAL_SECONDS:g} s")
        return
    answers = [line for line in done.stdout.splitlines() if line.startswith(_ANSWER)]
    if done.returncode or not answers:
        last = (done.stderr.strip().splitlines() or [""])[-1][:_SAID]
        was = "was " if done.returncode < 0 else ""
        yield _not_tried(f"{was}{exit_in_words(done.returncode)}{f' ({last})' if last else ''}")
        return
    found = json.loads(answers[-1])
    if problems := found["problems"]:
        raise ConfigError("\n".join(problems))
    yield from found["lines"]


def _not_tried(why: str) -> str:
    return (
        "warning: not looked at: whether the models can be loaded, and their numbers: the process that does "
        f"so {why}; the run's first task does"
    )


def why_silent(url: str) -> str:
    """Return why nothing answers within :data:`PING_SECONDS`; empty if anything does, whatever it says."""
    return within(PING_SECONDS, lambda: _ask(url), f"no answer within {PING_SECONDS:g} s")


def _ask(url: str) -> str:
    handlers = [ProxyHandler({})] if urlsplit(url).hostname in _LOCAL else []
    try:
        build_opener(*handlers).open(Request(url, method="HEAD"), timeout=PING_SECONDS).close()
    except HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in _NOT_YET else ""
    except RemoteDisconnected:  # something is there, and does not know HEAD
        return ""
    except (OSError, HTTPException, ValueError) as error:
        return " ".join(str(getattr(error, "reason", error)).split()) or type(error).__name__
    return ""
