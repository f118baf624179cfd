"""The parts of scripts/scaling_study.py.

plan        what to run
microbatch  the microbatch that all rows share
batches     the batch of each size
jobs        how runs are started
state       how far they are
run_study   the study from start to table
"""
