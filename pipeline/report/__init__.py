"""Reports: one self-contained HTML file about a run, about several beside each other, or about a sweep."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.report.data import read_report, read_rows
from pipeline.run.directory import Run
from pipeline.run.durable import replace_durably

__all__ = ["COMPARISON", "read_rows", "write_comparison", "write_report", "write_sweep_report"]

COMPARISON = "report-compare.html"
"""File name of a comparison, in the current folder, unless another path is given."""


def write_report(run: Run, out: Path | None = None) -> Path:
    """Write ``report.html`` of the run, or ``out``, in one step, while the run goes on too. Returns its path.

    Raises:
        RunError: it cannot be written.
    """
    from pipeline.report.page import page

    return _write(page(read_report(run)), out or run.paths.report)


def write_comparison(runs: Sequence[Run], out: Path | None = None) -> Path:
    """Write one page about several runs. Returns its path.

    Raises:
        RunError: a run is given twice, or the page cannot be written.
    """
    from pipeline.report.comparison import compare_runs, comparison_page

    return _write(comparison_page(compare_runs(runs)), out or Path(COMPARISON))


def write_sweep_report(root: Path, out: Path | None = None) -> Path:
    """Write ``report.html`` of a sweep, or ``out``. Returns its path.

    Raises:
        SweepError: its manifest cannot be read.
        RunError: none of its runs has a row, or the page cannot be written.
    """
    from pipeline.report.comparison import compare_sweep, comparison_page

    return _write(comparison_page(compare_sweep(root)), out or root / "report.html")


def _write(text: str, path: Path) -> Path:
    from pipeline.run.identity import RunError

    if not path.parent.is_dir():
        raise RunError(f"the report cannot be written: the folder {path.parent} does not exist")
    try:
        replace_durably(path, text)
    except OSError as error:
        raise RunError(f"the report cannot be written: {error}; give another place with --out FILE") from None
    return path
