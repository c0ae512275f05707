"""Names on the hub: found in the cache of Hugging Face's tools, or the command that fetches them."""

from pathlib import Path

import pytest

from pipeline.config.hub import Kind, cache_of, located, way_to_have, with_blobs
from pipeline.config.issue import ConfigError
from pipeline.config.resolve import configure
from tests.support import tiny
from tests.support.light import write_jsonl


def cached(hub: Path, repo: str, content: Path, commit: str = "0f3a", revision: str = "main") -> Path:
    """A snapshot with links to blobs, as hf download makes it. Returns it."""
    folder = hub / repo
    snapshot = folder / "snapshots" / commit
    for path in sorted(one for one in content.rglob("*") if one.is_file()):
        link, blob = snapshot / path.relative_to(content), folder / "blobs" / f"{path.name}-{commit}"
        for one in (link, blob):
            one.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(path.read_bytes())
        link.symlink_to(blob)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    return snapshot


@pytest.fixture
def hub(tmp_path, inputs, monkeypatch) -> Path:
    hub = tmp_path / "hf" / "hub"
    cached(hub, "models--acme--tiny", inputs / "policy")
    cached(hub, "models--acme--judge", inputs / "reward_model", "77", "v2")
    (tmp_path / "sums" / "main").mkdir(parents=True)
    write_jsonl(tmp_path / "sums" / "main" / "train.jsonl", [{"id": i, "prompt": f"p{i}"} for i in range(8)])
    cached(hub, "datasets--acme--sums", tmp_path / "sums")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    return hub


def test_a_run_takes_models_and_prompts_by_their_names(hub, inputs, slurm_ppo, environment, tmp_path):
    given = tiny.overrides(
        inputs,
        tmp_path / "run",
        *("model.policy=acme/tiny", "reward.components.rm.path=acme/judge@v2"),
        *("data.prompts=acme/sums/main/train.jsonl", "iterations=1"),
    )
    env = environment | {"HF_HOME": str(tmp_path / "hf")}
    done = slurm_ppo("run", *given, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "run" / "config.yaml").read_text()
    for snapshot in ("models--acme--tiny/snapshots/0f3a", "models--acme--judge/snapshots/77"):
        assert str(hub / snapshot) in config
    assert f"{hub}/datasets--acme--sums/snapshots/0f3a/main/train.jsonl" in config


MISSING = {
    "model.policy=acme/tny": "no such directory, nor is it in the Hugging Face cache HUB; with network, as "
    "on a login node: hf download acme/tny",
    "model.policy=acme/tiny@v9": "hf download acme/tiny --revision v9",
    "data.prompts=acme/nums": "no such file or directory, nor is it in the Hugging Face cache HUB; with "
    "network, as on a login node: hf download acme/nums --repo-type dataset",
    "data.heldout.x=acme/nums": "hf download acme/nums --repo-type dataset",
    "data.prompts=acme/sums/test": "HUB/datasets--acme--sums/snapshots/0f3a/test: no such file or directory",
    "data.prompts=acme/train.jsonl": "acme/train.jsonl: no such file or directory",
}


@pytest.mark.parametrize("word", MISSING)
def test_what_is_not_in_the_cache_is_named_with_the_command_that_fetches_it(word, hub, inputs, tmp_path):
    with pytest.raises(ConfigError) as error:
        configure(
            tiny.overrides(inputs, tmp_path / "run", "evaluate.every=1", "data.heldout.y=x.jsonl", word)
        )
    key = word.partition("=")[0]
    (line,) = (one for one in str(error.value).splitlines() if one.startswith(f"{key}="))
    assert line.endswith(MISSING[word].replace("HUB", str(hub)))


def test_a_folder_of_the_users_goes_before_the_cache_and_a_wrong_name_in_one_is_no_name_on_the_hub(
    hub, tmp_path
):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    assert located("acme/tiny", Kind.MODEL) == str(tmp_path / "acme/tiny")
    assert located("acme/tyni", Kind.MODEL) == str(tmp_path / "acme/tyni")
    assert way_to_have(str(tmp_path / "acme/tyni"), Kind.MODEL) == ""
    assert located("models/tiny", Kind.MODEL) == str(tmp_path / "models/tiny"), "as recipes have it"
    assert way_to_have("models/tiny", Kind.MODEL) == ""
    assert "examples/recipes/gsm8k.py" in way_to_have("data/gsm8k/train.jsonl", Kind.DATASET)
    assert located("acme/judge@v2", Kind.MODEL) == str(hub / "models--acme--judge/snapshots/77")
    assert located("acme/judge@77", Kind.MODEL) == str(hub / "models--acme--judge/snapshots/77")


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["experiment=quickstart"], "slurm-ppo quickstart"),
        (
            ["--config-dir", "examples/arithmetic", "experiment=arithmetic"],
            "python examples/arithmetic/make_model.py --out .cache/arithmetic/policy",
        ),
        (
            ["--config-dir", "examples/calculator", "experiment=calculator"],
            "python examples/calculator/make_calculator.py --out .cache/calculator",
        ),
    ],
)
def test_an_example_before_its_files_are_made_names_what_makes_them(words, command, slurm_ppo, tmp_path):
    (tmp_path / "examples").symlink_to(Path("examples").absolute())
    done = slurm_ppo("validate", *words, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = (line for line in done.stderr.splitlines() if "model.policy=" in line)
    assert line.endswith(f"no such directory, made by: {command}"), done.stderr
    documented = [*Path("docs").rglob("*.md"), *Path("examples").rglob("README.md"), Path("README.md")]
    assert any(command in page.read_text() for page in documented)


def test_jobs_must_see_the_blobs_too(hub):
    found = located("acme/sums/main", Kind.DATASET)
    assert with_blobs(found) == str(hub / "datasets--acme--sums")
    assert with_blobs("/data/snapshots/x") == "/data/snapshots/x"


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({}, str(Path("~/.cache/huggingface/hub").expanduser())),
    ],
)
def test_the_cache_is_where_hugging_faces_tools_have_it(environ, folder):
    assert cache_of(environ) == Path(folder)
