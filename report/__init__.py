"""Tables and pictures from records. Nothing here imports torch."""
