"""The parts of scripts/search.py, and of condor_study.py --search.

space        which flags are searched, and between what
search_file  search.json, and the training that a trial is
journal      Optuna's journal: mended after a kill, made again from the folders
store        the trials, in their folders and in the journal
trial_jobs   their jobs: each in a slot of its own, submitted once
results      their metric, the best one's command, what is kept
run_search   the search from its first trial to its best
chain        a search as a chain of SLURM jobs
dag          a search as a DAG of HTCondor's
node         the PRE and POST scripts of that DAG
"""
