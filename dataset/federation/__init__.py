"""Who has the object: a federation is asked until it is clear or time is up.

pelican     URLs, discovery and the director's answers, parsed
tokens      where a token or password is found, and who may see it
reach       whom we can reach, and where a server may send us
tls         whom https trusts
framing     headers of an answer: where its body ends
connection  HTTP with connections that are kept, and cut when they stall
document    small documents over HTTP; one that drips is cut
servers     the servers of an object: which to ask next
lookup      asks the director again and again; a problem is told once
webdav      what a WebDAV server says of a folder, parsed
collection  folders of a federation as a tree of files
"""
