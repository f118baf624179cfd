"""The trainer: `python -m train DATA`. Importing the package itself imports nothing.

__main__      the command: from flags to an exit code
config        what a run is asked to do
paths         the paths that flags name
run           the story: prepare, train, evaluate, stop or finish
attempt       a rank before it is prepared: joins, or ends with the others
prepare       from flags to a trainer that can start
open_data     the data, fetched and opened once a node
torch_data    the same data for any PyTorch loop: open_images, batches
run_folder    the folder of a run: given, found again or new; locked
device        which device a rank computes on
recipe_table  every published value, with its source
recipe        what a batch size gets, and the schedules
optim         LARS, the optimisers, the moving average
step          one optimiser step: the hot path
microbatch    as many images at once as every GPU takes
feed          the batches from where a run stands
evaluate      accuracy that counts every image once; -e
epoch         where a run stands, and the epoch under way
saving        checkpoints, a stop, the end: all ranks together
failure       how a run ends badly, said once

ranks/        the ranks of a job: who they are, how they meet, talk and stop together
stream/       a run whose tar is still arriving
data/         images to batches
network/      the network that is trained
records/      what a run writes down
checkpoints/  states on the disk: whole or not at all, found again, gone on from
"""

__version__ = "0.2.0.dev0"  # of the package; pyproject.toml and CITATION.cff follow it
