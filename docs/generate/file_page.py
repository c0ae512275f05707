"""docs/reference/files.md: every file of a run directory, named by the code that joins its paths."""

import re
from pathlib import Path

from docs.generate.markdown import code, page, table
from pipeline.run.packed import archives, next_log_archive
from pipeline.run.paths import BASE, RunPaths
from pipeline.run.shards import LISTING
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.run.twofold import both_of

_RUN = RunPaths(Path("RUN"))
_TASK = _RUN.task(Task(7, Stage.ROLLOUT, 3))
_PREPARE = _RUN.task(PREPARE)
_EVALUATE = _RUN.task(Task(7, Stage.EVALUATE))
_BENCHMARK = _RUN.task(Task(7, Stage.BENCHMARK))
_UPDATE = _RUN.task(Task(7, Stage.UPDATE))
_STATE = _RUN.task(Task(7, Stage.STATE))

SECTIONS: dict[str, list[tuple[Path, str]]] = {
    "The run": [
        (
            _RUN.run_json,
            "identity: id, name, when made and from what, configuration's hash, parent, place on W&B; "
            "with a checksum",
        ),
        (_RUN.config_yaml, "the resolved configuration, frozen"),
        (_RUN.run_copy, "the identity once more: the run's oldest files are the first that a purge takes"),
        (_RUN.config_copy, "the configuration once more"),
        (_RUN.settings, "settings that were changed while the run went on, by whom and when"),
        (_RUN.settings_copy, "the same once more"),
        (_RUN.forecast, "what was expected of the run when it began: prompt lengths, memory, seconds"),
        (_RUN.metrics, "one flat row per iteration: see [Metrics](metrics.md)"),
        (_RUN.rows / "00007.json", "a row as it was published, once, before its line of metrics.jsonl"),
        (_RUN.spans, "when and where every attempt waited and ran, a line per iteration"),
        (_RUN.events, "every launch, failure, repair and finding, with the reason"),
        (_RUN.evaluations, "what evaluate.command said of policies, or why it is missing, a line for each"),
        (_RUN.best, "the best evaluated policy, and its reward"),
        (_RUN.report, "the report"),
        (_RUN.locks / "000004.json", "the driver's lease: the highest number holds"),
        (
            _RUN.locks / "notify" / "000004.json",
            "likewise of who notifies; `wandb-offline`, `wandb-online`: who writes",
        ),
        (_RUN.wandb_online, "which rows W&B was sent"),
        (_RUN.wandb / "ANY", "W&B's own files"),
        (_RUN.tensorboard / "ID" / "events.out.tfevents.ANY", "rows as TensorBoard reads them"),
        (_RUN.mlflow / "ANY", "MLflow's file store"),
        (_RUN.mlflow / "online.json", "which rows MLflow was sent; TensorBoard likewise"),
        (_RUN.compiled / "ANY", "what vLLM compiled"),
        (_RUN.superseded / "ANY", "what going back has moved aside; nothing needs it"),
    ],
    "Prompts": [
        (_PREPARE.record, "commit record of prepare"),
        (_PREPARE.log(1), "what its first attempt printed"),
        (_PREPARE.data("ATTEMPT"), "usable prompts, tokenised"),
        (
            _PREPARE.data("ATTEMPT", LISTING, "json"),
            "the chunks of that file: rows, bytes and hash of each; rows of each prompt file that has a name",
        ),
        (_PREPARE.data("ATTEMPT", "heldout"), "usable held-out prompts"),
        (_PREPARE.data("ATTEMPT", "rejected", "jsonl"), "rows that cannot be used, with the reason"),
        (_PREPARE.data("ATTEMPT", "normalization", "json"), "reward models' mean and deviation"),
    ],
    "A task": [
        (_TASK.record, "commit record: names the attempt that won, its files and their hashes"),
        (_TASK.data("ATTEMPT"), "its data: see [Shards](shards.md); one file per attempt, never overwritten"),
        (_BENCHMARK.data("ATTEMPT", suffix="json"), "numbers of a benchmark, or why it is missing"),
        (_BENCHMARK.data("ATTEMPT", "written", "json"), "what its program writes, until that is read"),
        (_TASK.partial_record("ATTEMPT"), "what an unfinished attempt saved"),
        (_TASK.partial("ATTEMPT", "SAVE"), "its data, which no reader takes for a result"),
        (_UPDATE.thinned, "which folders of this commit were removed to save space"),
        (archives(_RUN, 7)[1], "shards, records, logs and submissions of an old iteration: a plain zip"),
        (next_log_archive(_RUN, 7), "logs of its shards, where there are many, once it has its row"),
        (_TASK.log(1), "what the first attempt printed"),
        (_TASK.failure(1), "why it failed, by its own report"),
        (_RUN.endings(7), "how attempts at the iteration's tasks ended without a commit that stands"),
        (both_of(_RUN.endings(7))[1], "the other copy"),
    ],
    "What an update commits": [
        (
            _TASK.policy("ATTEMPT") / "ANY",
            "the policy, a Hugging Face directory; with `update.lora` the adapter alone, in `adapter/`",
        ),
        (_TASK.policy("ATTEMPT") / BASE, "says which policy the adapter is for; in no folder of a model"),
        (
            _UPDATE.data("ATTEMPT", "learned", "json"),
            "small numbers: KL coefficient, moments of rewards, counters",
        ),
        (_STATE.record, "commit record of the trainer's state, which comes after the policy's"),
        (_STATE.state("ATTEMPT") / "ANY", "the trainer's state: critic, optimizer's moments, fp32 weights"),
        (_STATE.thinned, "whether the state was removed to save space"),
        (
            _TASK.reference("ATTEMPT") / "ANY",
            "the average of policies that the KL is measured to from here on (algorithm.kl.sync_weight)",
        ),
        (_TASK.critic("ATTEMPT") / "ANY", "the critic, of trainers that commit all at once"),
        (_TASK.trainer("ATTEMPT") / "ANY", "the rest of the trainer's state, of such trainers"),
        (_RUN.policies / "00007", "a link to the winning attempt's, for people; `state/00007` likewise"),
        (_RUN.policies / "best", "a link to the best evaluated policy"),
    ],
    "On Slurm": [
        (_RUN.control, "what people asked for; twice, since nothing else says the same"),
        (both_of(_RUN.control)[1], "the other copy"),
        (_RUN.slurm / "cluster.json", "what the cluster allows"),
        (_RUN.slurm / "queue.json", "squeue's last answer, where no folder of the user's can hold it"),
        (_RUN.slurm / "queue.claim", "who asks squeue now, or got no answer; beside either"),
        (_RUN.slurm / "accounting.json", "when sacct was asked last, and whether there is any accounting"),
        (_RUN.submissions(7) / "rollout-1-0.json", "a submission: its task list"),
        (_RUN.submissions(7) / "rollout-1-0.sh", "its batch script"),
        (_RUN.submissions(7) / "rollout-1-0.state.json", "its job id, and what it waits for"),
        (
            _RUN.slurm / "workers" / "4711_3r0.json",
            "what a [worker](../explanation/workers.md) says of itself",
        ),
        (
            _RUN.slurm / "workers" / "local-000001-0000002r0.json",
            "the same of one of this machine or of an allocation",
        ),
        (_RUN.slurm / "workers" / "local-000001-0000002r0.gone", "says that it ended with its driver"),
        (_RUN.slurm / "workers" / "4711_3r0.gone", "says that its job has ended, as Slurm knows"),
        (_RUN.slurm / "places.json", "workers that make place for others once they have nothing to do"),
        (_RUN.slurm / "nodes.json", "nodes of the run's partitions, as sinfo showed them last"),
        (_RUN.slurm / "silent.json", "workers that have sent no heartbeat for minutes, and since when"),
        (_TASK.record.with_name("shard-00003.claim-1.json"), "says which worker has taken the task"),
        (_PREPARE.record.with_name("prompts.claim-1.json"), "the same of the task that prepares"),
        (_RUN.slurm / "passes" / "wanted", "asks for a pass"),
        (_RUN.slurm / "passes" / "later", "asks for a pass at a time"),
        (_RUN.slurm / "passes" / "started", "when a worker last started a process for a pass"),
        (_RUN.slurm / "passes" / "last", "when the last pass was made that a worker has started"),
        (_RUN.slurm / "passes" / "000004.json", "the lease of who makes it"),
        (_RUN.log_root / "passes" / "passes.log", "what such passes printed"),
        (
            _RUN.log_root / "workers" / "local-000001-0000002r0.log",
            "what a worker of this machine printed between tasks, and of a state that it wrote beside one",
        ),
        (
            _RUN.log_root / "00007-rollout" / "worker-1" / "shard-00003.log",
            "what a worker printed between tasks",
        ),
        (_RUN.slurm_log, "what Slurm said of jobs of stages, and what these could write nowhere else"),
        (_RUN.log_root / "00000-prepare" / "worker-1" / "prompts.log", "the same of the one that prepares"),
        (
            _RUN.log_root / "00000-driver" / "attempt-1" / "driver.log",
            "what a driver job printed, each line with time and level",
        ),
        (_RUN.log_root / "guard" / "guard.log", "driver jobs that start by the clock: see `check_minutes`"),
    ],
}

