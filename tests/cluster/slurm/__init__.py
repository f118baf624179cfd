"""The real SLURM that the tests run on: 4 nodes x 4 GPUs on one machine, on loopback only."""
