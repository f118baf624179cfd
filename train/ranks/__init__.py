"""The ranks of a job: who they are, how they meet, talk and stop together.

launch_variables  variables of launchers and SLURM's short forms, read strictly
batch_system      the job, as SLURM or HTCondor has it
launch            who am I: every launcher
cpus              how many cores are ours
cpu_isa           which instructions bf16 may use
gpus              GPUs that were given and GPUs that compute
compat            calls that differ between versions of torch
rendezvous        how the ranks find each other
interfaces        which network device they talk over
watch             who is missing when the ranks stand still
comm              the collectives, and who failed
nodes             which ranks are on which node
rank_log          what a rank prints
interrupt         signals: the ranks agree on the step; a second Ctrl-C
"""
