#!/bin/bash
# A whole run in one allocation, for sites and times where one job is all that can be had:
#   sbatch examples/slurm/allocation.sh RUN_DIR scheduler=allocation WORDS...
# Typed again, it goes on where the run stands. Several may wait in the queue: of one name one runs at a time.
#SBATCH --job-name=ppo-allocation
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=2
#SBATCH --cpus-per-task=8
#SBATCH --time=4:00:00
#SBATCH --dependency=singleton
# A warning before the time is over, to this process alone. More seconds than scheduler.grace.
#SBATCH --signal=B:USR2@180

run=$1
shift
# exec: the warning is for slurm-ppo, which lets its tasks save what they have, and ends.
if [ -e "$run/run.json" ]; then
    exec slurm-ppo resume "$run"
fi
exec slurm-ppo run "run_dir=$run" "$@"