ABOUT = """\
Everything that a run has is in its directory. Numbers stand for any: iteration 7, shard 3; `rollout` for any
stage, or `score-POOL`. `ATTEMPT` is one try's id, such as `1-7c85d2e6`.
[What a run has on disk](../explanation/run_directory.md) says why it lies so."""


def file_page() -> str:
    return page("Files of a run", ABOUT, *(_section(title, rows) for title, rows in SECTIONS.items()))


def patterns() -> list[re.Pattern[str]]:
    """What the page says, as expressions that match paths relative to a run directory."""
    return [_pattern(path) for rows in SECTIONS.values() for path, _ in rows]


def undescribed(run_dir: Path) -> list[str]:
    """Files of a run directory that the page does not mention."""
    files = [path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if not path.is_dir()]
    described = patterns()
    return [name for name in files if not any(pattern.fullmatch(name) for pattern in described)]


def _section(title: str, rows: list[tuple[Path, str]]) -> str:
    shown = ((code(path.as_posix().replace("/ANY", "/")), meaning) for path, meaning in rows)
    return f"## {title}\n\n{table(('file', 'what it is'), shown)}"


def _pattern(path: Path) -> re.Pattern[str]:
    text = re.escape(path.relative_to("RUN").as_posix())
    for word, expression in (
        ("ATTEMPT", "[^/.]+"),
        ("SAVE", "[^/.]+"),
        ("ANY", ".+"),
        ("notify", "[a-z-]+"),
        ("rollout", "[a-z]+(-[a-z0-9_]+)?"),
        ("update", "[a-z]+"),
    ):
        text = text.replace(word, expression)
    return re.compile(_digits(text))


def _digits(text: str) -> str:
    """Numbers of the path, not those inside character classes, become any number."""
    return re.sub(r"(\[[^\]]*\])|\d+", lambda m: m[1] or r"\d+", text)
