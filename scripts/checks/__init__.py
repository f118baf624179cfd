"""The parts of scripts/doctor.py: what a run will find.

surroundings  launch, job, CPUs, packages, GPUs
supplies      data, space, network
supply_state  the data as the next command needs it
place         where this process is: folders, tools, Python
next_step     the next command for this place
first_hour    what a GPU does with the trainer (--gpu)
"""
