"""The report: self-contained, escaped, complete for whatever a run has, and true to the run's rows."""

import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.job_kinds import DRIVER
from pipeline.config.schema import DataConfig
from pipeline.forecast.lengths import lengths_of
from pipeline.forecast.seconds import SecondsForecast
from pipeline.metrics.advice_input import Advice, Rule, Severity
from pipeline.metrics.catalogue import CHARTS, describe
from pipeline.metrics.spans import stage_totals
from pipeline.metrics.terminal import COLUMNS, cells
from pipeline.report import read_rows, write_report
from pipeline.report.data import read_report, sampled_iterations
from pipeline.report.figures import figure, overlay, thinned
from pipeline.report.html import environment, visible
from pipeline.report.page import chart_id, page
from pipeline.report.settings import settings_apart, settings_table
from pipeline.run import journal
from pipeline.run.commits import publish
from pipeline.run.directory import Run
from pipeline.run.forecast import Forecast, write_forecast
from pipeline.run.identity import Parent
from pipeline.run.tasks import PREPARE, Stage, Task
from pipeline.workers.beats import Doing, Reason
from tests.support.beats import beat, write_beats
from tests.support.reportrun import (
    SLURM,
    STAGES,
    commit_shard,
    make_row,
    make_run,
    make_spans,
    record,
    slurm_row,
    write_spans,
)
from tests.support.reports import data_of

EVIL = "<img src=http://evil.example/x onerror=alert(1)> & </script><script>alert(2)</script>"
BIDI = "user\u202etxt.exe\u2066 \x1b[31m\x07\u200b"
VOID = {"meta", "link", "img", "br", "input"}
SHARDS = 2


@pytest.fixture
def run(tmp_path) -> Run:
    """On Slurm, 12 of 20 iterations; the newest has samples."""
    data = DataConfig(prompts="prompts.jsonl", prompt_column=EVIL)
    run = make_run(tmp_path / "run", SHARDS, scheduler=SLURM, data=data)
    rows = [make_row(i) | slurm_row(i, make_spans(i, SHARDS)) for i in range(1, 13)]
    journal.rewrite(run.paths.metrics, rows)
    write_spans(run, range(1, 13), SHARDS)
    for shard in range(SHARDS):
        responses = [f"Antwort {i} äöü 好 {EVIL} {BIDI}" for i in range(30)]
        rewards = [shard + i / 2 for i in range(30)]
        commit_shard(
            run, 12, shard, responses=responses, rewards=rewards, prompts=[f"{EVIL} {i}" for i in range(30)]
        )
    run.paths.best.write_text(json.dumps({"iteration": 10, "reward": 0.232, "policy": "policy/00010.one"}))
    return run


