"""The parts of scripts/scaling_study.py: what to run (plan), how (jobs), how far it is (state)."""
