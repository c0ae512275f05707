"""The command of every worker: ``python -m stages.workers``, with the arguments of ``python -m stages``."""

import sys

if __name__ == "__main__":
    from stages.workers.start import end_process, main

    end_process(main(sys.argv[1:]))
