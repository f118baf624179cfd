"""Who has the object: a federation is asked until it is clear or time is up.

pelican     URLs, discovery and the director's answers, parsed
tokens      where a token or password is found, and who may see it
reach       which addresses may be connected to
tls         whom https trusts
framing     headers of an answer: where its body ends
connection  HTTP with connections that are kept, and cut when they stall
document    small documents over HTTP; one that drips is cut
network     whether this machine reaches a host at all
servers     the servers of an object: which to ask next
telling     a problem that comes back is told once
lookup      asks the director again and again
webdav      what a WebDAV server says of a folder, parsed
collection  folders of a federation as a tree of files
"""
