"""Analysis of a study's trials: the front and its confidence, the scaling rules they support, and the models behind both."""
