"""What a command adds to a sweep: the same run is the same run, however its settings are written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.choices import known_groups
from pipeline.config.installed import Packages
from pipeline.run.directory import create_run, load_run
from pipeline.sweep.grid import SweepError, parse_grid
from pipeline.sweep.manifest import Sweep, SweepPoint, is_sweep, read_sweep, without, write_sweep
from pipeline.sweep.points import as_begun, check_folder, config_of, drafts_of, extended, key_of, run_folder
from slurm.sharedfiles import sealed
from tests.support import tiny


@pytest.fixture
def root(tmp_path) -> Path:
    return tmp_path / "lr"


@pytest.fixture
def ask(inputs, root):
    """What a command with more words makes of the sweep in ``root``."""

    def asked(*more: str, before: Sweep | None = None, seeds: int | None = None) -> Sweep:
        words = [w for w in tiny.overrides(inputs, root, "name=lr", *more) if w != "tracking=none"]
        own = {word.partition("=")[0] for word in more}
        words = [w for w in words if w in more or w.partition("=")[0] not in own]
        grid = parse_grid(words, known_groups(None), seeds, before.keys if before else ())
        return extended(root, before, grid, as_begun(root, before, drafts_of(grid, None)), "/home/me")

    return asked


def begin(root: Path, sweep: Sweep, number: int) -> None:
    """As if a run had committed something."""
    run = create_run(config_of(root, sweep.points[number]))
    run.paths.data.mkdir()
    (run.paths.data / "prompts.json").write_text("{}")


def test_points_have_names_folders_and_places_on_wandb_of_their_own(ask, root):
    sweep = ask("update.learning_rate=1e-6,3e-6", seeds=2)
    assert sweep.names[:2] == ("learning_rate_1e-6-seed_0", "learning_rate_1e-6-seed_1")
    config = config_of(root, sweep.points[1])
    assert config.name == "lr-learning_rate_1e-6-seed_1"
    assert (config.seed, config.update.learning_rate) == (1, 1e-6)
    assert config.run_dir == str(root / sweep.names[1])
    wandb = config.tracking.wandb
    assert (wandb.group, wandb.job_type) == ("lr", "learning_rate=1e-6")
    assert wandb.tags == ("learning_rate=1e-6", "seed=1")
    assert wandb.name == "lr: learning_rate=1e-6, seed=1"


def test_names_on_wandb_that_were_chosen_stay(ask, root):
    chosen = ("tracking.wandb.group=mine", "tracking.wandb.tags=[good]", "tracking.wandb.notes='try it'")
    wandb = config_of(root, ask("seed=0,1", *chosen).points[0]).tracking.wandb
    assert (wandb.group, wandb.tags, wandb.notes) == ("mine", ("good", "seed=0"), "try it")


def test_more_values_seeds_and_keys_add_runs_and_keep_those_that_are_there(ask):
    first = ask("update.learning_rate=1e-6,3e-6")
    more = ask("update.learning_rate=0.000001,1e-5", before=first)
    assert more.names == (*first.names, "learning_rate_1e-5")
    seeds = ask("update.learning_rate=1e-6,3e-6", before=first, seeds=2)
    assert seeds.names == (*first.names, "learning_rate_1e-6-seed_1", "learning_rate_3e-6-seed_1")
    keys = ask("update.learning_rate=1e-6", "update.epochs=2,1", before=first)
    assert keys.names == (*first.names, "learning_rate_1e-6-epochs_1")


def test_runs_that_have_begun_keep_what_was_decided_though_vllm_was_installed_since(ask, root, monkeypatch):
    on_gpus = ("scheduler=slurm", "rollout.engine=auto", "scheduler.rollout.gpus_per_node=a100:1")
    first = ask("seed=0,1", *on_gpus)
    begin(root, first, 0)
    vllm = Packages("0.11.0", models=frozenset({"LlamaForCausalLM"}))
    monkeypatch.setattr("pipeline.config.hardware.packages_of", lambda config, stage: vllm)
    assert ask("seed=0,1", *on_gpus, before=first) == first
    more = ask("seed=0,2", *on_gpus, before=first)
    assert more.names == ("seed_0", "seed_1", "seed_2")
    assert [config_of(root, point).rollout.engine for point in more.points] == ["transformers"] * 2 + ["vllm"]
    keys = ask("seed=0", "update.epochs=1,2", *on_gpus, before=first)
    assert keys.names == ("seed_0", "seed_1", "seed_0-epochs_1"), "however its settings are written"


def test_the_manifest_is_what_was_written(ask, root):
    sweep = ask("seed=0,1")
    write_sweep(root, sweep)
    assert is_sweep(root)
    assert read_sweep(root) == sweep
    assert without(sweep, "seed_0").names == ("seed_1",)
    with pytest.raises(SweepError, match=r"has no run 'seed_7'; it has: seed_0, seed_1"):
        sweep.point("seed_7")


def test_a_digit_that_has_flipped_on_disk_is_found_before_a_run_has_another_setting(ask, root):
    write_sweep(root, ask("seed=0,1", "iterations=3"))
    manifest = root / "sweep.json"
    manifest.write_text(manifest.read_text().replace('"iterations": 3', '"iterations": 7', 1))
    with pytest.raises(SweepError, match=r"cannot be read \(its content does not have the checksum"):
        read_sweep(root)


def test_names_on_wandb_tell_keys_apart_that_end_alike(ask, root):
    first = ask("rollout.num_threads=2,3")
    more = ask("evaluate.num_threads=2,3", before=first)
    wandbs = [config_of(root, point).tracking.wandb for point in more.points]
    types = [wandb.job_type for wandb in wandbs]
    assert types == ["num_threads=2", "num_threads=3", "evaluate.num_threads=2", "evaluate.num_threads=3"]
    assert [list(wandb.tags) for wandb in wandbs] == [[job_type] for job_type in types]
    assert len({wandb.name for wandb in wandbs}) == 4


def test_a_run_that_was_dropped_comes_back_and_no_other_takes_its_folder(ask, inputs, root, tmp_path):
    """Files of one name in several folders: their runs would have the same name, if it were free."""
    files = [tmp_path / name / "final.jsonl" for name in "abc"]
    for file in files:
        file.parent.mkdir()
        file.write_text((inputs / "prompts.jsonl").read_text())
    a, _, c = (f"data.prompts={file}" for file in files)
    sweep = ask(f"{a},{files[1]}")
    begin(root, sweep, 0)
    left = without(sweep, sweep.names[0])
    assert sweep.names[0] == "prompts_final.jsonl"

    other = ask(c, before=left)
    assert len({*sweep.names, *other.names}) == 3
    assert not (root / other.names[1]).exists()
    again = ask(a, before=other)
    assert again.names == (*other.names, sweep.names[0])
    assert load_run(root / sweep.names[0]).config.data.prompts == str(files[0])
    everything = ",".join(map(str, files))
    assert ask(f"data.prompts={everything}", before=again).names == again.names


def test_folders_of_dropped_runs_stay_theirs_when_the_fixed_settings_change(ask, root):
    names: list[str] = []
    for iterations in (3, 4, 5):
        (point,) = ask("seed=0,1", f"iterations={iterations}").points[:1]
        names.append(point.name)
        begin(root, replace(ask("seed=0,1"), points=(point,)), 0)
    assert names[0] == "seed_0"
    assert len({*names}) == 3
    assert [load_run(root / name).config.iterations for name in names] == [3, 4, 5]
    assert ask("seed=0,1", "iterations=4").names[0] == names[1]
    (root / names[1] / "config.yaml").write_text("changed: true\n")
    assert ask("seed=0,1", "iterations=4").names[0] not in names


def test_a_point_is_the_same_however_its_shards_are_kept(ask, root):
    """A default that changed, and changes no result, stops no sweep that has begun."""
    config = config_of(root, ask("seed=0,1").points[0])
    others = (replace(config, update=replace(config.update, keep_shards_last=n)) for n in (None, 2, 20))
    assert {key_of(other) for other in others} == {key_of(config)}


def test_a_version_with_more_settings_knows_the_runs_of_the_one_before(ask, root):
    """Its keys have their defaults there."""
    sweep = ask("seed=0,1")
    begin(root, sweep, 0)
    older = replace(sweep, points=tuple(map(_without_new_keys, sweep.points)))
    again = ask("seed=0,1,2", before=older)
    assert again.points[:2] == older.points
    assert again.names == ("seed_0", "seed_1", "seed_2")
    assert config_of(root, older.points[0]) == config_of(root, sweep.points[0])


def _without_new_keys(point: SweepPoint) -> SweepPoint:
    evaluate = {key: value for key, value in point.config["evaluate"].items() if key != "best_is"}
    return replace(point, config={**point.config, "evaluate": evaluate})


def test_settings_that_only_another_version_knows_are_one_line(ask, root):
    (point, _) = ask("seed=0,1").points
    with pytest.raises(SweepError, match=r"the settings of seed_0 are of another version.*later") as error:
        config_of(root, replace(point, config={**point.config, "later": 1}))
    assert "\n" not in str(error.value)


def test_a_sweep_can_be_moved(ask, root):
    moved = root.with_name("elsewhere")
    sweep = ask("seed=0,1")
    assert config_of(moved, sweep.points[0]).run_dir == str(moved / "seed_0")


def test_fixed_settings_change_until_a_run_has_begun(ask, root):
    sweep = ask("seed=0,1", "iterations=3")
    again = ask("seed=0,1", "iterations=4", before=sweep)
    assert [config_of(root, point).iterations for point in again.points] == [4, 4]
    begin(root, again, 0)
    with pytest.raises(SweepError, match=r"other settings \(iterations\), and 1 of its runs have begun"):
        ask("seed=0,1", "iterations=5", before=again)


def test_a_file_of_settings_that_was_edited_is_noticed(ask, inputs, root, tmp_path):
    """The points' settings say so: the words are the same."""
    sweep = ask("seed=0,1")
    points = tuple(replace(point, config={**point.config, "iterations": 9}) for point in sweep.points)
    changed = replace(sweep, points=points)
    assert ask("seed=0,1", before=changed).points == sweep.points
    begin(root, changed, 1)
    with pytest.raises(SweepError, match=r"other settings \(seed_0, seed_1\), and 1 of its runs have begun"):
        ask("seed=0,1", before=changed)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "cannot be read"),
        ("[]", "cannot be read"),
        (sealed({"format": 99}), "format 99"),
        ("{}", "cannot be read"),
    ],
)
def test_a_spoilt_manifest_is_one_line(root, content, said):
    root.mkdir()
    (root / "sweep.json").write_text(content)
    with pytest.raises(SweepError, match=said):
        read_sweep(root)


def test_where_no_sweep_can_begin(inputs, root, tmp_path):
    check_folder(root)
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="not a folder"):
        check_folder(tmp_path / "file")
    with pytest.raises(SweepError, match="other files"):
        check_folder(tmp_path)
    (root / "run.json").parent.mkdir()
    (root / "run.json").write_text("{}")
    with pytest.raises(SweepError, match="holds a run"):
        check_folder(root)


def test_a_points_run_is_what_a_single_run_of_the_same_words_would_be(ask, inputs, root):
    """But for its name, its place, and its names on W&B."""
    sweep = ask("seed=3,4")
    run = create_run(config_of(root, sweep.points[0]))
    assert run.paths.root == run_folder(root, sweep.points[0])
    assert load_run(run.paths.root).config.seed == 3
    assert json.loads((run.paths.run_json).read_text())["name"] == "lr-seed_3"
