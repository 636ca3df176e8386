"""What happens on a worker: the user's task, exact batches, the training loop and its measurements.

Start with `Task`: write `data` and `model`, and everything else has a default.
"""

from ..spaces.trial import Measurement, TrialSetup
from .batches import SampleKeys
from .checkpoint import Checkpoint
from .task import Data, Loss, Score, Task

__all__ = ["Checkpoint", "Data", "Loss", "Measurement", "SampleKeys", "Score", "Task", "TrialSetup"]
