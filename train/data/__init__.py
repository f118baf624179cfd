"""Images to batches.

sources         where images come from: class folders, or an indexed tar
splits          a data set: its training and validation images
sampler         which images make up global step k
streamed_order  an order of images that can be streamed from a tar
sample_order    the order of a run: uniform or streamed
tar_layout      where samples lie in their tar, by its index
jpeg            the JPEG kernel (jpeg_crop.c): built once
decode          one image from bytes to pixels
readers         how many threads read at a time, and what
batches         which batches, and how each is made
loader          batches ahead of the training
patience        waiting for a batch without being stuck
"""
