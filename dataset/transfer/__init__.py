"""The bytes of one object: many connections, several servers, one file.

own_files   our files, opened so that none of the user suffers
journal     which MiB have arrived, beside the partial file
resume      what an earlier start left
chunk_sums  sums of chunks and blocks, hashes of a growing file
waste       what was fetched for nothing
blocks      which chunks are missing, being fetched or there
dispatch    who fetches what from where: leases, hedges
receive     one range over one connection, checked
store       chunks into the file, in an order that survives a kill
engine      the threads and their supervisor
"""
