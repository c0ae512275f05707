"""How far a run has come, found again and again as it goes on and back."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from pipeline.run.paths import RunPaths
from pipeline.run.plan import Plan
from pipeline.run.records import Frontier, FrontierFinder, find_frontier
from pipeline.run.tasks import PREPARE, Stage, Task

PLAN = Plan(iterations=6, num_shards=1, evaluate_every=2, benchmark_every=3)
CHAINS = {stage: [Task(k, stage) for k in range(1, 7)] for stage in (Stage.UPDATE,)} | {
    Stage.EVALUATE: PLAN.evaluation_tasks(),
    Stage.BENCHMARK: PLAN.benchmark_tasks(),
}
moves = st.lists(
    st.tuples(st.sampled_from(["update", "evaluate", "benchmark", "back"]), st.integers(1, 3)), max_size=12
)


def record(paths: RunPaths, task: Task) -> Path:
    return paths.task(task).record


@given(moves)
def test_who_knows_where_a_run_was_finds_where_it_is(tmp_path_factory, moves):
    paths = RunPaths(tmp_path_factory.mktemp("run"))
    finder = FrontierFinder(PLAN, paths)
    assert finder.find() == Frontier(-1, 0)
    write(record(paths, PREPARE))
    for what, number in moves:
        if what == "back":
            go_back(paths, find_frontier(PLAN, paths).updated - number)
        else:
            chain = CHAINS[Stage(what)]
            written = sum(record(paths, task).exists() for task in chain)
            for task in chain[written : written + number]:
                if task.stage is Stage.UPDATE or record(paths, Task(task.iteration, Stage.UPDATE)).exists():
                    write(record(paths, task))
        assert finder.find() == find_frontier(PLAN, paths)


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def go_back(paths: RunPaths, iteration: int) -> None:
    """Remove what was committed after an iteration, the newest first."""
    for chain in CHAINS.values():
        for task in reversed([task for task in chain if task.iteration > iteration]):
            record(paths, task).unlink(missing_ok=True)


def test_a_gap_is_seen_with_the_next_search(tmp_path):
    paths = RunPaths(tmp_path)
    finder = FrontierFinder(PLAN, paths)
    for task in (PREPARE, *CHAINS[Stage.UPDATE][:5]):
        write(record(paths, task))
    assert finder.find().updated == 5
    record(paths, CHAINS[Stage.UPDATE][1]).unlink()
    finder.searched = float("-inf")
    assert finder.find().updated == 1
