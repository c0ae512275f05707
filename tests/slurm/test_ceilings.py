"""What accounts and QOS allow one job, as accounting shows it."""

from slurm.associations import Ceiling, parse_ceilings, read_ceilings

ACCOUNTS = "lab|normal,short|normal||cpu=64,gres/gpu=4|gres/gpu=8\nsolo|short||02:00:00||\n"
QOS = "normal|1-00:00:00||gres/gpu=2,mem=100G|node=3|20|\nshort|01:00:00|gres/gpu:a100=1|||8|6\nfree||||||\n"


def test_the_ceiling_of_a_job_is_that_of_its_qos_and_its_account():
    known = parse_ceilings(ACCOUNTS, QOS)
    assert known.qos["normal"] == Ceiling(
        "QOS normal", 86_400.0, {"gres/gpu": 2, "mem": 102_400, "node": 3}, 20
    )
    assert known.accounts["lab"].amounts == {"cpu": 64, "gres/gpu": 4}
    assert known.qos["short"].submitted == 6
    assert known.default_qos == {"lab": "normal", "solo": "short"}
    assert [one.whose for one in known.of_job("lab", None)] == ["QOS normal", "account lab"]
    assert [one.whose for one in known.of_job("solo", "free")] == ["QOS free", "account solo"]
    assert [one.whose for one in known.of_job(None, None)] == [], "nobody knows which account it is"


def test_limits_of_one_partition_or_of_another_cluster_bound_no_other_job(monkeypatch):
    lines = "lab|normal|normal|1-00:00:00|||\nlab|normal|normal|00:30:00|||debug\n"
    asked = []

    def run_command(words, **_):
        asked.append(words)
        return lines if "assoc" in words else ""

    monkeypatch.setattr("slurm.associations.run_command", run_command)
    monkeypatch.setattr("slurm.associations.read_cluster_name", lambda timeout: "Gold")
    assert read_ceilings().wall_of("lab", None).wall == 86_400.0
    assert "cluster=gold" in next(words for words in asked if "assoc" in words)


def test_the_limit_of_time_of_a_qos_goes_before_its_accounts():
    known = parse_ceilings(ACCOUNTS, QOS)
    assert known.wall_of("solo", None).wall == 3600.0
    assert known.wall_of("solo", "free").whose == "account solo"
    assert known.wall_of("lab", "free") is None
    assert parse_ceilings("", "").wall_of("lab", "normal") is None
