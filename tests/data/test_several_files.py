"""Several prompt files with weights: each iteration has their shares, rows say whose they are, and a run that
is killed and resumed takes the same prompts."""

import gzip
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure
from pipeline.config.shares import divided, mixed
from pipeline.data.curriculum import curriculum_order
from pipeline.data.sampler import deal_portions, portions
from pipeline.run.commits import read_record
from pipeline.run.directory import load_run
from pipeline.run.schemas import PROMPTS, ROLLOUT
from pipeline.run.shards import read_shard
from pipeline.run.tasks import PREPARE, Stage, Task
from tests.support import tiny
from tests.support.killing import assert_same_end, hooked
from tests.support.light import write_jsonl
from tests.support.tables import sample

# --- dealing ---

WEIGHTS = st.dictionaries(st.sampled_from("abcde"), st.floats(0.01, 100), min_size=1)


@given(st.integers(1, 300), WEIGHTS)
def test_a_number_is_divided_by_weights_to_the_nearest(total, weights):
    found = divided(total, weights)
    assert sum(found.values()) == total
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    assert all(abs(found[name] - exact[name]) < 1 for name in weights)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4))
def test_every_part_of_a_mix_has_its_share_of_each_list(sizes):
    lists = {str(i): [(i, j) for j in range(size)] for i, size in enumerate(sizes)}
    order = mixed(lists)
    for i, size in enumerate(sizes):
        assert [item for item in order if item[0] == i] == lists[str(i)]
        for end in range(len(order) + 1):
            seen = sum(item[0] == i for item in order[:end])
            assert abs(seen - size * end / max(len(order), 1)) <= len(sizes)


@st.composite
def several(draw):
    num_shards = draw(st.integers(1, 3))
    shares = {name: draw(st.integers(0, 4)) for name in "abc"[: draw(st.integers(1, 3))]}
    shares["a"] += num_shards - (sum(shares.values()) % num_shards)
    counts = [(name, share + draw(st.integers(0, 12))) for name, share in shares.items()]
    return (
        counts,
        shares,
        {"num_shards": num_shards, "seed": draw(st.integers(0, 99)), "shuffle": draw(st.booleans())},
    )


@given(several(), st.integers(1, 12))
def test_every_iteration_has_each_files_share_and_no_prompt_twice(files, iteration):
    counts, shares, how = files
    known = portions(counts, shares)
    deals = [
        deal_portions(known, iteration=iteration, shard=shard, **how) for shard in range(how["num_shards"])
    ]
    dealt = [index for one in deals for index in one.indices]
    whose = [name for name, number in counts for _ in range(number)]
    assert Counter(whose[index] for index in dealt) == Counter({k: v for k, v in shares.items() if v})
    assert len(set(dealt)) == len(dealt)
    assert len({len(one.indices) for one in deals}) == 1


@given(several(), st.integers(0, 2))
def test_an_epoch_of_a_file_has_each_of_its_prompts_once_at_most(files, epoch):
    counts, shares, how = files
    (name, number), share = counts[0], shares["a"]
    turns, how = number // share, how | {"num_shards": 1}
    dealt = []
    for iteration in range(1 + epoch * turns, 1 + (epoch + 1) * turns):
        deal = deal_portions(portions(counts, shares), iteration=iteration, shard=0, **how)
        assert deal.epochs[name] == epoch
        assert deal.epoch == min(deal.epochs.values())
        dealt += [index for index in deal.indices if index < number]
    assert len(set(dealt)) == len(dealt) == turns * share


# --- a run ---


