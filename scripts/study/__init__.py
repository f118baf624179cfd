"""The parts of scripts/scaling_study.py.

plan        what to run
microbatch  the microbatch that all rows share
batches     sbatch files
jobs        how points are started
state       how far they are
story       the study from start to table
"""
