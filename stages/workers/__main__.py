"""The command of every worker: ``python -m stages.workers``, with the arguments of ``python -m stages``."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # until all is imported, which is no garbage: to look for some takes a tenth of that time
    from stages.workers.start import end_process, main

    end_process(main(sys.argv[1:]))
