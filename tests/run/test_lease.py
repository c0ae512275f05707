"""At most one driver at a time, and never none because of one that is gone."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.run import lease as leases
from pipeline.run.lease import (
    EXPIRY_SECONDS,
    LeaseHeld,
    LeaseHolder,
    LeaseLost,
    acquire,
    free_number,
    hold,
    holder_of,
)
from tests.support import ROOT
from tests.support.damage import DAMAGES
from tests.support.waiting import eventually

HOLD = """
import sys, time
from pathlib import Path
from pipeline.run.lease import acquire
acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def start(body: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", body, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def other_driver(tmp_path):
    """A real process that holds the lease of tmp_path."""
    process = start(HOLD, tmp_path)
    assert process.stdout.readline() == "held\n"
    yield process
    end(process)


def leave_lease(folder: Path, age: float = 0.0, **changes: object) -> Path:
    """A lease as another driver left it."""
    path = folder / "000001.json"
    path.write_text(json.dumps(asdict(replace(LeaseHolder.this_process(), **changes))))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_second_driver_is_refused_and_told_who_holds_the_run(tmp_path, other_driver):
    with pytest.raises(LeaseHeld) as refused:
        acquire(tmp_path)
    said = str(refused.value)
    assert f"host {socket.gethostname()}, process {other_driver.pid}" in said
    assert re.search(r"since \d+ s, last heartbeat \d+ s ago", said)
    assert holder_of(tmp_path) is not None


def test_a_killed_driver_is_replaced_at_once(tmp_path, other_driver):
    end(other_driver)
    assert holder_of(tmp_path) is None
    assert acquire(tmp_path).path.name == "000002.json"
    assert [path.name for path in tmp_path.iterdir()] == ["000002.json"]


def test_a_killed_driver_that_nobody_has_waited_for_is_replaced_too(tmp_path, other_driver):
    """A zombie still has its pid."""
    other_driver.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, other_driver.pid, os.WEXITED | os.WNOWAIT)
    acquire(tmp_path)


def test_a_stopped_driver_keeps_its_lease(tmp_path, other_driver):
    other_driver.send_signal(signal.SIGSTOP)
    old = time.time() - 10 * EXPIRY_SECONDS
    os.utime(tmp_path / "000001.json", (old, old))
    with pytest.raises(LeaseHeld):
        acquire(tmp_path)


def test_a_pid_that_belongs_to_another_process_by_now_holds_nothing(tmp_path):
    leave_lease(tmp_path, process_started="1")
    assert holder_of(tmp_path) is None
    acquire(tmp_path)


def test_a_driver_in_another_container_is_believed_while_its_heart_beats(tmp_path):
    """Its process has no number here, or one that is another's."""
    leave_lease(tmp_path, pid=4_000_000, pid_namespace="pid:[1]")
    assert "process 4000000" in holder_of(tmp_path)
    leave_lease(tmp_path, age=2 * EXPIRY_SECONDS, pid=4_000_000, pid_namespace="pid:[1]")
    assert holder_of(tmp_path) is None


def test_a_driver_on_another_host_is_believed_while_its_heart_beats(tmp_path):
    leave_lease(tmp_path, age=EXPIRY_SECONDS - 30, host="node17", boot_id="b", pid=4242)
    with pytest.raises(LeaseHeld, match=r"host node17, process 4242, .*last heartbeat (89|90|91) s ago"):
        acquire(tmp_path)


def test_a_driver_on_another_host_that_is_silent_is_replaced(tmp_path):
    leave_lease(tmp_path, age=EXPIRY_SECONDS + 5, host="node17", boot_id="b", pid=os.getpid())
    acquire(tmp_path)


def test_after_a_reboot_the_same_pid_is_not_believed(tmp_path):
    leave_lease(tmp_path, age=EXPIRY_SECONDS + 5, boot_id="before the reboot")
    acquire(tmp_path)


