"""The story of a fetch: from URLs to verified files with their final names.

request        what one command was told
summary        what a fetch did, as JSON
folder         the output folder: its lock, its space, its record
probe          the size of an object by a vote, its digest
digests        digests of the whole, beside the transfer
compare        wrong bytes found at other sources' copies
acceptance     what a file must pass before it gets its name
object         one object: look up, resume, transfer, verify
index_beside   the index that may lie beside a tar
small_digests  the origin's digests of small files
small          many small files, one request each
progress       what a person sees of a transfer
remote         URLs into a folder; data for a training
dry_run        what a fetch would do
"""
