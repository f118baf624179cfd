"""What the process that scripts are forked from imports, once: packages, and nothing of ours."""

import gc
import importlib

STANDARD = (
    "argparse", "asyncio", "concurrent.futures.process", "csv", "http.client", "logging.handlers",
    "sqlite3", "ssl", "urllib.request", "zipfile",
)  # fmt: skip
PACKAGES = (
    "numpy", "PIL.Image", "matplotlib.figure", "matplotlib.backends.backend_agg",
    "matplotlib.backends.backend_svg", "submitit", "tqdm", "optuna",
)  # fmt: skip

HELPER = "tests.forked_command"  # each child would import it, to find what it is to do

for name in (*STANDARD, *PACKAGES, HELPER):
    importlib.import_module(name)

gc.collect()
gc.freeze()  # a child's collector need not walk through all of this, nor copy it
