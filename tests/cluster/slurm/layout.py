"""Where the test SLURM keeps its files, which ports and devices it has, and its configuration."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.lifetime import instance, state_folder

HOME = state_folder("slurm")
CONF = HOME / "slurm.conf"
MUNGE_SOCKET = HOME / "munge.socket"
MUNGE_KEY = HOME / "munge.key"

NODES = ("n1", "n2", "n3", "n4")
GPUS_PER_NODE = 4
CONTROLLER_PORT = 16817 + 100 * instance()
FIRST_NODE_PORT = 17001 + 100 * instance()
_DEVICE = f"/dev/fakegpu{instance()}-" if instance() else "/dev/fakegpu"
DEVICES = [Path(f"{_DEVICE}{k}") for k in range(GPUS_PER_NODE)]
# Two SLURMs on one machine must not give one job id twice at a time: the trainer derives its ports
# and its token from the id, and ranks of one cluster's job then join those of the other's.
FIRST_JOB_ID = 1 + 100_000 * instance()

# Each node is sized like a GPU node of a real site, so that slurm/train.sbatch runs with its own
# defaults: SLURM counts, the cores of this machine do the work. KillWait and the timeouts are
# longer than SLURM's own, for a busy machine. NoInAddrAny keeps the daemons on loopback.
# SchedulerParameters: by default SLURM starts a new job after 3 s and a requeued one within 30 s.
SLURM_CONF = f"""\
ClusterName=trainyard
SlurmctldHost=localhost
SlurmctldPort={CONTROLLER_PORT}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={MUNGE_SOCKET}
KillWait=120
MessageTimeout=60
BatchStartTimeout=120
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={HOME}/state
SlurmctldPidFile={HOME}/slurmctld.pid
SlurmctldLogFile={HOME}/slurmctld.log
SlurmdSpoolDir={HOME}/spool-%n
SlurmdPidFile={HOME}/slurmd-%n.pid
SlurmdLogFile={HOME}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
MinJobAge=3600
FirstJobId={FIRST_JOB_ID}
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-{len(NODES)}] NodeHostname=localhost NodeAddr=127.0.0.1 \
Port=[{FIRST_NODE_PORT}-{FIRST_NODE_PORT + len(NODES) - 1}] CPUs=64 RealMemory=512000 \
Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN
PartitionName=gpu Nodes=n[1-{len(NODES)}] Default=YES MaxTime=INFINITE State=UP
PartitionName=cpu Nodes=n[1-{len(NODES)}] MaxTime=INFINITE State=UP
"""
# GPUs that are only counted make a node INVALID: each needs a device file.
GRES_CONF = f"NodeName=n[1-{len(NODES)}] Name=gpu File={_DEVICE}[0-{GPUS_PER_NODE - 1}]\n"
