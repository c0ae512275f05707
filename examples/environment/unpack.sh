# A packed Python environment on a node's own disk, unpacked once for all jobs there. As lines of setup:
#   scheduler:
#     setup: [source /shared/unpack.sh /shared/ppo-env.tar]
#     python: python
# It ends with an error where that cannot be, which ends the job and is named. Where: $SLURM_PPO_LOCAL, or /tmp. Another
# archive, by name, size and time, is another folder; what is there goes with the node's next clean-up of /tmp.
slurm_ppo_unpack() {
  local archive=$1 place=${SLURM_PPO_LOCAL:-/tmp} key folder
  key=$(stat -Lc '%n %s %Y' -- "$archive" | cksum) || return
  folder=$place/slurm-ppo-env.$(id -u).${key%% *}
  if [ ! -e "$folder/.unpacked" ] || [ ! -O "$folder" ]; then
    (
      umask 077
      mkdir -p "$place" && exec 9>>"$folder.lock" && flock 9 || exit
      [ ! -e "$folder/.unpacked" ] || exit 0 # another job of this node has done it meanwhile
      [ ! -e "$folder" ] || rm -rf "$folder" || exit
      mkdir "$folder" && tar -xf "$archive" -C "$folder" && touch "$folder/.unpacked"
    ) || return
  fi
  [ -O "$folder" ] || { echo "$folder is another user's; choose SLURM_PPO_LOCAL" >&2; return 1; }
  export PATH=$folder/bin:$PATH
}
slurm_ppo_unpack "$1"