def words(inputs: Path, run_dir: Path, files: dict[str, Path], *more: str) -> list[str]:
    """A run of light tasks of several prompt files."""
    given = [word for word in tiny.overrides(inputs, run_dir) if not word.startswith("data.prompts=")]
    return [*given, *(f"data.prompts.{name}={path}" for name, path in files.items()), *more]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """Sums as JSON Lines, and compressed CSV whose ids are the same numbers."""
    folder = tmp_path_factory.mktemp("files")
    rows = [{"id": i, "prompt": f"say a{i}", "answer": str(i)} for i in range(12)]
    table = "id,prompt,answer,level\n" + "".join(f'{i},"tell ""b{i}"", now",{i},hard\n' for i in range(9))
    (folder / "words.csv.gz").write_bytes(gzip.compress(table.encode()))
    return {"sums": write_jsonl(folder / "sums.jsonl", rows), "words": folder / "words.csv.gz"}


WEIGHTED = ("data.weights={sums: 3, words: 1}", "rollout.num_shards=2")


@pytest.fixture(scope="module")
def weighted_run(inputs, files, slurm_ppo, tmp_path_factory) -> Path:
    run_dir = tmp_path_factory.mktemp("weighted") / "run"
    done = slurm_ppo("run", *words(inputs, run_dir, files, *WEIGHTED))
    assert done.returncode == 0, done.stderr
    return run_dir


def test_prompts_know_their_file_and_ids_of_two_files_do_not_collide(weighted_run):
    run = load_run(weighted_run)
    prompts = read_shard(run.paths, read_record(run.paths, PREPARE), PROMPTS)
    rows = {row["prompt_id"]: row for row in prompts.to_pylist()}
    assert len(rows) == prompts.num_rows == 21
    assert rows["words/3"]["prompt_source"] == "words"
    assert (rows["words/3"]["prompt_text"], rows["words/3"]["level"]) == ('tell "b3", now', "hard")
    assert (rows["sums/3"]["prompt_text"], rows["sums/3"]["level"]) == ("say a3", None)


def test_each_iteration_has_the_shares_and_rows_have_rewards_by_file(weighted_run):
    run = load_run(weighted_run)
    lines = (weighted_run / "metrics.jsonl").read_text().splitlines()
    for iteration, line in enumerate(lines, start=1):
        row = json.loads(line)
        sources: Counter[str] = Counter()
        for shard in range(2):
            record = read_record(run.paths, Task(iteration, Stage.ROLLOUT, shard))
            sources.update(read_shard(run.paths, record, ROLLOUT)["prompt_source"].to_pylist())
        assert sources == {"sums": 6, "words": 2}
        weighted = (6 * row["reward/mean/sums"] + 2 * row["reward/mean/words"]) / 8
        assert weighted == pytest.approx(row["reward/mean"])
        assert (row["validity/scored/sums"], row["validity/scored/words"]) == (6, 2)
        assert (row["epoch/sums"], row["epoch/words"], row["epoch"]) == (0, 0, 0)
        assert (row["data/prompts"], row["data/prompts/sums"], row["data/prompts/words"]) == (21, 12, 9)


def test_killed_in_its_second_rollout_it_ends_the_same(
    weighted_run, inputs, files, slurm_ppo, environment, tmp_path
):
    run_dir = tmp_path / "run"
    env = hooked(environment, tmp_path, "before-link:iterations/00002/rollout/shard-00001.json")
    more = (*WEIGHTED, "scheduler.max_attempts=1")
    killed = slurm_ppo("run", *words(inputs, run_dir, files, *more), env=env)
    assert list(tmp_path.glob("killed-*")), killed.stderr
    assert killed.returncode != 0
    resumed = slurm_ppo("resume", run_dir)
    assert resumed.returncode == 0, resumed.stderr
    assert_same_end(run_dir, weighted_run)


def test_without_weights_an_epoch_has_every_row_of_all_files(inputs, files, slurm_ppo, tmp_path):
    more = ("data.limit=4", "rollout.num_shards=1", "iterations=1")
    done = slurm_ppo("run", *words(inputs, tmp_path / "run", files, *more))
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "run")
    rollout = read_shard(run.paths, read_record(run.paths, Task(1, Stage.ROLLOUT, 0)), ROLLOUT)
    ids = rollout["prompt_id"].to_pylist()
    assert sorted(ids) == [f"{name}/{i}" for name in ("sums", "words") for i in range(4)]


