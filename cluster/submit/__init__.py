"""Studies as batch jobs: one module per kind of cluster, registered as plug-ins by entry points."""
