"""Images to batches.

sources         where images come from: class folders, or an indexed tar
network_meter   what the network costs a rank: hits, misses, waiting
stream_source   the images of a tar that is still arriving
unit_source     the images of a tar of which only some units are here
splits          a data set: its training and validation images
sampler         which images make up global step k
val_share       validation images held out of the training set
lanes           the set dealt out to nodes with disks of their own
streamed_order  an order of images that can be streamed from a tar
sample_order    the order of a run: uniform or streamed
tar_layout      where samples lie in their tar, by its index
needs           when a run first needs each MiB of its tar
unit_needs      when a run uses each unit, and the least disk for it
bounded_cache   a disk that holds a part of the tar: divided, planned
jpeg            the JPEG kernel (jpeg_crop.c): built once
decode          one image from bytes to pixels
readers         how many threads read at a time, and what
batches         which batches, and how each is made
loader          batches ahead of the training
image_dataset   images one by one, in place of torchvision's ImageFolder
resumable       ready batches for any loop, and where it stands
patience        waiting for a batch without being stuck
"""
