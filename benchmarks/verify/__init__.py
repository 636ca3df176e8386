"""What bsearch claims, measured on this machine.

Each stage is a process of its own with a time limit; it writes claims as it goes, so that nothing is lost when one ends early.
"""
