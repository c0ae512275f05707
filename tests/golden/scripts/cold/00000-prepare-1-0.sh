#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --account=lab
#SBATCH --cpus-per-task=2
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --signal=B:USR2@120
#SBATCH --time=4:00:00
#SBATCH --job-name=slurm-ppo.r1.prepare.iter0.0123456789ab.1.0
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --output=/runs/r1/logs/slurm.log

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
mkdir /runs/r1/logs/00000-prepare /runs/r1/logs/00000-prepare/attempt-1 2>/dev/null || :; log=/runs/r1/logs/00000-prepare/attempt-1/prompts.log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec /env/bin/python -P -m slurm.element /runs/r1/slurm/00000/prepare-1-0.json

