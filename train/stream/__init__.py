"""A run whose tar is still arriving: planned, fetched by need, proven.

run_stream   the story, on each rank
early        it begins while torch is still being imported
task         what the fetcher of a run is told
nodes        what nodes agree on: who streams what; the end, when all is proven
loop_stream  the stream of a URL for a loop that is not ours
"""
