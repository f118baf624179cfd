"""States on the disk: whole or not at all, found again, gone on from.

torch_file  files of torch.save with a checksum
snapshot    a state in host memory, at the cost of one copy
checkpoint  the two latest and the best
resume      what a run goes on from
pretrained  torchvision's own weights: brought along, cached or fetched
"""
