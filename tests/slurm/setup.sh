#!/usr/bin/env bash
# A Slurm of one machine, for the tests marked `slurm`: controller, node and munge on loopback, all under one folder.
#   apt-get install slurm-wlm munge
#   tests/slurm/setup.sh start [FOLDER]    prints the line to put into the environment
#   tests/slurm/setup.sh stop [FOLDER]
# It must run as root, which slurmd needs in order to start jobs. FOLDER defaults to /tmp/anchor-nb-slurm.
set -euo pipefail
verb=${1:-start} folder=${2:-/tmp/anchor-nb-slurm}
export SLURM_CONF=$folder/slurm.conf

stop() {
  for name in slurmd slurmctld munged; do
    if [ -f "$folder/$name.pid" ]; then kill "$(cat "$folder/$name.pid")" 2>/dev/null || true; fi
  done
}

write_configuration() {
  local host; host=$(hostname -s)
  mkdir -p "$folder"/{state,spool,munge}
  chmod 755 "$folder"; chmod 700 "$folder/munge"
  [ -f "$folder/munge/key" ] || (umask 077; head -c 1024 /dev/urandom > "$folder/munge/key")
  # linuxproc: containers have no cgroups to give away. cred_expire: a requeued job may start again after so many seconds instead of 120.
  cat > "$SLURM_CONF" <<CONF
ClusterName=anchor
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
SlurmctldPort=${SLURM_PORT:-16817}
SlurmdPort=$((${SLURM_PORT:-16817} + 1))
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=30
JobRequeue=1
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024 - 100)) State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
}

start() {
  for program in munged slurmctld slurmd sbatch; do
    command -v "$program" >/dev/null || { echo "no $program here: apt-get install slurm-wlm munge" >&2; exit 1; }
  done
  stop
  rm -rf "$folder"
  write_configuration
  munged --force --socket="$folder/munge/socket" --key-file="$folder/munge/key" --pid-file="$folder/munged.pid" \
         --seed-file="$folder/munge/seed" --log-file="$folder/munge/munged.log"
  slurmctld -c -f "$SLURM_CONF"
  slurmd -c -f "$SLURM_CONF"
  for _ in $(seq 60); do
    if [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ]; then echo "export SLURM_CONF=$SLURM_CONF ANCHOR_NB_SLURM=1"; return; fi
    sleep 0.5
  done
  echo "Slurm did not come up; see $folder/slurmctld.log and $folder/slurmd.log" >&2
  stop
  exit 1
}

case $verb in start|stop) $verb;; *) echo "setup.sh start|stop [FOLDER]" >&2; exit 2;; esac
