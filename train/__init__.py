"""The trainer: `python -m train DATA`. Importing the package itself imports nothing."""
