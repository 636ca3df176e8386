"""Before the first trial: whether a step equals its splits, whether scores add up, whether data are read alike twice."""
