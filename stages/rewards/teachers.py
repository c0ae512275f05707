"""Teachers' log-probabilities of responses (reward.teachers), and what the update reads of them."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.reward import TeacherConfig, strange_column
from pipeline.run.schemas import TEACHER_LOGPROBS, TEACHER_WEIGHT, extra_columns, is_sampled
from stages.context import Context, UserError
from stages.files import columns


def teacher_log_probs(
    context: Context, rows: pa.Table, teachers: Mapping[str, TeacherConfig]
) -> dict[str, pa.ListArray]:
    """Return a column by teacher: float32 per response token of the rows that it teaches, null for others.

    Raises:
        UserError: the rows lack a column of ``only``.
    """
    found = {}
    for name, teacher in teachers.items():
        from stages.rewards.reference import load_teacher, log_probs_of  # torch

        wanted = taught(name, teacher, rows)
        found[name] = log_probs_of(context, rows, load_teacher(context, name, teacher), wanted)
    return found


def load_first_teacher(context: Context, teachers: Mapping[str, TeacherConfig]) -> None:
    """Load the first of these, if there is one."""
    for name, teacher in list(teachers.items())[:1]:
        from stages.rewards.reference import load_teacher  # torch

        load_teacher(context, name, teacher)


def taught(name: str, teacher: TeacherConfig, rows: pa.Table) -> np.ndarray:
    """Return [rows] true for the samples whose prompt a teacher is for. Raises UserError."""
    if why := strange_column(teacher, extra_columns(rows).column_names):
        raise UserError(f"reward.teachers.{name}.only: {why}")
    chosen = np.array(is_sampled(rows), dtype=bool)
    for column, value in teacher.only.items():
        chosen &= np.array([found == value for found in rows[column].to_pylist()], dtype=bool)
    return chosen


def combined(
    teachers: Mapping[str, TeacherConfig], log_probs: Mapping[str, pa.Array | pa.ChunkedArray]
) -> pa.Table:
    """Return the columns TEACHER_LOGPROBS and TEACHER_WEIGHT, from those of :func:`teacher_log_probs`: the
    weighted mean over each response's teachers, and the sum of their weights; neither without teachers."""
    if not log_probs:
        return pa.table({})
    chunked = {
        name: pa.chunked_array([column]) if isinstance(column, pa.Array) else column
        for name, column in log_probs.items()
    }
    lists = {name: columns.lists(column) for name, column in chunked.items()}
    weights = {
        name: np.where(pc.is_valid(column).to_numpy(), teachers[name].weight, 0.0)
        for name, column in chunked.items()
    }
    total = np.sum([*weights.values()], axis=0)
    means = [
        np.sum(
            [weights[name][row] * lists[name][row].astype(float) for name in lists if weights[name][row]], 0
        )
        / total[row]
        if total[row]
        else np.empty(0)
        for row in range(len(total))
    ]
    offsets = np.cumsum([0, *map(len, means)])
    flat = np.concatenate([*means, np.empty(0)]).astype(np.float32)
    return pa.table(
        {TEACHER_LOGPROBS: columns.column_of(flat, offsets, total == 0), TEACHER_WEIGHT: pa.array(total)}
    )
