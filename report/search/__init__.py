"""Searches of flags: from the folders of trials to tables and pictures.

trials      the trials of a search
importance  how much each searched flag matters, by Optuna
tables      the trials and the importances as tables
charts      the pictures of a search
"""
