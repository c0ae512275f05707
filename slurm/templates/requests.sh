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
