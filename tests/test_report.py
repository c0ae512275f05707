"""The report: self-contained, escaped, complete for whatever a run has; and it draws in a real browser."""

import dataclasses
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeline import journal
from pipeline.charts import CHARTS, figure
from pipeline.commits import Record, publish
from pipeline.config import Config, DataConfig, ModelConfig
from pipeline.metrics import describe
from pipeline.paths import RunPaths
from pipeline.report import Sample, choose_samples, page, read_rows, write_report
from pipeline.rewardconfig import RewardConfig, RewardModelConfig, RuleConfig
from pipeline.runs import Identity, Run
from pipeline.schemas import REWARD, ROLLOUT, conform
from pipeline.shards import write_shard
from pipeline.tasks import Stage, Task

CHROMIUM = shutil.which("chromium")
EVIL = "<img src=http://evil.example/x onerror=alert(1)> & </script><script>alert(2)</script>"
VOID = {"meta", "link", "img", "br"}
STAGES = {"rollout": 41.0, "reward": 12.0, "update": 33.0}


def make_row(i: int) -> dict[str, float]:
    """A row like those of a run with critic, KL, two components and an evaluation every other iteration."""
    p = 1 - math.exp(-i / 10)
    row: dict[str, float] = {"iteration": i, "policy_version": i, "epoch": 0, "samples": 64 * i}
    row |= {"reward/mean": p - 0.5, "reward/std": 0.6 - 0.2 * p, "reward/min": -2.0, "reward/max": 2.0}
    row |= {"reward/rm/mean": p - 0.4, "reward/brevity/mean": -0.1, "reward/rm/truncated": 0.0}
    row |= {"objective/kl": 6 * p, "objective/kl_per_token": 0.1 * p, "objective/kl_coef": 0.05}
    row |= {"policy/loss": -0.01 * p, "policy/entropy": 2.4 - p, "policy/approx_kl": 0.01 * p}
    row |= {"policy/clip_fraction_low": 0.04, "policy/clip_fraction_high": 0.06, "policy/grad_norm": 0.8}
    row |= {"value/loss": 0.3 - 0.2 * p, "value/explained_variance": 0.8 * p, "value/grad_norm": 2.0}
    row |= {"response_length/mean": 90 - 30 * p, "response_length/min": 3, "response_length/max": 128}
    row |= {
        "response_length/clip_ratio": 0.4 - 0.3 * p,
        "finish_reason/stop": 0.7,
        "finish_reason/length": 0.3,
    }
    for stage, seconds in STAGES.items():
        row |= {f"seconds/{stage}": seconds, f"seconds/compute/{stage}": 2 * seconds}
        row |= {f"memory_gib/{stage}": 3.0, f"tokens_per_second/{stage}": 570.0}
    row |= {"seconds/iteration": 86.0, "seconds/elapsed": 86.0 * i, "seconds/remaining": 86.0 * (20 - i)}
    if i % 2 == 0:
        row |= {"evaluate/reward": p - 0.4, "evaluate/reward/rm": p, "evaluate/response_length": 60.0}
    return row


def make_run(root: Path, rows: list[dict[str, float]]) -> Run:
    root.mkdir(parents=True, exist_ok=True)
    components = {"rm": RewardModelConfig(path="models/rm"), "brevity": RuleConfig(function="mine:brevity")}
    config = Config(
        name="demo",
        run_dir=str(root),
        iterations=20,
        model=ModelConfig(policy="models/policy"),
        data=DataConfig(prompts="prompts.jsonl", prompt_column=EVIL),
        reward=RewardConfig(components=components),
    )
    run = Run(RunPaths(root), config, Identity("0a1b2c", "demo", 1_760_000_000.0, "hash", "0.1.0"))
    journal.rewrite(run.paths.metrics, rows)
    return run


def commit_samples(run: Run, iteration: int, count: int = 9) -> None:
    """Rollout and reward shard 0 of an iteration; rewards ascend with the row."""
    common = {"prompt_id": [f"p{i}" for i in range(count)], "sample_index": [0] * count}
    rollout = common | {name: [[1]] * count for name in ("prompt_tokens", "response_tokens")}
    rollout |= {"response_mask": [[True]] * count, "rollout_logprobs": [[0.0]] * count}
    rollout |= {
        "finish_reason": ["stop"] * count,
        "num_turns": [1] * count,
        "prompt_messages": [None] * count,
        "response_messages": [None] * count,
    }
    rollout |= {"prompt_text": [f"{EVIL} {i}" for i in range(count)]}
    rollout |= {"response_text": [f"Antwort {i} äöü 好 {EVIL}" for i in range(count)]}
    reward = common | {"reward": [i / 2 for i in range(count)], "reference_logprobs": [None] * count}
    for stage, columns, schema in ((Stage.ROLLOUT, rollout, ROLLOUT), (Stage.REWARD, reward, REWARD)):
        task = Task(iteration, stage)
        entry = write_shard(run.paths, run.paths.task(task).data("one"), conform(columns, schema))
        assert publish(run.paths, record(task, (entry,)))


