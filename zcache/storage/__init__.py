"""All file I/O and threads: the store's directories, reading entries, writing them in the background."""
