"""The network that is trained.

model       the network, and weights in and out
fine_tune   the last layer and the rest, which stays or moves slowly
batch_norm  batch norm that does not depend on the ranks
"""