@pytest.mark.parametrize("damage", [name for name in DAMAGES if name not in ("gone", "link to nothing")])
def test_a_lease_that_cannot_be_read_is_held_for_as_long_as_somebody_renews_it(tmp_path, damage):
    leave_lease(tmp_path, host="node17", boot_id="b", pid=4242)
    path = tmp_path / "000001.json"
    DAMAGES[damage](path)
    if damage == "flipped" and "node17" in (holder_of(tmp_path) or ""):
        return  # a number is another: who holds it can be read
    with pytest.raises(LeaseHeld, match=r"000001.json cannot be read.*takes it over in 1\d\d s"):
        acquire(tmp_path)
    os.utime(path, (1.0, 1.0))
    assert holder_of(tmp_path) is None
    assert acquire(tmp_path).path.name == "000002.json"
    assert holder_of(tmp_path)


def test_names_that_no_driver_gives_are_no_leases(tmp_path):
    for name in ("1a.json", "999999999999999999999.json", "7", "000001.json.tmp"):
        (tmp_path / name).write_text("{}")
    assert acquire(tmp_path).path.name == "000001.json"


def test_who_waits_for_long_is_told_what_for(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "_TOLD_AFTER_SECONDS", 0.3)
    leave_lease(tmp_path, host="node17", boot_id="b", pid=4242)
    told = []
    with pytest.raises(LeaseHeld), hold(tmp_path, 0.8, told.append):
        pass
    assert len(told) == 1
    assert told[0].startswith("waiting up to 1 s: a driver is active on this run: host node17")


def test_a_released_lease_is_free(tmp_path):
    with hold(tmp_path):
        assert holder_of(tmp_path) is not None
    assert holder_of(tmp_path) is None
    assert "released" in json.loads((tmp_path / "000001.json").read_text())
    with hold(tmp_path) as second:
        assert second.path.name == "000002.json"


def test_who_gets_the_number_after_a_free_one_knows_that_nobody_was_between(tmp_path):
    assert free_number(tmp_path) == 0
    with hold(tmp_path) as first:
        assert (first.number, free_number(tmp_path)) == (1, None)
    assert free_number(tmp_path) == 1
    with hold(tmp_path) as second:
        assert second.number == 2


def test_an_error_in_the_driver_releases_too(tmp_path):
    with pytest.raises(ZeroDivisionError), hold(tmp_path):
        raise ZeroDivisionError
    assert holder_of(tmp_path) is None


def test_nobody_holds_a_run_that_has_no_locks_yet(tmp_path):
    assert holder_of(tmp_path / "locks") is None


def test_numbers_go_on_past_six_digits(tmp_path):
    leave_lease(tmp_path, process_started="1").rename(tmp_path / "999999.json")
    with hold(tmp_path):
        with pytest.raises(LeaseHeld):
            acquire(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["1000000.json"]


# --- patience ---


def test_a_short_pass_of_another_driver_is_waited_for(tmp_path, other_driver):
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: (time.sleep(0.5), end(other_driver)))
        with hold(tmp_path, 30) as lease:
            assert lease.path.name == "000002.json"
    assert holder_of(tmp_path) is None


def test_patience_has_an_end(tmp_path, other_driver):
    began = time.monotonic()
    with pytest.raises(LeaseHeld, match=f"process {other_driver.pid}"), hold(tmp_path, 0.5):
        pytest.fail("held by two")
    assert 0.5 <= time.monotonic() - began < 5


def test_an_error_inside_is_not_taken_for_a_held_lease(tmp_path):
    with pytest.raises(LeaseHeld, match="of another run"), hold(tmp_path, 30):
        raise LeaseHeld("of another run")
    assert holder_of(tmp_path) is None


PATIENT = """
import os, sys
from pathlib import Path
from pipeline.run.lease import hold
folder = Path(sys.argv[1])
for _ in range(5):
    with hold(folder, 60):
        os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
        os.unlink(folder / "inside")
"""


def test_patient_drivers_all_get_their_turns_one_at_a_time(tmp_path):
    drivers = [start(PATIENT, tmp_path) for _ in range(3)]
    for driver in drivers:
        driver.communicate()
    assert [driver.returncode for driver in drivers] == [0, 0, 0]
    assert holder_of(tmp_path) is None


# --- heartbeats ---


def test_beating_is_seen_on_disk(tmp_path, monkeypatch):
    held = acquire(tmp_path)
    os.utime(held.path, (0, 0))
    held.beat()
    assert time.time() - held.path.stat().st_mtime < 60
    os.utime(held.path, (0, 0))
    held.beat()  # just beaten: the shared filesystem is left alone
    assert held.path.stat().st_mtime == 0


