"""What a run will find: the parts of scripts/doctor.py, and the check of a grid study.

surroundings  launch, job, CPUs, packages, GPUs
supplies      data, space, network
supply_state  the data as the next command needs it
place         where this process is: folders, tools, Python
next_step     the next command for this place
first_hour    what a GPU does with the trainer (--gpu)
study_data    the data of a grid study (condor_study.py)
"""
