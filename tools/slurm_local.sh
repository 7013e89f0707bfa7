#!/usr/bin/env bash
# A real Slurm on this one machine, for the tests: several emulated nodes, fake GPUs, all on the loopback interface.
#
#   slurm_local.sh start    start it, and print the lines that point Slurm's commands to it
#   slurm_local.sh env      print these lines again:  eval "$(tools/slurm_local.sh env)"
#   slurm_local.sh stop     cancel its jobs, end its daemons
#
# It needs the packages slurm-wlm and munge. It keeps all it writes in one private folder, has its own key, socket and
# ports, and runs under the user's own name, so that a Slurm which this machine belongs to notices nothing of it.
#
# SLURM_TEST_DIR      its folder                (default: dlojz-slurm-UID in the temporary folder)
# SLURM_TEST_NODES    nodes to emulate          (default: 2)
# SLURM_TEST_GPUS     fake GPUs of a node       (default: 4)
# SLURM_TEST_CORES    cores a node claims       (default: 8)
# SLURM_TEST_USERS    if set, and started as root: all users of this machine may submit
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin # where the daemons are, also for who is not root

dir=${SLURM_TEST_DIR:-${TMPDIR:-/tmp}/dlojz-slurm-$(id -u)}
nodes=${SLURM_TEST_NODES:-2}
gpus=${SLURM_TEST_GPUS:-4}
cores=${SLURM_TEST_CORES:-8}
user=$(id -un)
host=$(hostname -s)
export SLURM_CONF=$dir/slurm.conf

say() { echo "slurm_local: $*" >&2; }

# N free ports in a row, below the range that the system hands out by itself
free_ports() {
  local first=$((20000 + RANDOM % 8000)) port
  while :; do
    for ((port = first; port < first + $1; port++)); do
      if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
        first=$((port + 1))
        continue 2
      fi
    done
    echo "$first"
    return
  done
}

configure() {
  local port=$1 expression="tp[1-$nodes]" gpu gres="" files=""
  ((nodes == 1)) && expression=tp1
  if ((gpus > 0)); then
    # links to a device: with plain files CUDA_VISIBLE_DEVICES would stay empty
    for ((gpu = 0; gpu < gpus; gpu++)); do ln -sfn /dev/null "$dir/dev/gpu$gpu"; done
    files="$dir/dev/gpu[0-$((gpus - 1))]" gres="Gres=gpu:$gpus"
    ((gpus == 1)) && files=$dir/dev/gpu0
    printf 'AutoDetect=off\nNodeName=%s Name=gpu File=%s\n' "$expression" "$files" >"$dir/gres.conf"
  fi
  # newer versions look for control groups unless told not to; older ones do not know the word
  if [[ $(slurmd -V) =~ \ (2[4-9]|[3-9][0-9]|23\.11) ]]; then echo "CgroupPlugin=disabled" >"$dir/cgroup.conf"; fi
  cat >"$SLURM_CONF" <<CONF
ClusterName=practice
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=$dir/run/munge.sock
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=5
ReturnToService=2
KillWait=2
MinJobAge=300
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/run/slurmctld.pid
SlurmdPidFile=$dir/run/slurmd-%n.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd-%n.log
NodeName=$expression NodeHostname=$host NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + nodes))] CPUs=$cores RealMemory=4000 $gres
PartitionName=course Nodes=ALL Default=YES MaxTime=60 State=UP
CONF
  ((nodes > 1)) || sed -i "s/Port=\[\([0-9]*\)-[0-9]*\]/Port=\1/" "$SLURM_CONF"
}

start() {
  if running; then
    say "it runs already: $dir"
    settings
    return
  fi
  local tool node
  for tool in munged slurmctld slurmd sbatch; do
    command -v "$tool" >/dev/null || { say "$tool is missing: install slurm-wlm and munge"; return 1; }
  done
  (umask 077 && mkdir -p "$dir")
  [[ -O $dir && ! -L $dir ]] || { say "$dir belongs to somebody else"; return 1; }
  rm -rf "${dir:?}"/{state,run,log,dev,munge} "${dir:?}"/spool-*
  mkdir -p "$dir"/{state,run,log,dev,munge}
  # its key, state and logs are for itself; others need its settings, the socket, and their job's folder
  chmod 700 "$dir" "$dir"/{state,log,munge}
  [[ -z ${SLURM_TEST_USERS:-} ]] || chmod 711 "$dir"
  for ((node = 1; node <= nodes; node++)); do mkdir -p "$dir/spool-tp$node"; done
  (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key")
  configure "$(free_ports $((nodes + 1)))"
  # --force: munged dislikes a socket in a folder that others cannot enter; here nobody else should
  munged --force --key-file="$dir/munge/key" --socket="$dir/run/munge.sock" --pid-file="$dir/run/munged.pid" \
    --log-file="$dir/log/munged.log" --seed-file="$dir/munge/seed"
  slurmctld -c
  for ((node = 1; node <= nodes; node++)); do slurmd -c -N "tp$node"; done
  for _ in $(seq 200); do
    if [[ $(timeout 5 sinfo -h -t idle -o %D 2>/dev/null | head -n1) == "$nodes" ]]; then
      settings
      return
    fi
    sleep 0.1
  done
  say "it does not come up; its logs are in $dir/log"
  timeout 5 sinfo -R >&2 || true
  tail -n 5 "$dir"/log/*.log >&2 || true
  stop
  return 1
}

pid_files() { ls "$dir"/run/slurmd-*.pid "$dir/run/slurmctld.pid" "$dir/run/munged.pid" 2>/dev/null || true; }

# a process and all that it started
tree() {
  local child
  echo "$1"
  for child in $(ps -o pid= --ppid "$1"); do tree "$child"; done
}

# whether the process of a pid file still is the daemon that wrote it
lives() { grep -qs "$2" "/proc/$1/comm" && ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"; }

running() {
  local file
  for file in $(pid_files); do
    lives "$(cat "$file")" "$(daemon_of "$file")" && return 0
  done
  return 1
}

daemon_of() {
  local name
  name=$(basename "$1" .pid)
  echo "${name%%-*}"
}

stop() {
  local file pid daemon
  if running; then
    timeout 5 scancel --partition=course --full 2>/dev/null || true
    for _ in $(seq 50); do
      [[ -z $(timeout 5 squeue -h 2>/dev/null) ]] && break
      sleep 0.1
    done
  fi
  for file in $(pid_files); do # munged last: the others need it until they are gone
    pid=$(cat "$file") daemon=$(daemon_of "$file")
    lives "$pid" "$daemon" && kill "$pid" 2>/dev/null
    for _ in $(seq 100); do
      lives "$pid" "$daemon" || break
      sleep 0.1
    done
    lives "$pid" "$daemon" && kill -9 "$pid" 2>/dev/null
    rm -f "$file"
  done
  # a step whose controller went away before it could report stays, and waits: its working folder tells whose it is
  for file in /proc/[0-9]*/cwd; do
    pid=${file#/proc/} pid=${pid%/cwd}
    if [[ $(readlink "$file" 2>/dev/null) == "$dir"/* ]] && lives "$pid" slurmstepd; then
      # shellcheck disable=SC2046
      kill -9 $(tree "$pid") 2>/dev/null || true
    fi
  done
  return 0
}

settings() { printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"; }

case ${1:-} in
start) start ;;
stop) stop ;;
env) settings ;;
*)
  sed -n '2,/^set /p' "$0" | grep '^#' | sed 's/^# \{0,1\}//'
  exit 2
  ;;
esac
