"""Files that travel between hosts over HTTP: in verified chunks, served under their checksums."""
