# First process of a machine: machine.sh HOST BOOT. It has that host name and a boot of its own, whose id lies in the
# file BOOT once the machine can be entered, and it reaps what it is left.
hostname "$1" || exit
{ cat /etc/hosts && echo "127.0.0.1 $1"; } >"$2.hosts" && mount --bind "$2.hosts" /etc/hosts || exit
cat /proc/sys/kernel/random/uuid >"$2.new" && mount --bind "$2.new" /proc/sys/kernel/random/boot_id || exit
mv "$2.new" "$2" || exit
while :; do
  sleep 3600 &
  wait "$!"
done
