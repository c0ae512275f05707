"""The command of every task: ``python -m stages STAGE --run-dir R --iteration K [--shard I]``."""

import sys

if __name__ == "__main__":
    from stages.attempts.runner import (
        main,  # not above: worker processes import this module too, and need none of it
    )

    sys.exit(main(sys.argv[1:]))
