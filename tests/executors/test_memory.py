"""How much memory is free: of the machine, or of the tightest control group around a process."""

import pytest

from pipeline.memory import free_bytes, free_share

KIB = 1024


@pytest.mark.parametrize(
    ("group", "files", "share", "free"),
    [
        ("0::/", {}, 0.5, 500 * KIB),
        ("0::/job/step", {"job/memory.max": 1000, "job/memory.current": 900}, 0.1, 100),
        ("0::/job", {"job/memory.max": "max", "job/memory.current": 900}, 0.5, 500 * KIB),
        (
            "0::/job",
            {"job/memory.max": 100, "job/memory.current": 30}
            | {"job/memory.stat": "anon 10\nfile 20\ninactive_file 15\nactive_file 5"},
            0.5,
            85,
        ),
        (
            "4:cpu,memory:/x",
            {"memory/x/memory.limit_in_bytes": 1000, "memory/x/memory.usage_in_bytes": 800}
            | {"memory/x/memory.stat": "cache 700\ntotal_inactive_file 100"},
            0.3,
            300,
        ),
        (
            "3:cpu:/x",
            {"memory/x/memory.limit_in_bytes": 10, "memory/x/memory.usage_in_bytes": 9},
            0.5,
            500 * KIB,
        ),
    ],
)
def test_free_memory_is_that_of_the_machine_or_of_the_tightest_control_group(
    tmp_path, group, files, share, free
):
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 500 kB\n")
    (tmp_path / "cgroup").write_text(f"{group}\n")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    where = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    assert free_share(*where) == pytest.approx(share)
    assert free_bytes(*where) == free


def test_where_nothing_can_be_read_no_share_is_taken_and_no_byte_is_free(tmp_path):
    where = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups"
    assert (free_share(*where), free_bytes(*where)) == (1.0, 0.0)
