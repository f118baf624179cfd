"""Trainings as jobs, on this machine or SLURM, and how far they are.

train_run     one training, and where it runs
folder_flags  the flags of a command on the folder of a study
run_folder    the folder of a study: its lock, and paths relative to it
submit        how trainings are started and ended
state         how far they are
"""
