"""Report and status of a long run: how long they take, how large the page is, whether it scrolls.

    python benchmarks/report.py [--iterations 1000] [--shards 64] [--keep DIR]

The run directory is made by hand: rows and spans of every iteration, the update's records of all, shards and
records of the newest. Then the command line is measured as a person calls it, and, where Chromium and
playwright are installed, the page is opened and scrolled from end to end.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pipeline.report.data import sampled_iterations  # noqa: E402
from pipeline.run import journal  # noqa: E402
from pipeline.run.commits import publish  # noqa: E402
from pipeline.run.directory import Run  # noqa: E402
from pipeline.run.tasks import PREPARE, Stage, Task  # noqa: E402
from tests.support import reportrun  # noqa: E402

TEXT = "The quick brown fox jumps over the lazy dog and thinks about rewards that it has seen. "
RESPONSES = 16
"""In a shard."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--keep", type=Path, help="where to make the run, and leave it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = given.keep or Path(scratch) / "run"
        if not root.exists():
            make_long_run(root, given.iterations, given.shards)
        print(f"spans.jsonl: {(root / 'spans.jsonl').stat().st_size / 1e6:.1f} MB")
        measure("report", root)
        print(f"report.html: {(root / 'report.html').stat().st_size / 1e6:.2f} MB")
        measure("status", root)
        if shutil.which("chromium"):
            browse(root / "report.html")


def make_long_run(root: Path, iterations: int, shards: int) -> None:
    os.fsync = lambda descriptor: None  # a power cut may take the benchmark's input
    run = reportrun.make_run(root, shards, iterations=iterations + 1, scheduler=reportrun.SLURM)
    numbers = range(1, iterations + 1)
    rows = []
    for i in numbers:
        spans = reportrun.make_spans(i, shards)
        rows.append(reportrun.make_row(i, iterations + 1) | reportrun.slurm_row(i, spans))
        commit(run, Task(i, Stage.UPDATE))
    journal.rewrite(run.paths.metrics, rows)
    reportrun.write_spans(run, numbers, shards)
    commit(run, PREPARE)
    for i in {*sampled_iterations(list(numbers)), *numbers[-10:]}:
        for shard in range(shards):
            commit_samples(run, i, shard)
    events = (
        journal.event_row("failed", task=f"{i}/rollout/0", attempt=1, message="NODE_FAIL") for i in numbers
    )
    journal.rewrite(run.paths.events, events)


def commit(run: Run, task: Task) -> None:
    end = reportrun.START + reportrun.ITERATION_SECONDS * (task.iteration + 1)
    record = reportrun.record(task, started=end - 30, ended=end)
    assert publish(run.paths, replace(record, policy_version=task.iteration))


def commit_samples(run: Run, iteration: int, shard: int) -> None:
    count = RESPONSES
    reportrun.commit_shard(
        run,
        iteration,
        shard,
        responses=[f"{i} {TEXT * (3 + i % 9)}" for i in range(count)],
        rewards=[((7 * i + shard) % 23) / 10 for i in range(count)],
        prompts=[TEXT * 4] * count,
    )


def measure(command: str, root: Path) -> None:
    """Wall seconds of the command line, imports and all; the median of three calls."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "pipeline", command, str(root)], capture_output=True)
        if done.returncode not in (0, 3):  # 3: the run is not complete
            sys.exit(done.stderr.decode())
        seconds.append(time.perf_counter() - begin)
    print(f"slurm-ppo {command}: {median(seconds):.2f} s of {len(seconds)}, fastest {min(seconds):.2f} s")


FRAMES = """async () => {
  const gaps = [];
  let last = performance.now();
  const height = document.documentElement.scrollHeight;
  for (let y = 0; y < height; y += 250) {
    scrollTo(0, y);
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    gaps.push(now - last);
    last = now;
  }
  gaps.sort((a, b) => a - b);
  return [gaps.length, gaps[gaps.length >> 1], gaps[Math.floor(gaps.length * .95)], gaps[gaps.length - 1]];
}"""


def browse(html: Path) -> None:
    """How long the page takes to open and to draw everything, and its frames while it is scrolled."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        begin = time.perf_counter()
        page.goto(html.absolute().as_uri())
        opened = time.perf_counter() - begin
        page.wait_for_selector('html[data-drawn="true"]', state="attached", timeout=120_000)
        drawn = time.perf_counter() - begin
        frames: Any = page.evaluate(FRAMES)
        count, middle, most, worst = frames
        print(f"opened after {opened:.2f} s, everything drawn after {drawn:.2f} s")
        print(f"{count} frames scrolled: median {middle:.0f} ms, 95 % {most:.0f} ms, longest {worst:.0f} ms")
        browser.close()


if __name__ == "__main__":
    main()
