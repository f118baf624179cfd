"""A real HTCondor pool on one machine: a Debian 13 root in namespaces of its own."""
