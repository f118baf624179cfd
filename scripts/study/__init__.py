"""The parts of scripts/scaling_study.py.

plan        what to run: sizes, batches, commands
study_file  study.json, so that a study can be continued
microbatch  the microbatch that all rows share
state_table  how far the runs are, as a table
run_study   the study from start to table
"""
