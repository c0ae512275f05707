#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --cpus-per-task=1
#SBATCH --dependency='afterany:JOB-1-update?afternotok:JOB-0-prepare?afternotok:JOB-1-rollout?afternotok:JOB-1-reward'
#SBATCH --job-name=r1.0123456789ab.1.driver.1.0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/dev/null
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=0:15:00

# setup
if { : >>/runs/r1/logs/00001-driver/attempt-1/driver.log; } 2>/dev/null; then exec >>/runs/r1/logs/00001-driver/attempt-1/driver.log 2>&1; fi

# command
export SUBMITIT_EXECUTOR=slurm
exec /env/bin/python -P -m slurm.element /runs/r1/slurm/00001/driver-1-0.json

