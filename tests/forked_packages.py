"""What the process that scripts are forked from imports, once: packages, and nothing of ours."""

import importlib

STANDARD = (
    "argparse", "asyncio", "concurrent.futures.process", "csv", "http.client", "logging.handlers",
    "sqlite3", "ssl", "urllib.request", "zipfile",
)  # fmt: skip
PACKAGES = (
    "numpy", "PIL.Image", "matplotlib.figure", "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg", "submitit", "tqdm", "optuna",
)  # fmt: skip

for name in STANDARD + PACKAGES:
    importlib.import_module(name)
