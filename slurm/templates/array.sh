#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
$options
#SBATCH --job-name=$job_name
#SBATCH --array=$array
#SBATCH --chdir=$chdir
#SBATCH --output=$output

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
$setup

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec $command
