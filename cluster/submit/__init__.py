"""Studies as batch jobs: one file for each kind of cluster, found as plug-ins by their entry points."""
