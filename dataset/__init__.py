"""Bytes to images: archives, indexes, extraction, transfers. Nothing here imports torch.

errors          exit codes, and the exceptions that carry them
flags           the flags of a command, from a dataclass
packages        whether this Python can run a command at all
redaction       text without secrets
untrusted       numbers and JSON that others wrote
words           numbers with their nouns: 1 image, 2 images
spelling        percent-encoded in addresses, bytes on the disk
names           the archives, their labels and index, what is an image
own_names       names of our own files beside the objects
durable         locks, whole files, space: what a kill cannot spoil
checksum        sums of pieces, combined into that of the whole
known_archives  sizes and digests of the real archives
byte_meter      a bar or plain lines for a long pass

federation/     who has the object: a federation is asked until it is clear or time is up
transfer/       the bytes of one object: many connections, several servers, one file
fetch/          the story of a fetch: from URLs to verified files with their final names
archive/        archives and folders of images: walked, indexed, extracted
stream/         what needs both the network and the archive: read while it arrives
fake/           a fake ImageNet for tests and demos: the same bytes for the same seed
"""
