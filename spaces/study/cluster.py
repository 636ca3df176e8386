"""Where trials run."""

from __future__ import annotations

from pydantic import Field, StrictInt, StrictStr

from ..domain import Number, PathText, Section


class Cluster(Section):
    """Where trials run."""

    address: StrictStr = Field(
        "local",
        min_length=1,
        description="The Ray cluster that trials run on; local: start one here; auto: join a running one, otherwise local; or "
        "host:port of its head node.",
    )
    trials_at_once: StrictInt | None = Field(
        None, ge=1, description="Maximum number of concurrent trials; default: as many as fit."
    )
    checkpoints: PathText | None = Field(
        "results",
        description="Where trials store the checkpoints that they resume from after a failure: a folder, or a URL such as "
        "s3://bucket/runs, that all workers can reach; null: no checkpoints.",
    )
    checkpoint_every_s: Number = Field(
        60,
        ge=0,
        description="Seconds after which a trial writes the next checkpoint, at an evaluation or between two; 0 writes one at "
        "every evaluation and none in between. Your own training loop writes them wherever it checks `checkpoint.due()`.",
    )
