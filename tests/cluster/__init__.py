"""The real services that the tests run on, one package each, with the same five functions.

A service package (slurm, condor, osdf) has in its `service` module:
  missing() -> str | None   why it cannot run on this machine ("needs root and apt"), or None
  is_up() -> bool           whether it runs and answers
  up() -> None              installs and starts it; quick when up; cleans up after a crash
  down() -> None            stops it: no process, mount or device is left; fine when it is down
  how_to_use() -> str       a few lines for a person: what to export and a command to try
"""

SERVICES = ("slurm", "condor", "osdf")
