"""``python -m pipeline`` is ``slurm-ppo``."""

from pipeline.cli import main

if __name__ == "__main__":
    main()
