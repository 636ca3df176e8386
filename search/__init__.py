"""What happens on the driver, in five subpackages, each importing only from those before it.

`analysis`: what trials say. `store`: the database. `suggest`: what to try next, and when to stop. `run`: one study's life.
`report`: what people see.
"""
