"""A mini-OSDF on loopback: real XRootD origin and caches, a small director, faults on command."""
