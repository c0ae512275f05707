#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --account=project_462000000
#SBATCH --cpus-per-task=1
#SBATCH --dependency='afterany:JOB-0-prepare?afterany:JOB-1-rollout?afterany:JOB-1-reward?afterany:JOB-1-update'
#SBATCH --mem=2G
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=small
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=0:15:00
#SBATCH --job-name=slurm-ppo.r1.driver.iter0.0123456789ab.1.0
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --output=/dev/null

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
log=/scratch/r1/logs/slurm.log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
mkdir /scratch/r1/logs/00000-driver /scratch/r1/logs/00000-driver/attempt-1 2>/dev/null || :; log=/scratch/r1/logs/00000-driver/attempt-1/driver.log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec /env/bin/python -P -m slurm.element /scratch/r1/slurm/00000/driver-1-0.json