class Page(HTMLParser):
    """Tags that load something, text outside of scripts, and whether every tag is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.plots: list[str] = []
        self.ids: list[str] = []
        self.cells: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        values = dict(attrs)
        assert not any(name.startswith("on") for name in values)
        names = ("src", "href", "srcset", "data", "action")
        self.loads += [values[n] for n in names if n in values and not values[n].startswith("#")]
        self.plots += [values["id"]] if values.get("class") == "plot" else []
        self.ids += [values["id"]] if "id" in values else []
        self.cells += [""] if tag == "td" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data + "\n"
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


def without_plotly(text: str) -> str:
    return re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.DOTALL)


def written(run: Run) -> str:
    return write_report(run).read_text(encoding="utf-8")


# --- the page --------------------------------------------------------------------------------------------


def test_the_report_loads_nothing_from_elsewhere(run):
    text = written(run)
    assert Page(text).loads == ["data:,"]
    own = without_plotly(text)
    assert "url(" not in own
    assert "@import" not in own
    assert "default-src 'none'" in own
    assert "unsafe-eval" not in own


def test_the_report_says_how_the_run_went(run):
    text = Page(written(run)).text
    for part in ("demo", "12 of 20", "-0.405 → 0.199", "0.232 (policy 10)", "17 min", "About 11 min"):
        assert part in text
    assert f"slurm-ppo resume {run.paths.root}" in text
    assert "prompts_per_iteration: 256" in text


def test_the_report_shows_what_was_expected_beside_what_happened(run):
    assert "Expected and happened" not in Page(written(run)).text
    lengths = [lengths_of("data.prompts", [20, 30, 900], 2)]
    seconds = SecondsForecast({"rollout": 50.0, "update": 30.0}, 80.0, 1600.0, "measured in <before>")
    write_forecast(run.paths, Forecast(lengths, {"update": 4 * 2.0**30}, seconds))
    prepared = {"prompt_length/median": 31.0, "prompt_length/over": 4.0}
    assert publish(run.paths, record(PREPARE, started=1.0, ended=2.0, **prepared))
    cells = Page(written(run)).cells
    rows = [cells[i : i + 3] for i in range(len(cells))]
    assert ["prompts, median", "30 tokens", "31 tokens"] in rows
    assert ["prompts, longest", "900 tokens", "-"] in rows
    assert ["prompts, over the limit", "2", "4"] in rows
    assert ["memory, update", "4.00 GiB", "3.00 GiB"] in rows
    assert ["time, rollout", "50 s", "41 s"] in rows
    assert ["time, reward", "-", "12 s"] in rows
    assert ["time, iteration", "1 min 20 s", "1 min 26 s"] in rows
    assert "Times: measured in <before>." in Page(written(run)).text


def test_every_chart_has_a_place_a_figure_and_a_caption(run):
    text = written(run)
    parsed = Page(text)
    assert set(parsed.plots) - {"timeline-plot"} == set(data_of(text, "figures"))
    assert len(parsed.ids) == len(set(parsed.ids))
    missing = {chart.title for chart in CHARTS if chart.title not in parsed.text}
    assert missing == {
        *("Prompts without spread", "Spread of reward components", "Rollout engine against trainer"),
        *("Effective samples", "KL to the teachers"),
        *("Seconds in the queue", "Idle share of workers", "Start-up share", "Wasted share"),
        *("GPU memory (GiB)", "Batch budgets halved for lack of GPU memory"),
        *("Held-out sets", "Solved held-out prompts", "Numbers of evaluate.command"),
        *("Prompts left out, cut or read otherwise", "Staleness", "Reward by environment"),
        "Reward by prompt file",
        "Prompts learned from",
    }
    assert "entropy of the next-token distribution, nats per token" in parsed.text


def test_links_of_the_page_lead_somewhere(run):
    text = written(run)
    targets = re.findall(r'href="#([^"]+)"', text)
    assert targets
    assert set(targets) <= set(Page(text).ids)


def test_text_of_the_user_is_escaped_and_visible(run):
    text = written(run)
    assert EVIL not in text
    assert EVIL in Page(text).text  # parsed back, it is text
    assert "<img" not in without_plotly(text)
    (first, *_) = data_of(text, "samples-data")
    assert EVIL in first["response"]
    assert "⟨U+202E⟩txt.exe⟨U+2066⟩ ⟨U+001B⟩[31m⟨U+0007⟩⟨U+200B⟩" in first["response"]
    assert "\u202e" not in text


@given(st.text())
def test_no_text_ends_its_script_or_hides_what_it_is(text):
    template = """{% from "parts.html" import embedded %}{{ embedded("x", data) }}"""
    inside = environment().from_string(template).render(data={text: visible(text)})
    assert inside.count("<") == 2
    assert list(json.loads(re.search(r">(.*)<", inside, re.DOTALL)[1])) == [text]
    shown = environment().from_string("{{ text }}").render(text=text)
    assert not set(shown) & {"<", '"', "'", "\x1b", "\u202e", "\u2066", "\x00"}


def test_names_of_numbers_are_escaped(run):
    timing = {"seconds/elapsed": 1.0, "seconds/remaining": 1.0}
    rows = [{"iteration": 1, f"finish_reason/{EVIL}": 0.5, "reward/mean": 1.0, **timing}]
    journal.rewrite(run.paths.metrics, rows)
    text = written(run)
    assert "&lt;img" in json.dumps(data_of(text, "figures"))
    assert "<img" not in without_plotly(text)


def test_writing_again_replaces_the_file(run):
    before = write_report(run).stat().st_ino
    assert write_report(run).stat().st_ino != before
    assert [path.name for path in run.paths.root.glob("*report*")] == ["report.html"]


def test_settings_that_were_made_are_on_top_and_all_are_folded(run):
    apart = settings_apart(run.config)
    assert apart["data.prompt_column"] == EVIL
    assert apart["scheduler.rollout.partition"] == ["gpu"]
    assert apart["reward.components.rm.path"] == "models/rm"
    assert not {"seed", "update.epochs", "name"} & apart.keys() - {"name"}
    text = Page(written(run)).text
    assert f"Set apart from the defaults: {len(apart)} keys" in text
    assert text.index("reward.components.rm.path") < text.index("All settings")


# --- numbers ---------------------------------------------------------------------------------------------


def test_every_number_is_that_of_the_rows(run):
    text, rows = written(run), journal.read(run.paths.metrics)
    figures = data_of(text, "figures")
    compared = 0
    for chart in CHARTS:
        for trace in figures.get(chart_id(chart), {}).get("data", []):
            names = [name for name in rows[-1] if name == trace["name"] or name.endswith(f"/{trace['name']}")]
            patterns = {*chart.names.split(), *chart.lower.split()}
            names = [n for n in names if n in patterns or (describe(n) and describe(n).name in patterns)]
            for name in names:
                points = {row["iteration"]: float(f"{row[name]:.6g}") for row in rows if name in row}
                assert dict(zip(trace["x"], trace["y"], strict=True)) == points, name
                compared += 1
    assert compared > 25
    shown = Page(text).cells
    for row in rows:
        wanted = cells(row, COLUMNS)
        starts = [i for i, cell in enumerate(shown) if cell == wanted[0] and shown[i : i + 10] == wanted]
        assert starts, row["iteration"]


def test_hours_of_the_table_are_those_of_the_rows(run):
    rows, totals = journal.read(run.paths.metrics), stage_totals(read_report(run).spans.values())
    for job_kind in ("rollout", "reward", "update"):
        hours = sum(row[f"slurm/gpu_hours/{job_kind}"] for row in rows)
        assert totals[job_kind].gpu_hours == pytest.approx(hours, abs=1e-6)
    shown = Page(written(run)).cells
    place = shown.index("rollout")
    assert shown[place + 1 : place + 4] == ["gpu", "36", "12"]
    assert shown[place + 11] == f"{totals['rollout'].gpu_hours:.2f}"


def test_shares_of_a_stage_add_up(run):
    for job_kind, stage in stage_totals(read_report(run).spans.values()).items():
        if job_kind != DRIVER:
            parts = (stage.startup, stage.compute, stage.idle, stage.retry)
            assert sum(parts) == pytest.approx(stage.run, rel=1e-3)


def test_workers_are_shown_with_how_they_spent_their_time_and_why_they_left(run):
    assert "Why workers" not in page(read_report(run))
    left = beat("7_0r0", doing=Doing.LEAVING, busy_seconds=60.0, waiting_seconds=30.0, tasks=4)
    killed, far = beat("7_2r0"), Reason.FAR
    write_beats(run.paths, replace(left, reason=far), replace(left, worker="7_1r0", reason=far), killed)
    text = page(read_report(run))
    assert "Why workers of rollout left: 2: the next input was further away than coming back." in text
    assert "Dotted" in text
    assert "earlier ones are not counted" not in text


def test_workers_that_did_no_task_are_counted_and_the_report_says_which_key_to_change(run):
    evicted = beat("", doing=Doing.LEAVING, reason=Reason.NEEDED)
    killed = beat("7_9r0", doing=Doing.LEAVING, reason=Reason.DONE, tasks=4, busy_seconds=400.0)
    write_beats(run.paths, *(replace(evicted, worker=f"7_{i}r0") for i in range(6)), killed)
    text = page(read_report(run))
    shown = Page(text).cells
    row = ["rollout", "7", "6", "6", "4", "1 min 10 s", "6 min 40 s"]
    assert row in [shown[i : i + len(row)] for i in range(len(shown))]
    needed = "6: another job needed the place"
    assert f"left: {needed}; 1: nothing was left to do. Without a task: {needed}." in text
    assert "many starts of rollout did no task" in text
    assert "lower scheduler.rollout.array_parallelism" in text


def test_a_row_that_is_not_made_of_numbers_is_said_to_be_so(run, slurm_ppo):
    rows = journal.read(run.paths.metrics)
    journal.rewrite(run.paths.metrics, [*rows[:3], rows[3] | {"reward/mean": "high"}])
    done = slurm_ppo("report", run.paths.root)
    assert done.returncode == 2
    assert "row 4 cannot be read: reward/mean is not a number, but 'high'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_numbers_that_a_run_lacks_leave_no_empty_chart(tmp_path):
    lacking = ("value/", "objective/", "evaluate/", "reward/std")
    rows = [{n: v for n, v in make_row(i).items() if not n.startswith(lacking)} for i in range(1, 4)]
    run = make_run(tmp_path / "run")
    journal.rewrite(run.paths.metrics, rows)
    text = written(run)
    for title in ("KL to the reference", "Explained variance", "Held-out response length"):
        assert title not in Page(text).text
    figures = data_of(text, "figures")
    assert "yaxis2" not in figures["chart-losses"]["layout"]
    assert all(made["data"] for made in figures.values())


def test_numbers_that_are_not_finite_are_gaps(tmp_path):
    run = make_run(tmp_path / "run")
    journal.rewrite(run.paths.metrics, [make_row(1), make_row(2) | {"policy/entropy": math.nan}, make_row(3)])
    text = written(run)
    assert data_of(text, "figures")["chart-entropy"]["data"][0]["y"][1] is None
    assert "nan" in Page(text).text


@pytest.mark.parametrize("count", [1, 12, 300])
def test_figures_are_what_plotly_takes(count):
    graph_objects = pytest.importorskip("plotly.graph_objects")
    more = {"mismatch/kl": 0.0, "gpu_memory_gib/update": 1.0, "slurm/gpu_hours/update": 1.0}
    more |= {"reward/frac_zero_std": 0.1, "reward/rm/std": 0.2, "slurm/queue_seconds/update": 3.0}
    more |= {"slurm/idle_share/update": 0.1, "slurm/startup_share/update": 0.1, "slurm/wasted_share": 0.0}
    more |= {"slurm/worker_idle_share/update": 0.1, "data/rejected": 2.0}
    more |= {"halvings/rollout": 1.0, "staleness/lag": 1, "staleness/effective_samples": 0.9}
    more |= {"mismatch/effective_samples": 0.9, "correction/effective_samples": 0.9}
    more |= {
        "teacher/kl": 3.0,
        "environment/sums/reward": 0.5,
        "reward/mean/sums": 0.5,
        "refill/taken": 4.0,
        "refill/flat": 2.0,
        "evaluate/pass@4": 0.5,
        "evaluate/hard/reward": 0.5,
        "eval/acc": 0.5,
    }
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


def test_stages_of_compared_runs_share_an_axis():
    """Those too whose colour is not that of their place in the chart."""
    chart = next(chart for chart in CHARTS if chart.title == "Seconds per stage")
    row = {"iteration": 1, "seconds/rollout": 1.0, "seconds/score-big": 2.0, "seconds/reward": 3.0}
    made, _ = overlay(chart, [("one", "red", [row]), ("other", "blue", [row])])
    assert [trace["yaxis"] for trace in made["data"]] == ["y"] * 6


values = st.floats(allow_nan=True, allow_infinity=False, width=32)


@given(st.lists(values, max_size=400), st.integers(8, 100))
def test_thinning_a_curve_keeps_its_ends_and_extremes(curve, most):
    points = list(enumerate(curve))
    kept = thinned(points, most)
    assert len(kept) <= max(most, 3) * 1.6 + 4
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert {str(point) for point in kept} <= {str(point) for point in points}
    finite = [value for value in curve if math.isfinite(value)]
    shown = [value for _, value in kept if math.isfinite(value)]
    assert (min(finite, default=0), max(finite, default=0)) == (min(shown, default=0), max(shown, default=0))


# --- runs that have less ---------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["record", "gone", "changed"])
def test_samples_that_cannot_be_read_are_said_to_be_so(run, damage):
    for shard in range(SHARDS):
        task = run.paths.task(Task(12, Stage.REWARD, shard))
        if damage == "record":
            task.record.write_text("{")
        elif damage == "gone":
            task.data("one").unlink()
        else:
            task.data("one").write_bytes(task.data("one").read_bytes()[::-1])
    text = written(run)
    assert "The responses of iteration 12 are no longer" in Page(text).text
    assert "Antwort" not in text


def test_a_run_without_rows_says_what_to_do(tmp_path):
    run = make_run(tmp_path / "my run")
    text = written(run)
    assert "No iteration is committed yet" in text
    assert f"slurm-ppo resume '{run.paths.root}'" in Page(text).text
    assert Page(text).plots == []
    assert len(text) < 200_000, "plotly is there for nothing"


def test_the_evaluation_of_policy_0_is_the_first_point(tmp_path):
    run = make_run(tmp_path / "run", data=DataConfig(prompts="a.jsonl", heldout="b.jsonl"))
    metrics = {"evaluate/reward": -0.7, "response_tokens": 90.0, "responses": 9.0}
    assert publish(run.paths, record(Task(0, Stage.EVALUATE), **metrics))
    assert read_rows(run) == [{"iteration": 0, "evaluate/reward": -0.7, "evaluate/response_length": 10.0}]
    text = written(run)
    assert "No iteration is committed yet" in text
    assert data_of(text, "figures")["chart-reward"]["data"][0]["y"] == [-0.7]


def test_a_run_of_an_older_version_shows_the_attempts_of_its_newest_iterations(tmp_path):
    run = make_run(tmp_path / "run")
    journal.rewrite(run.paths.metrics, [make_row(i) for i in range(1, 16)])
    for i in range(1, 16):
        for stage in (Stage.ROLLOUT, Stage.UPDATE):
            assert publish(run.paths, record(Task(i, stage), started=10.0 * i, ended=10.0 * i + 5))
    spans = read_report(run).spans
    assert list(spans) == list(range(6, 16))
    assert [span.job_kind for span in spans[15].attempts] == ["rollout", "update"]


def test_the_iteration_at_hand_is_on_the_timeline(run):
    assert publish(run.paths, record(Task(13, Stage.ROLLOUT), started=50.0, ended=60.0))
    spans = read_report(run).spans
    assert [span.job_kind for span in spans[13].attempts] == ["rollout"]


def test_a_fork_names_its_parent(tmp_path):
    run = make_run(tmp_path / "fork", parent=Parent("0a1b", "/runs/first", 7))
    assert "Forked from run 0a1b after iteration 7." in Page(written(run)).text


# --- parts -----------------------------------------------------------------------------------------------


@given(st.integers(0, 60), st.integers(4, 12))
def test_iterations_with_samples_are_the_first_the_newest_and_some_between(length, count):
    iterations = list(range(1, length + 1))
    chosen = sampled_iterations(iterations, count)
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(iterations)
    assert len(chosen) == min(length, count)
    assert set(iterations[-3:]) | set(iterations[:1]) <= set(chosen)


def test_advice_is_listed_with_links_to_its_charts(run):
    found = Advice(
        Severity.WARNING,
        Rule.KL_JUMP,
        "KL <jumped>",
        "from 1 to 9",
        "lower it & see",
        ("objective/kl", "mismatch/kl"),
    )
    data = read_report(run)
    text = page(replace(data, advice=[found]))
    text = text[text.index('<section id="findings">') : text.index('<section id="curves">')]
    assert '<a href="#chart-kl-to-the-reference">KL to the reference</a>' in text
    assert "KL &lt;jumped&gt;" in text
    assert "lower it &amp; see" in text
    assert text.count("<a ") == 1
    assert "Nothing was noticed" in page(replace(data, advice=[]))
    assert "Too few iterations" in page(replace(data, rows=data.rows[:2], advice=[]))


def test_settings_that_differ_are_listed_by_key(tmp_path):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other", 4, seed=3, scheduler=SLURM)
    found = {key: values for key, *values in settings_table([one.config, other.config])}
    assert found["seed"] == ["0", "3"]
    assert found["rollout.num_shards"] == ["1", "4"]
    assert found["scheduler.kind"] == ["local", "slurm"]
    assert found["scheduler.rollout.partition"] == ["-", "[gpu]"]
    assert not {"name", "run_dir"} & {*found}
    assert page(read_report(one))


# --- the command -----------------------------------------------------------------------------------------


def test_reports_are_written_where_they_are_wanted(run, slurm_ppo, tmp_path):
    other = make_run(tmp_path / "other", seed=3)
    done = slurm_ppo("report", run.paths.root, "--out", tmp_path / "mine.html")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'mine.html'}\n")
    assert not run.paths.report.exists()
    done = slurm_ppo("report", run.paths.root, other.paths.root, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "report-compare.html\n")
    text = Page((tmp_path / "report-compare.html").read_text()).text
    for part in ("12 of 20", "0 of 20", "seed", str(other.paths.root), "0.199"):
        assert part in text


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["run", "nowhere"], "nowhere is not a run directory"),
        (["run", "run/../run"], "is given twice"),
        (["run", "--out", "no/such/folder.html"], "the report cannot be written"),
    ],
)
def test_what_cannot_be_reported_is_said_in_one_line(run, slurm_ppo, names, message):
    done = slurm_ppo("report", *names, cwd=run.paths.root.parent)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