# --- what is wrong is one line ---


def broken_gz(path: Path) -> Path:
    path.write_bytes(gzip.compress(b'{"prompt": "x", "id": 1}\n' * 99)[:-9])
    return path


def written(name: str, text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder / name

    return write


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    # second file, what validate says of it
    "too small": (
        written("b.csv", "id,prompt\n1,b\n"),
        "has 1 usable rows, fewer than the 4 that an iteration of 8 takes by data.weights.more=1",
    ),
    "broken gz": (
        lambda folder: broken_gz(folder / "b.jsonl.gz"),
        "b.jsonl.gz cannot be read (Truncated compressed stream)",
    ),
    "open quote": (
        written("b.csv", 'id,prompt\n1,"b\n2,c\n'),
        "b.csv is no CSV from line 2 on (unexpected end of data); put text with commas",
    ),
    "bare commas": (
        written("b.csv", "id,prompt\n1,b, c\n2,d, e\n"),
        "b.csv has no row that fits its header; line 2 has 3 fields, and the header has 2; put text",
    ),
    "mixed columns": (
        written("b.jsonl", '{"id": 1, "prompt": "b", "answer": [1]}\n'),
        "data.prompts: the files have columns of one name that cannot be put together",
    ),
    "reserved column": (
        written("b.csv", "id,prompt,prompt_source\n1,b,x\n"),
        "has columns with reserved names: 'prompt_source'; rename",
    ),
    "no column to sort by": (
        written("b.csv", "id,prompt,levle\n1,b,2\n"),
        "b.csv has no column 'answer' beside prompts and ids; set data.sort_by to one of: 'levle'",
    ),
}


@pytest.mark.parametrize("name", sample(sorted(WRONG), 1 / 3))
def test_validate_says_what_is_wrong_with_a_file_in_one_line(name, inputs, files, slurm_ppo, tmp_path):
    make, said = WRONG[name]
    (tmp_path / "more").mkdir()
    given = {"sums": files["sums"], "more": make(tmp_path / "more")}
    more = ("data.weights={sums: 1, more: 1}", *(("data.sort_by=answer",) if "sort" in name else ()))
    done = slurm_ppo("validate", *words(inputs, tmp_path / "run", given, *more))
    assert done.returncode == 2, done.stdout
    assert [line for line in done.stderr.splitlines() if said in line], done.stderr
    assert "Traceback" not in done.stderr


SETTINGS = {
    "data.weights={sums: 1, words: 0}": "data.weights.words: Input should be greater than or equal",
    "data.weights={sums: 1, words: -1}": "data.weights.words: Input should be greater than or equal",
    "data.weights={sums: 1, words: 1e300}": "data.weights.words: Input should be less than or equal",
    "data.weights={sums: 1}": "data.weights.words=null: each file needs a weight, and this one has none",
    "data.weights={sums: 1, words: 1, wrods: 1}": "data.weights.wrods=1.0: names no file of data.prompts",
    "data.weights={sums: 1, words: 0.001}": "data.weights.words=0.001: of data.prompts_per_iteration=8 "
    "prompts it gives none; raise either",
    "data.limit=0": "data.limit: Input should be greater than 0 (got 0)",
}


@pytest.mark.parametrize("word", SETTINGS)
def test_settings_of_several_files_that_cannot_be_meant_are_named(word, inputs, files, tmp_path):
    with pytest.raises(ConfigError) as error:
        configure(words(inputs, tmp_path / "run", files, word))
    assert SETTINGS[word] in str(error.value)


