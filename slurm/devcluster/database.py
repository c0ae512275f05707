"""MariaDB for slurmdbd: one server per cluster, reachable through its socket only."""

import subprocess
from collections.abc import Mapping

from slurm.devcluster import programs
from slurm.devcluster.errors import DevclusterError
from slurm.devcluster.layout import PracticeIdentity


def create(identity: PracticeIdentity, environment: Mapping[str, str]) -> None:
    """Create the files of an empty database server. Takes a second."""
    root = identity.root
    command = [
        programs.program("mariadb-install-db"),
        "--no-defaults",
        f"--datadir={root}/mysql",
        f"--user={identity.user}",
        "--auth-root-authentication-method=normal",
        "--skip-test-db",
        "--skip-name-resolve",
        f"--tmpdir={root}/tmp",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(environment), timeout=120)
    if done.returncode:
        raise DevclusterError(f"mariadb-install-db failed:\n{(done.stdout + done.stderr).strip()[-1000:]}")


def command(identity: PracticeIdentity) -> list[str]:
    """Return the server's command line: small buffers, and no flush to disk at commit."""
    root = identity.root
    return [
        programs.program("mariadbd"),
        "--no-defaults",
        f"--datadir={root}/mysql",
        f"--socket={root}/mysql.sock",
        f"--pid-file={root}/run/mariadbd.pid",
        f"--log-error={root}/log/mariadbd.log",
        f"--tmpdir={root}/tmp",
        f"--user={identity.user}",
        "--skip-networking",
        "--skip-name-resolve",
        "--skip-log-bin",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-doublewrite=0",
        "--innodb-buffer-pool-size=32M",
        "--innodb-log-file-size=8M",
        "--innodb-lock-wait-timeout=900",
    ]
