"""A fake ImageNet for tests and demos: the same bytes for the same seed.

picture   pictures whose classes a network can learn
draw      drawn on many cores, in order
archives  packed as the real archives are
make      made once, found again
alike     class folders in the shape of two published workflows
"""
