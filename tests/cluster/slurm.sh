#!/bin/bash
# A real Slurm on this one machine: slurmctld and three slurmd, without cgroups, systemd and a database. As root.
# Needs slurm-wlm and munge.
#   slurm.sh start FOLDER   then: export SLURM_CONF=FOLDER/slurm.conf
#   slurm.sh stop FOLDER    ends its jobs and daemons
set -eu
RUN=$2
BASE=${SLURM_BASE_PORT:-18000}

start() {
  mkdir -p "$RUN"/{state,log,spool} /run/munge
  chmod 755 "$RUN"
  if ! munge -n </dev/null >/dev/null 2>&1; then
    chown munge:munge /run/munge; chmod 755 /run/munge
    setpriv --reuid=munge --regid=munge --clear-groups /usr/sbin/munged
    touch "$RUN/munged.ours"
    for _ in $(seq 50); do munge -n </dev/null >/dev/null 2>&1 && break; sleep 0.1; done
  fi
  HOST=$(hostname -s)
  export SLURM_CONF=$RUN/slurm.conf
  {
    cat <<CONF
ClusterName=tiny
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$BASE
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$RUN/state
SlurmdSpoolDir=$RUN/spool/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd-%n.pid
SlurmctldLogFile=$RUN/log/slurmctld.log
SlurmdLogFile=$RUN/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=60
MessageTimeout=60
KillWait=60
OverTimeLimit=0
InactiveLimit=0
MinJobAge=3600
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
CompleteWait=0
SrunPortRange=$((BASE + 500))-$((BASE + 999))
SlurmdParameters=config_overrides
CONF
    for k in 0 1 2; do
      echo "NodeName=n$k NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((BASE + 10 + k)) CPUs=4 Boards=1" \
        "SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=8000 State=UNKNOWN"
    done
    echo "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=off"
    echo "PartitionName=low Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60"
  } >"$SLURM_CONF"
  slurmctld -c
  for k in 0 1 2; do mkdir -p "$RUN/spool/n$k"; slurmd -N "n$k"; done
  for _ in $(seq 150); do
    [ "$(sinfo -h -p all -N -o %t 2>/dev/null | grep -c '^idle$')" = 3 ] && return; sleep 0.2
  done
  sinfo -N -l; exit 1
}

stop() {
  export SLURM_CONF=$RUN/slurm.conf
  [ -f "$SLURM_CONF" ] || return 0
  squeue -h -o %A 2>/dev/null | xargs -r scancel --signal=KILL --full 2>/dev/null || true
  squeue -h -o %A 2>/dev/null | xargs -r scancel 2>/dev/null || true
  for _ in $(seq 50); do [ -z "$(squeue -h 2>/dev/null)" ] && break; sleep 0.2; done
  for f in "$RUN"/slurmctld.pid "$RUN"/slurmd-*.pid; do [ -f "$f" ] && kill "$(cat "$f")" 2>/dev/null || true; done
  for _ in $(seq 50); do ls "$RUN"/*.pid >/dev/null 2>&1 || break; sleep 0.2; done
  [ ! -f "$RUN/munged.ours" ] || kill "$(cat /run/munge/munged.pid)" 2>/dev/null || true
}

"$1"
