"""Teachers' log-probabilities of responses (reward.teachers), and what the update reads of them."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.config.reward import TeacherConfig, strange_column
from pipeline.run.schemas import (
    TEACHER_LOGPROBS,
    TEACHER_TOP_LOGPROBS,
    TEACHER_TOP_TOKENS,
    TEACHER_WEIGHT,
    extra_columns,
    is_sampled,
    teacher_column,
    teacher_columns,
)
from stages.context import Context, UserError
from stages.files import columns


def teacher_log_probs(
    context: Context, rows: pa.Table, teachers: Mapping[str, TeacherConfig]
) -> dict[str, pa.ListArray]:
    """Return columns of log-probabilities by their names in a pool's scores: float32 per response token of
    the rows that a teacher is for, null for others; with algorithm.distillation.top_k what it finds most
    probable too.

    Raises:
        UserError: the rows lack a column of ``only``.
    """
    found: dict[str, pa.ListArray] = {}
    top_k = context.config.algorithm.distillation.top_k
    for name, teacher in teachers.items():
        from stages.rewards.reference import load_teacher, log_probs_of  # torch

        wanted = taught(name, teacher, rows)
        made = log_probs_of(context, rows, load_teacher(context, name, teacher), wanted, top_k)
        found |= zip(teacher_columns(name, top_k), made, strict=True)
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
    teachers: Mapping[str, TeacherConfig], given: Mapping[str, pa.Array | pa.ChunkedArray]
) -> pa.Table:
    """Return the columns TEACHER_LOGPROBS and TEACHER_WEIGHT, from those of :func:`teacher_log_probs`: the
    weighted mean over each response's teachers, and the sum of their weights; neither without teachers. With
    algorithm.distillation.top_k also TEACHER_TOP_TOKENS and TEACHER_TOP_LOGPROBS, of each response's teacher.

    Raises:
        UserError: a response has several teachers, and their likeliest tokens were asked for.
    """
    if not given:
        return pa.table({})
    whole = {
        name: pa.chunked_array([column]) if isinstance(column, pa.Array) else column
        for name, column in given.items()
    }
    chunked = {name: whole[teacher_column(name)] for name in teachers}
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
    found = {TEACHER_LOGPROBS: columns.column_of(flat, offsets, total == 0), TEACHER_WEIGHT: pa.array(total)}
    return pa.table(found | _top_columns(list(teachers), whole))


def _top_columns(names: Sequence[str], given: Mapping[str, pa.ChunkedArray]) -> dict[str, pa.Array]:
    """Return what the only teacher of each response finds most probable. Raises UserError."""
    if teacher_columns(names[0], 1)[1] not in given:
        return {}
    valid = np.array([pc.is_valid(given[teacher_column(name)]).to_numpy() for name in names])
    if (several := np.flatnonzero(valid.sum(axis=0) > 1)).size:
        first, second, *_ = (names[i] for i in np.flatnonzero(valid[:, several[0]]))
        raise UserError(
            f"reward.teachers: {first} and {second} teach the same response, which may have one teacher with "
            "algorithm.distillation.top_k; give them an only that tells responses apart, or leave top_k out"
        )
    found = {}
    for column in (TEACHER_TOP_TOKENS, TEACHER_TOP_LOGPROBS):
        of_teachers = [given[f"{column}/{name}"].combine_chunks() for name in names]
        found[column] = pc.coalesce(*of_teachers)
    return found
