"""Print the words of a run that make this machine's processor fast, for `make quickstart_real`.

    python examples/arithmetic/processor.py

bf16 is more than twice as fast as fp32 where the processor multiplies it by itself (avx512_bf16 or AMX), and
slow where it does not: then nothing is printed, and the run computes in fp32.
"""

from pathlib import Path

INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16"})
WORDS = ("update.precision=bf16", "update.zero_stage=1")


def words(cpuinfo: str) -> tuple[str, ...]:
    """Return the words for a processor, by the text of /proc/cpuinfo."""
    flags = (line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags"))
    return WORDS if INSTRUCTIONS & set(next(flags, ())) else ()


if __name__ == "__main__":
    file = Path("/proc/cpuinfo")
    print(*words(file.read_text() if file.is_file() else ""))
