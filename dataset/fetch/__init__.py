"""The story of a fetch: from URLs to verified files with their final names.

request        what one fetch was told, and what it did
ledger         the output folder: its lock, its space, its record
size           the size of an object by a vote
digests        digests of the whole: computed beside the transfer, asked of servers
verify         what a file must pass, and the search for its wrong bytes
job            what is to be done for one object
object         one object: look up, resume, transfer, verify
index_beside   the index that may lie beside a tar
small_digests  the origin's digests of small files
small_files    many small files, one request each
display        what a person sees of a transfer
urls           URLs into a folder; data for a training
inspect        what a fetch would do
"""
