"""Tables and pictures from records. Nothing here imports torch.

table            a table as Markdown, CSV and JSON
words            numbers and times as people read them
record_shape     a run.json in the shape that tables rely on
published_table  a published CSV: its rows, and who published it
example_logs     logs of pytorch/examples, read as runs
runs             runs from folders and published tables
differences      what differs between two runs
fit              T(N) = a/N + b + c*log2(N)
scaling          studies: baselines, efficiencies, predictions
phases           where the time of each point went
streams          runs that trained while their tar arrived
scaling_tables   the table with the published columns
curves           loss and accuracy by epoch
stages           what each stage used of the machine
workflows        whole workflows and placements, as published
provenance       where the numbers of a page come from
evaluation       predictions.csv: classes, confusions, calibration
plots            the pictures of the page
html             HTML from tables, pictures and words
evaluation_html  the page's part on evaluations
page             the page

search/          searches of flags: from the folders of trials to tables and pictures
grid/            grid jobs: from HTCondor's event logs to the tables of the OSG study
"""
