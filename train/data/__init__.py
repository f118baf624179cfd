"""Images to batches.

sources         a folder of classes, or an indexed tar
listing         opened by one rank a node for all of them
sampler         which images make up global step k
streamed_order  an order of images that can be streamed from a tar
jpeg            the JPEG kernel (jpeg_crop.c): built once
decode          one image from bytes to pixels
reads           what is being read at this moment
pace            how many threads read at a time
batches         which batches, and how each is made
loader          batches ahead of the training
patience        waiting for a batch without being stuck
"""
