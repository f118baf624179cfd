"""The story of a fetch: from URLs to verified files with their final names.

request        what one command was told
summary        what a fetch did, as JSON
ledger         the output folder: its lock, its space, its record
size           the size of an object by a vote, its digest
digests        digests of the whole, beside the transfer
compare        wrong bytes found at other sources' copies
acceptance     what a file must pass before it gets its name
object         one object: look up, resume, transfer, verify
index_beside   the index that may lie beside a tar
small_digests  the origin's digests of small files
small_files    many small files, one request each
display        what a person sees of a transfer
urls           URLs into a folder; data for a training
inspect        what a fetch would do
"""
