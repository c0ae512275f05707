"""``python -m stages STAGE --run-dir R --iteration K [--shard I]``: what every job executes."""

import sys

from stages.runner import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
