"""The ranks of a job: who they are, how they meet, talk and stop together.

launch_variables  variables of launchers, read strictly
hostlist          SLURM's short forms of hosts and tasks
launch            who am I: every launcher
batch_system      what SLURM and HTCondor say of the job
cpus              how many cores are ours
cpu_isa           which instructions bf16 may use
gpus              GPUs that were given and GPUs that compute
compat            calls that differ between versions of torch
rendezvous        how the ranks find each other
interfaces        which network device they talk over
nccl              NCCL's last words
watch             who is missing when the ranks stand still
comm              the collectives, and who failed
interrupt         a signal: the ranks agree on the step
ctrl_c            the second Ctrl-C ends a rank at once
"""
