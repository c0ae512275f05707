"""Answers of a run to held-out tasks, by policy, and the curve as a picture."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pipeline import open_run
from pipeline.run.commits import require_record
from pipeline.run.directory import Run, load_run
from pipeline.run.schemas import ROLLOUT, component_column
from pipeline.run.shards import read_shard
from pipeline.run.tasks import Stage, Task

SCORE = component_column("environment")


@dataclass(frozen=True)
class Answer:
    """A greedy response to a held-out task."""

    task: str
    question: str
    right: str
    """The right answer."""
    said: str
    score: float
    """By reasoning-gym's scorer, without the reward for the form."""


@dataclass(frozen=True)
class Evaluation:
    """All of them, of one policy."""

    iteration: int
    answers: list[Answer]
    solved_at: float

    @property
    def share_right(self) -> float:
        """Share of the tasks whose answer has the full score: the number, and nothing else."""
        return sum(answer.score >= self.solved_at for answer in self.answers) / len(self.answers)


def evaluations(path: Path) -> list[Evaluation]:
    """Read the evaluations of a run, ascending. Raises BadCommit where one is missing or damaged."""
    run = load_run(path)
    return [_evaluation(run, iteration) for iteration in run.plan.evaluations()]


def _evaluation(run: Run, iteration: int) -> Evaluation:
    record = require_record(run.paths, Task(iteration, Stage.EVALUATE))
    rows = read_shard(run.paths, record, ROLLOUT).to_pylist()
    answers = [_answer(row) for row in rows]
    return Evaluation(iteration, answers, run.config.evaluate.solved_at)


def _answer(row: Mapping[str, Any]) -> Answer:
    question = question_of(row["prompt_text"])
    return Answer(row["prompt_id"], question, row["answer"], row["response_text"], row[SCORE])


def question_of(prompt: str) -> str:
    """The line of the user's message that ends the prompt."""
    return prompt.rpartition("user\n")[2].partition("<|im_end|>")[0].strip()


def training_scores(path: Path) -> list[tuple[int, float]]:
    """Mean score of each iteration's own responses, which are sampled, without the reward for the form."""
    rows, name = open_run(path).metrics().to_pylist(), f"{SCORE}/mean"
    return [(row["iteration"], row[name]) for row in rows if row.get(name) is not None]


# --- the picture ---

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 720, 320, 56, 40, 20, 48
_STYLE = """
.figure { --ink: #1b2430; --soft: #55606e; --edge: #c9d1db; --solved: #1769c4; --score: #b4610c; }
@media (prefers-color-scheme: dark) { .figure { --ink: #e8ecf1; --soft: #a5b0bd; --edge: #434d59;
--solved: #6db1ff; --score: #f0a357; } }
.figure text { font-family: system-ui, sans-serif; font-size: 14px; fill: var(--soft); }
.figure .solved { stroke: var(--solved); } .figure .score { stroke: var(--score); }
.figure text.solved { fill: var(--solved); stroke: none; }
.figure text.score { fill: var(--score); stroke: none; }
.figure polyline { fill: none; stroke-width: 2.2; } .figure circle { fill: var(--solved); }
.figure .grid { stroke: var(--edge); }
"""


def picture(title: str, solved: Sequence[tuple[int, float]], scores: Sequence[tuple[int, float]]) -> str:
    """Draw the share of right answers and the score in training, both from 0 to 1, by iteration, as SVG."""
    last = max(iteration for iteration, _ in (*solved, *scores)) or 1
    across, down = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def place(point: tuple[int, float]) -> tuple[float, float]:
        iteration, value = point
        return round(_LEFT + across * iteration / last, 1), round(_TOP + down * (1 - value), 1)

    def line(name: str, points: Sequence[tuple[int, float]]) -> str:
        joined = " ".join(f"{x},{y}" for x, y in map(place, points))
        return f'<polyline class="{name}" points="{joined}"/>'

    dots = [f'<circle cx="{x}" cy="{y}" r="4"/>' for x, y in map(place, solved)]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" class="figure" role="img" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        *_grid(last, place),
        line("score", scores),
        line("solved", solved),
        *dots,
        f'<text class="solved" x="{_LEFT}" y="22">share of right answers, held-out tasks, greedy</text>',
        f'<text class="score" x="{_WIDTH - _RIGHT}" y="22" text-anchor="end">'
        "mean score in training, sampled</text>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid(last: int, place: Callable[[tuple[int, float]], tuple[float, float]]) -> list[str]:
    """Lines and numbers of both axes."""
    parts = []
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        (left, y), (right, _) = place((0, value)), place((last, value))
        parts.append(f'<line class="grid" x1="{left}" y1="{y}" x2="{right}" y2="{y}"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 5}" text-anchor="end">{value:g}</text>')
    step = max(1, round(last / 8))
    for iteration in range(0, last + 1, step):
        x, y = place((iteration, 0.0))
        parts.append(f'<text x="{x}" y="{y + 20}" text-anchor="middle">{iteration}</text>')
    x, y = place((0, 0.0))
    return [*parts, f'<text x="{x}" y="{y + 40}">iteration</text>']
