"""Grid jobs: from HTCondor's event logs to the tables of the OSG study.

eventlog_split  cuts a log into its events
eventlog_parse  HTCondor's reader, in a process of its own
eventlog        logs as a list of events
jobs            the parts of a job's story
history         the events of each job
rows            one row per job
totals          the study's totals and shares
osg_study       the study's own tables
report          from files to the figures of a report
tables          the report as tables
replay          the study's jobs with other ways to bring the data, as tables
plots           the study's four pictures, and those of a replay
"""
