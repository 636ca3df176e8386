"""Runs that were made without bsearch: read from tables and trackers, and told in its terms."""
