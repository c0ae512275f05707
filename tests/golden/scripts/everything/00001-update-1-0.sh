#!/bin/bash
# An array job of slurm-ppo, made from slurm/templates/array.sh. Values are quoted for the shell and hold no line
# breaks, so that none can begin a line of its own; the lines of scheduler.setup are taken as they are.

#SBATCH --open-mode=append
#SBATCH --account=lab
#SBATCH --comment='a # b'
#SBATCH --constraint='a100&(ib|hdr)'
#SBATCH --cpus-per-task=8
#SBATCH --exclude=n1,n2
#SBATCH --exclusive
#SBATCH --gpus-per-node=h100:4
#SBATCH --mail-type=FAIL,TIME_LIMIT_80
#SBATCH --mail-user=me+ppo@example.org
#SBATCH --mem=64G
#SBATCH --nice=3
#SBATCH --no-requeue
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --partition=gpu,spare
#SBATCH --qos=high
#SBATCH --reservation=maintenance_1
#SBATCH --signal=B:USR2@300
#SBATCH --time=1-12:00:00
#SBATCH --job-name=slurm-ppo.r1.update.iter1.0123456789ab.1.0
#SBATCH --array=0
#SBATCH --chdir=/home/u
#SBATCH --output='/runs/it'"'"'s 100%% "é" $HOME `touch x` $(touch x) #!/logs/slurm.log'

# Setup and environment, from the configuration. Where a job begins with no environment (--export=NONE, or a site's
# own rule), its steps would begin without what is set here.
unset SLURM_EXPORT_ENV
SLURM_PPO_BEFORE=$(env -0 | gzip -c | base64 -w 0); [ ${#SLURM_PPO_BEFORE} -gt 100000 ] || export SLURM_PPO_BEFORE
trap '' USR1
export SLURM_PPO_STARTED=$(date +%s)
mkdir '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00001-update' '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00001-update/worker-1' 2>/dev/null || :; log='/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/00001-update/worker-1'/shard-"$(printf %05d $((${SLURM_ARRAY_TASK_ID-0} + 0)))".log
if { : >>"$log"; } 2>/dev/null; then exec >>"$log" 2>&1; fi
# A line of setup that fails is named, and ends a task's job; with || true after it, it may fail.
slurm_ppo_setup=('module purge' 'source ~/env.sh # ours')
slurm_ppo_depth=${#BASH_SOURCE[@]}
slurm_ppo_first=$((LINENO + 7))
slurm_ppo_setup_failed() {
  # In a file that a line reads, and in a function that it calls, only what the line itself ends with counts.
  [ "${#BASH_SOURCE[@]}" -eq $((slurm_ppo_depth + 1)) ] || return 0
  echo "slurm-ppo: line $(($2 - slurm_ppo_first + 1)) of setup failed on node ${SLURMD_NODENAME:-${HOSTNAME-}} (exit code $1): ${slurm_ppo_setup[$2 - slurm_ppo_first]-}"; exit 78
}
trap 'slurm_ppo_setup_failed "$?" "$LINENO"' ERR
module purge
source ~/env.sh # ours
trap - ERR
# The task runs in a container, where Slurm's commands may be missing. This loop, outside of it, reads lines from a
# FIFO until the task has ended: "pass" makes a pass, "ring 4711_0 4711_3" wakes the workers of these elements.
attend() {
  local log=$1 line='' ids='' passing='' status=0 IFS=$' \t\n'
  shift
  while kill -0 "$$" 2>/dev/null; do
    status=0
    IFS= read -r -t 2 -n 2048 line <&9 || status=$?
    if [ "$status" -ne 0 ]; then
      line=''
      [ "$status" -gt 128 ] || sleep 2 # no time-out, and no line either: in no hurry then
    fi
    case $line in
      '') ;;
      pass)
        if [ -z "$passing" ] || ! kill -0 "$passing" 2>/dev/null; then
          { : >>"$log"; } 2>/dev/null || log=/dev/null
          CUDA_VISIBLE_DEVICES='' timeout 1800 "$@" </dev/null >>"$log" 2>&1 9>&- &
          passing=$!
        fi
        ;;
      'ring '[0-9]*)
        ids=${line#ring }
        if [ "${#line}" -ge 2048 ] || [ -n "${ids//[0-9_ ]/}" ]; then
          echo 'refused a request that is none'
        else
          # scancel tries again after 5 s where others of the array wait in the queue, although it was sent.
          timeout 4 scancel --batch --signal=USR1 $ids </dev/null >/dev/null 2>&1 9>&- &
        fi
        ;;
      end) break ;;
      *) echo 'refused a request that is none' ;;
    esac
  done
}
if requests=$(mktemp -d "${TMPDIR:-/tmp}/slurm-ppo.XXXXXX") && mkfifo -m 600 "$requests/fifo"; then
export SLURM_PPO_REQUESTS="$requests/fifo"
( unset SLURM_PPO_REQUESTS
module purge
source ~/env.sh # ours
export PLAIN=1
export NASTY='it'"'"'s 100% "é" $HOME `touch x` $(touch x) #! \n'
export EMPTY=''
mkdir -p '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/passes' || :
attend '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/logs/passes/passes.log' apptainer exec --nv '/images/our ppo.sif' '/opt/our env/bin/python' -P -m pipeline advance '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!' --asked
rm -rf "$requests"
) 9<>"$requests/fifo" </dev/null &
fi
export PLAIN=1
export NASTY='it'"'"'s 100% "é" $HOME `touch x` $(touch x) #! \n'
export EMPTY=''

# For submitit.JobEnvironment, in code of yours.
export SUBMITIT_EXECUTOR=slurm
# Slurm sends the warning before the time limit to this process alone, so the command takes its place.
exec srun --kill-on-bad-exit=1 --wait=0 --nodes=2 --ntasks-per-node=4 --cpus-per-task=8 apptainer exec --nv '/images/our ppo.sif' '/opt/our env/bin/python' -P -m slurm.element '/runs/it'"'"'s 100% "é" $HOME `touch x` $(touch x) #!/slurm/00001/update-1-0.json' --rank

