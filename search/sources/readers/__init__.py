"""A reader for each kind of source: `read(source)` yields its runs, with the source's own library where one is needed."""