def test_what_does_not_go_together_is_named(inputs, files, tmp_path):
    twice = words(inputs, tmp_path / "run", {"one": files["sums"], "two": files["sums"]})
    with pytest.raises(
        ConfigError, match=r"data\.prompts\.two=.*sums\.jsonl: is the file of data\.prompts\.one too"
    ):
        configure(twice)
    alone = tiny.overrides(inputs, tmp_path / "run", "data.weights={a: 1}")
    with pytest.raises(ConfigError, match=r"^data\.weights=\{a: 1\}: is for several files"):
        configure(alone)
    listed = tiny.overrides(inputs, tmp_path / "run", "data.prompts=[a, b]")
    with pytest.raises(
        ConfigError, match=r"^data\.prompts: write FILE, or data\.prompts\.NAME=FILE for each"
    ):
        configure(listed)
    sorted_by = tiny.overrides(inputs, tmp_path / "run", "data.sort_by=-level", "data.columns=[answer]")
    with pytest.raises(ConfigError, match=r"^data\.sort_by=-level: .* write data\.columns=\[answer,level\]$"):
        configure(sorted_by)


def test_a_prompt_in_two_files_is_the_first_ones(inputs, slurm_ppo, tmp_path):
    rows = [{"prompt": f"say {i}"} for i in range(8)]
    given = {
        "first": write_jsonl(tmp_path / "a.jsonl", rows),
        "second": write_jsonl(
            tmp_path / "b.jsonl", [*rows[:2], *({"prompt": f"tell {i}"} for i in range(8))]
        ),
    }
    done = slurm_ppo("validate", *words(inputs, tmp_path / "run", given, "data.id_column=null"))
    assert done.returncode == 0, done.stderr
    assert f"duplicate_id: line 1: same prompt as line 1 of {given['first']}" in done.stdout
    assert "data.prompts.second: 8 usable rows" in done.stdout


# --- a curriculum ---


@given(
    st.lists(st.sampled_from([1, 2.5, "3", "-4", 10]), min_size=1),
    st.booleans(),
    st.booleans(),
    st.integers(0, 9),
)
def test_a_curriculum_goes_from_the_least_number_to_the_greatest(values, shuffle, descends, seed):
    order = curriculum_order(values, None, seed, shuffle, descends)
    numbers = [float(values[index]) for index in order]
    assert sorted(order) == list(range(len(values)))
    assert numbers == sorted(numbers, reverse=descends)
    if not shuffle:
        assert all(a < b for a, b in itertools.pairwise(order) if float(values[a]) == float(values[b]))
    files = ["ab"[index % 2] for index in range(len(values))]
    whose = [files[index] for index in curriculum_order(values, files, seed, shuffle, descends)]
    assert whose == sorted(files)


LEVELS = {"easy": "1", "mid": "2.5", "hard": "10"}  # as text 10 would come before 2.5


def test_a_run_goes_through_the_levels_of_its_prompts(inputs, slurm_ppo, tmp_path):
    rows = [{"id": i, "prompt": f"{(*LEVELS,)[i % 3]} {i}"} for i in range(24)]
    bad = [{"id": "x", "prompt": "x", "level": "unknown"}, {"id": "y", "prompt": "y"}]
    levelled = [row | {"level": LEVELS[row["prompt"].split()[0]]} for row in rows]
    path = write_jsonl(tmp_path / "levels.jsonl", [*bad, *levelled])
    more = (f"data.prompts={path}", "data.sort_by=-level", "iterations=3")
    done = slurm_ppo("run", *tiny.overrides(inputs, tmp_path / "run", *more))
    assert done.returncode == 0, done.stderr
    assert "no_number: line 1: level is str 'unknown', not a number" in done.stderr
    run, seen = load_run(tmp_path / "run"), []
    for iteration, shard in itertools.product((1, 2, 3), (0, 1)):
        record = read_record(run.paths, Task(iteration, Stage.ROLLOUT, shard))
        seen += read_shard(run.paths, record, ROLLOUT)["prompt_text"].to_pylist()
    assert [text.split()[0] for text in seen] == ["hard"] * 8 + ["mid"] * 8 + ["easy"] * 8
    assert len(set(seen)) == 24
    assert seen[:8] != sorted(seen[:8], key=lambda text: int(text.split()[1]))  # shuffled among equals
