"""A training's memory: traced or counted, as a GPU's allocator would hold it, and what of it fits."""
