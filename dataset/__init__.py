"""Bytes to images: archives, indexes, extraction, transfers. Nothing here imports torch."""
