#!/bin/bash

# Parameters
#SBATCH --account=lab
#SBATCH --array=0
#SBATCH --begin=now+1800
#SBATCH --chdir=/home/u
#SBATCH --cpus-per-task=1
#SBATCH --job-name=r1.0123456789ab.0.guard.2.0
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --open-mode=append
#SBATCH --output=/dev/null
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=0:15:00

# setup
if { : >>/runs/r1/logs/guard/guard.log; } 2>/dev/null; then exec >>/runs/r1/logs/guard/guard.log 2>&1; fi

# command
export SUBMITIT_EXECUTOR=slurm
exec /env/bin/python -P -m slurm.element /runs/r1/slurm/00000/guard-2-0.json
