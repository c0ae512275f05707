# A line of setup that fails is named, and ends a task's job; with || true after it, it may fail.
slurm_ppo_setup=($lines)
slurm_ppo_depth=$${#BASH_SOURCE[@]}
slurm_ppo_first=$$((LINENO + 7))
slurm_ppo_setup_failed() {
  # In a file that a line reads, and in a function that it calls, only what the line itself ends with counts.
  [ "$${#BASH_SOURCE[@]}" -eq $$((slurm_ppo_depth + 1)) ] || return 0
  echo "$mark $$(($$2 - slurm_ppo_first + 1)) of setup failed on node $${SLURMD_NODENAME:-$${HOSTNAME-}} (exit code $$1): $${slurm_ppo_setup[$$2 - slurm_ppo_first]-}"$then
}
trap 'slurm_ppo_setup_failed "$$?" "$$LINENO"' ERR
