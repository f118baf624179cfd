"""What needs both the network and the archive: an object that is read while it arrives.

window         the transfer of an object of which only a part is held at a time
resumable_md5  an MD5 that a later process can go on with
pass_state     what a killed pass has reached, in a file
forward_pass   one pass over an object: transferred, hashed, walked
index_url      the index of a tar that stays where it is
arrivals       which MiB of an object are here, for all readers of a node
node_folder    the temporary folder of a stream on its node
spec           what the trainer tells the fetcher
find_index     the index that a stream goes by
plan           what a stream of a URL takes
need_map       the chunks of an object in the order of need
asked_map      the chunks of an object, what readers wait for first
unit_map       which units are here, where not all are kept
unit_plan      the steps of each epoch that use each unit
unit_cache     the folder of the units, and which of them stay
unit_costs     what the units have cost
unit_request   one unit on its way over one connection
unit_fetch     brings units by need, each as its own range
bounded        a stream whose disk is bounded
fetcher        the process of a node that fills its files
keeper         starts the fetcher, and starts it again
node           the stream of a node: its folder, its fetcher
meeting        where the processes of a node find each other's stream
"""