def test_a_driver_that_is_busy_for_long_is_heard_of_all_the_while(tmp_path, monkeypatch):
    """Hashing a large policy, say, in which it gives no sign by itself."""
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.01)
    with hold(tmp_path) as lease:
        os.utime(lease.path, (1.0, 1.0))
        assert eventually(lambda: lease.path.stat().st_mtime > 1.0)
        assert re.search("last heartbeat 0 s ago", holder_of(tmp_path))
    assert holder_of(tmp_path) is None


def test_whoever_lost_a_lease_or_gives_no_sign_for_long_does_not_renew_it(tmp_path, monkeypatch):
    lease = acquire(tmp_path)
    monkeypatch.setattr(leases, "_AT_WORK_SECONDS", 0.0)
    os.utime(lease.path, (1.0, 1.0))
    assert lease.renew(), "it may yet go on"
    assert lease.path.stat().st_mtime == 1.0
    (tmp_path / "000002.json").write_text("{}")
    assert not lease.renew()


def test_a_driver_that_slept_through_its_expiry_notices(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.0)
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", -1.0)
    with hold(tmp_path) as slept:
        slept.beat()
        monkeypatch.setattr(leases, "_boot_id", lambda: "another host")
        replacement = acquire(tmp_path)
        with pytest.raises(LeaseLost, match=r"000002\.json was taken while this driver"):
            slept.beat()
    # The one that slept leaves the other's lease alone.
    monkeypatch.setattr(leases, "EXPIRY_SECONDS", 120.0)
    assert holder_of(tmp_path) is not None
    assert [path.name for path in tmp_path.iterdir()] == [replacement.path.name]


# --- races ---

RACE = """
import sys
from pathlib import Path
from pipeline.run.lease import LeaseHeld, acquire
print("ready", flush=True)
for line in sys.stdin:
    try:
        acquire(Path(line.strip()))
        print(1, flush=True)
    except LeaseHeld:
        print(0, flush=True)
"""


def test_of_many_drivers_racing_for_a_stale_lease_exactly_one_gets_it(tmp_path):
    racers = [start(RACE) for _ in range(5)]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    winners = set()
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        leave_lease(folder, process_started="1")
        for racer in racers:
            racer.stdin.write(f"{folder}\n")
            racer.stdin.flush()
        won = [racer.stdout.readline() == "1\n" for racer in racers]
        assert sum(won) == 1, number
        winners.add(won.index(True))
    for racer in racers:
        racer.communicate()
    assert len(winners) > 1  # else they never met


def test_a_name_that_became_free_again_is_no_lease(tmp_path, monkeypatch):
    """Since the look one driver took the next number, and another removed it as older than its own."""
    linked = leases.link_once

    def later(path: Path, text: str) -> bool:
        leave_lease(tmp_path).rename(tmp_path / "000002.json")
        return linked(path, text)

    monkeypatch.setattr(leases, "link_once", later)
    with pytest.raises(LeaseHeld, match="just now; try again"):
        acquire(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["000002.json"]


COME_AND_GO = """
import os, sys, time
from pathlib import Path
from pipeline.run.lease import LeaseHeld, hold
folder, until, entered = Path(sys.argv[1]), time.monotonic() + 3, 0
while time.monotonic() < until:
    try:
        with hold(folder):
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
            entered += 1
            os.unlink(folder / "inside")
    except LeaseHeld:
        pass
print(entered)
"""


def test_drivers_that_come_and_go_never_work_side_by_side(tmp_path):
    drivers = [start(COME_AND_GO, tmp_path) for _ in range(4)]
    entered = [int(driver.communicate()[0] or -1) for driver in drivers]
    assert [driver.returncode for driver in drivers] == [0] * 4
    assert sum(count > 0 for count in entered) >= 2


def test_no_lease_is_taken_in_a_folder_that_somebody_has_put_elsewhere(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "locks").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="nothing outside of the run is touched"):
        acquire(tmp_path / "locks")
    assert not list((tmp_path / "outside").iterdir())


def test_a_lease_whose_file_a_purge_has_taken_is_still_its_holders(tmp_path):
    lease = acquire(tmp_path)
    lease.path.unlink()
    lease.beat()
    assert lease.path.exists()
    with pytest.raises(LeaseHeld):
        acquire(tmp_path)
    lease.release()
    assert acquire(tmp_path).number == 2
