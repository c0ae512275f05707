#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --cpus-per-task=8
#SBATCH --dependency=afterok:JOB-1-reward
#SBATCH --gpus-per-node=1
#SBATCH --job-name=r1.0123456789ab.1.update.1.0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/runs/r1/logs/00001-update/attempt-1/shard-00%3a.log
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=4:00:00

# setup

# command
export SUBMITIT_EXECUTOR=slurm
exec /env/bin/python -P -m slurm.element /runs/r1/slurm/00001/update-1-0.json