def record(task: Task, outputs=(), **metrics: float) -> Record:
    return Record(task, "one", outputs, {}, 0, 0, 9, "rollout/1", 0.0, 1.0, "host", 1, "", metrics)


class Page(HTMLParser):
    """Tags that load something, text outside of scripts, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.plots: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        assert not any(name.startswith("on") for name in values)
        self.loads += [values[name] for name in ("src", "href", "srcset", "data", "action") if name in values]
        self.plots += [values["id"]] if values.get("class") == "plot" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data + "\n"


def figures(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', text, re.DOTALL)
    return json.loads(found[1])


def without_plotly(text: str) -> str:
    return re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.DOTALL)


@pytest.fixture
def run(tmp_path) -> Run:
    run = make_run(tmp_path / "run", [make_row(i) for i in range(1, 13)])
    commit_samples(run, 12)
    run.paths.best.write_text(json.dumps({"iteration": 10, "reward": 0.232, "policy": "policy/00010.one"}))
    return run


def test_the_report_loads_nothing_from_elsewhere(run):
    text = write_report(run).read_text(encoding="utf-8")
    assert Page(text).loads == ["data:,"]
    own = without_plotly(text)
    assert "url(" not in own
    assert "@import" not in own
    assert "default-src 'none'" in own


def test_the_report_says_how_the_run_went(run):
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    for part in ("demo", "12 of 20", "-0.405 → 0.199", "0.232 (policy 10)", "17 min", "About 11 min"):
        assert part in text
    assert f"slurm-ppo resume {run.paths.root}" in text
    assert "prompts_per_iteration: 256" in text


def test_every_chart_has_a_place_a_figure_and_a_caption(run):
    text = write_report(run).read_text(encoding="utf-8")
    assert Page(text).plots == list(figures(text))
    shown = Page(text).text
    missing = {chart.title for chart in CHARTS if chart.title not in shown}
    assert missing == {"GPU hours", "GPU memory (GiB)", "Rollout engine against trainer"}
    assert "entropy of the next-token distribution, nats per token" in shown


def test_text_of_the_user_is_escaped(run):
    text = write_report(run).read_text(encoding="utf-8")
    assert EVIL not in text
    assert EVIL in Page(text).text  # parsed back, it is text
    assert "<img" not in without_plotly(text)


def test_names_of_numbers_are_escaped(run):
    timing = {"seconds/elapsed": 1.0, "seconds/remaining": 1.0}
    rows = [{"iteration": 1, f"finish_reason/{EVIL}": 0.5, "reward/mean": 1.0, **timing}]
    text = page(run, rows, [])
    made = figures(text)
    assert "&lt;img" in json.dumps(made)
    assert "<img" not in without_plotly(text)


def test_samples_are_the_lowest_the_median_and_the_highest(run):
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert [int(i) for i in re.findall(r"Antwort (\d+) äöü 好", text)] == [0, 1, 3, 4, 7, 8]
    few = [Sample("p", "r", reward) for reward in (2.0, 1.0)]
    assert choose_samples(few) == [("", few[1]), ("", few[0])]
    assert choose_samples([]) == []


@pytest.mark.parametrize("damage", ["record", "gone", "changed"])
def test_samples_that_cannot_be_read_are_said_to_be_so(run, damage):
    task = run.paths.task(Task(12, Stage.REWARD))
    if damage == "record":
        task.record.write_text("{")
    elif damage == "gone":
        task.data("one").unlink()
    else:
        task.data("one").write_bytes(task.data("one").read_bytes()[::-1])
    text = Page(write_report(run).read_text(encoding="utf-8")).text
    assert "The responses of iteration 12 are no longer" in text
    assert "Antwort" not in text


def test_a_run_without_rows_says_what_to_do(tmp_path):
    run = make_run(tmp_path / "my run", [])
    text = write_report(run).read_text(encoding="utf-8")
    assert "No iteration is committed yet" in text
    assert f"slurm-ppo resume '{run.paths.root}'" in Page(text).text
    assert Page(text).plots == []


def test_the_evaluation_of_policy_0_is_the_first_point(tmp_path):
    run = make_run(tmp_path / "run", [])
    metrics = {"evaluate/reward": -0.7, "response_tokens": 90.0, "responses": 9.0}
    assert publish(run.paths, record(Task(0, Stage.EVALUATE), **metrics))
    assert read_rows(run) == [{"iteration": 0, "evaluate/reward": -0.7, "evaluate/response_length": 10.0}]
    text = write_report(run).read_text(encoding="utf-8")
    assert "No iteration is committed yet" in text
    assert Page(text).plots == ["chart-0", "chart-13"]
    assert figures(text)["chart-0"]["data"][0]["y"] == [-0.7]


def test_numbers_that_a_run_lacks_leave_no_empty_chart(tmp_path):
    rows = [make_row(i) for i in range(1, 4)]
    lacking = ("value/", "objective/", "evaluate/", "reward/std")
    rows = [{name: row[name] for name in row if not name.startswith(lacking)} for row in rows]
    text = write_report(make_run(tmp_path / "run", rows)).read_text(encoding="utf-8")
    shown = Page(text).text
    for title in ("KL to the reference", "Explained variance", "Held-out response length"):
        assert title not in shown
    losses = next(made for made in figures(text).values() if made["data"][0]["name"] == "policy/loss")
    assert "yaxis2" not in losses["layout"]
    assert all(made["data"] for made in figures(text).values())


def test_numbers_that_are_not_finite_are_gaps(run):
    rows = [make_row(1), make_row(2) | {"policy/entropy": math.nan}, make_row(3)]
    (entropy,) = [made for made in figures(page(run, rows, [])).values() if "policy/entropy" in str(made)]
    assert entropy["data"][0]["y"][1] is None
    assert "nan" in Page(page(run, rows, [])).text


@pytest.mark.parametrize("count", [1, 12, 300])
def test_figures_are_what_plotly_takes(count):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    more = {"mismatch/kl": 0.0, "gpu_memory_gib/update": 1.0, "slurm/gpu_hours/update": 1.0}
    rows = [make_row(i) | more for i in range(1, count + 1)]
    names = list(rows[-1] | make_row(2))
    for chart in CHARTS:
        made = figure(chart, rows, names)
        assert made is not None
        graph_objects.Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "#000000", json.dumps(made))))


def test_charts_are_of_numbers_that_are_described():
    for chart in CHARTS:
        for name in (*chart.names.split(), *chart.lower.split()):
            assert describe(name) is not None or name in ("reward/mean-std", "reward/mean+std")


def test_seconds_are_of_stages_only():
    chart = next(chart for chart in CHARTS if chart.title == "Seconds per stage")
    made = figure(chart, [make_row(1)], list(make_row(1)))
    assert [trace["name"] for trace in made["data"]] == list(STAGES)


def test_writing_again_replaces_the_file(run):
    before = write_report(run).stat().st_ino
    assert write_report(dataclasses.replace(run)).stat().st_ino != before
    assert [path.name for path in run.paths.root.glob("*report*")] == ["report.html"]


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium")


def browse(tmp_path: Path, html: Path, *flags: str) -> tuple[str, list[str]]:
    """The page's document after its scripts ran, and what it wrote to the console."""
    quiet = "disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        *(f"--{q}" for q in quiet.split()),
    ]
    command += [f"--user-data-dir={tmp_path / 'chromium'}", "--enable-logging=stderr", "--v=0", *flags]
    command += ["--virtual-time-budget=10000", "--dump-dom", html.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@needs_chromium
def test_console_errors_would_be_noticed(tmp_path):
    html = tmp_path / "broken.html"
    html.write_text("<script>absent()</script>")
    assert browse(tmp_path, html)[1]


@needs_chromium
@pytest.mark.parametrize(("scheme", "blue"), [("1", "rgb(0, 114, 178)"), ("0", "rgb(86, 180, 233)")])
def test_all_charts_are_drawn_in_light_and_dark(tmp_path, run, scheme, blue):
    html = write_report(run)
    dom, console = browse(tmp_path, html, f"--blink-settings=preferredColorScheme={scheme}")
    assert console == []
    plots = Page(html.read_text(encoding="utf-8")).plots
    assert len(re.findall('class="plot js-plotly-plot"', dom)) == len(plots)
    assert blue in dom
    assert "var(--c0)" not in dom.rsplit('<div class="plot', 1)[0].split("<section>", 1)[1]


@needs_chromium
@pytest.mark.parametrize("count", [0, 1])
def test_short_runs_draw_without_errors(tmp_path, count):
    html = write_report(make_run(tmp_path / "run", [make_row(i + 1) for i in range(count)]))
    assert browse(tmp_path, html)[1] == []


@needs_chromium
@pytest.mark.parametrize("width", [390, 1440])
def test_only_the_table_is_wider_than_the_page(tmp_path, run, width):
    frame = tmp_path / "frame.html"
    source = (
        f"<iframe src='{write_report(run).as_uri()}' style='border:0;width:{width}px;height:900px'></iframe>"
    )
    page = "document.querySelector('iframe').contentDocument.documentElement"
    look = f"document.title = {page}.scrollWidth - {page}.clientWidth + ' too wide'"
    frame.write_text(f"{source}<script>onload = () => setTimeout(() => {{ {look} }}, 1000)</script>")
    dom, console = browse(tmp_path, frame, "--allow-file-access-from-files")
    assert console == []
    assert "<title>0 too wide</title>" in dom
